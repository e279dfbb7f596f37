"""Which kernel multiplies with how many rows of each format on CUDA, and the numbers behind it: one table, not branches.

A border is where one way becomes faster than another. This command times every way of every format and prints the borders
that it finds:

    python benchmarks/crossovers.py benchmarks/h200/crossovers.jsonl

2:4 weights stay compressed: 5 and 3 bits a weight are memory saved in any case, few rows are bound by bytes, and the sparse
matrix units do more of many rows at once than the dense ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

KERNELS = {
    "gemv": "gemv.cu or, inputs cut into slices, gemv_split.cu",
    "few": "few.cu, where no norm comes before, else batch.cu",
    "batch": "batch.cu",
    "planes": "gemm.cu with integers for x, where groups have 128 inputs, else few.cu",
    "gemm": "gemm.cu",
    "cublas": "cuBLAS, written out in 16 bits for each call",
    "written": "gemm.cu, written out in 16 bits for each call",
}


INPUTS = 4096  # of the linears that the borders of up to 8 rows were measured with
SMALL = 1 << 25  # weights: of qkv and o of an 8-billion model, not of its gate/up and down


@dataclass(frozen=True)
class Way:
    """From `rows` on, `kernel` (of KERNELS) is the fastest; `small`: up to SMALL weights; `deep`: as many inputs as outputs;
    `bare`: without a residual after it, whose x the kernel before may have packed; `gated`: with silu·mul after it."""

    rows: int
    kernel: str
    why: str
    small: bool = False
    deep: bool = False
    bare: bool = False
    gated: bool = False


FEW = Way(1, "gemv", "weights stream through the matrix units once")
SOME = Way(5, "batch", "x, converted once, streams beside the weights")
SIXTEEN = Way(5, "few", "x stays in registers, as it is, half of its inputs in each of two CTAs")
INTEGERS = Way(9, "planes", "four codes are a word, not four 16-bit floats")
ALONE_SMALL = Way(9, "few", SIXTEEN.why, small=True, bare=True)
MANY = Way(33, "gemm", "warpgroup products do more at once")
ALONE = Way(17, "gemm", "a tile to an SM, whose weights are taken apart once for all rows")
CLUSTERS = Way(17, "gemm", "a cluster adds up sooner than slices do", small=True)
DEEP = Way(9, "gemm", CLUSTERS.why, deep=True)
SPARSE = Way(1, "gemv", "5 or 3 bits a weight are read")
GATED = Way(4096, "written", "silu·mul needs no pass of its own", gated=True)
ONCE = "x is quantized once instead of in every CTA"
WAYS: dict[str, tuple[Way, ...]] = {
    "plain": (FEW, SOME, ALONE, Way(4096, "cublas", "no x to pack", deep=True)),
    "int4": (FEW, SIXTEEN, INTEGERS, ALONE_SMALL, ALONE, Way(2048, "cublas", "no x to pack", deep=True, bare=True),
             Way(4096, "cublas", "bf16 products without codes to convert"), GATED),
    "int8": (FEW, SIXTEEN, INTEGERS, ALONE,
             Way(1024, "cublas", "no x to pack, and 8-bit codes take long to convert", deep=True),
             Way(4096, "cublas", "bf16 products are as fast"), GATED),
    "w8a8": (FEW, Way(3, "batch", ONCE), Way(5, "few", "x is quantized in the registers it stays in", small=True),
             Way(8, "gemm", CLUSTERS.why, small=True, bare=True), Way(9, "gemm", CLUSTERS.why, small=True), DEEP,
             Way(65, "gemm", MANY.why)),
    "fp8": (FEW, Way(3, "gemm", ONCE)),
    "sparse-int4": (SPARSE, SOME, CLUSTERS, MANY),
    "sparse-int8": (SPARSE, SOME, CLUSTERS, MANY),
    "sparse-w8a8": (SPARSE, Way(3, "batch", ONCE), Way(9, "gemm", CLUSTERS.why, small=True), MANY),
}
# Most rows for which gemv's products as a part of qkv_attention.cu beat a kernel of their own, where not all: x is quantized in
# every CTA.
MOST_WITHIN = {"w8a8": 4, "fp8": 4, "sparse-w8a8": 4}

# Warps of gemv.cu that multiply: int4 is bound by instructions, the others by how soon x is ready. fp8 and 2:4 take after them.
WARPS = {"plain": 8, "int4": 16, "int8": 8, "w8a8": 8, "fp8": 8, "sparse-int4": 16, "sparse-int8": 8, "sparse-w8a8": 8}
# What an SM does in a microsecond with gemm.cu's largest tiles: tokens · 64 outputs · inputs. 2:4 are estimates.
PRODUCTS = {"plain": 36e3, "int4": 34e3, "int8": 32e3, "w8a8": 68e3, "fp8": 66e3, "sparse-int4": 45e3, "sparse-int8": 45e3,
            "sparse-w8a8": 90e3}
# Whether gate/up and decode attention write the packed x of the gemm.cu that follows them, which saves it pack.cu: the same
# bits, and faster at 64 and at 2,048 rows.
PACKED_AHEAD = True
# Prompts through prefill_attention.cu on Hopper, instead of cuDNN (whole ones) and Triton (chunks): faster at 2,048 tokens and at
# 16,384, and so are the passes around it.
PREFILL_ATTENTION = True
# Up to so many tokens experts.cu multiplies all of them with every expert in use, of which each then reads its weights at the
# pace of memory; more are sorted by expert for gemm.cu, whose tiles of 16 rows cost the same however few are filled. Where x is
# quantized by its row that pays sooner.
EXPERT_TOKENS = {"plain": 8, "int4": 8, "int8": 8, "w8a8": 4, "fp8": 4, "sparse-int4": 8, "sparse-int8": 8, "sparse-w8a8": 8}
# Steps of more rows, but few enough for experts.cu, launch their kernels one after the other: with 8 tokens CTAs that begin early
# gather on some SMs, which takes longer than the overlap saves.
OVERLAPPING_TOKENS = 4


def scaled(rows: int, columns: int) -> int:
    """Rows of INPUTS inputs that are as much x: what few rows cost is fetching and converting x in every CTA."""
    return max(1, rows * min(columns, INPUTS) // INPUTS) if rows <= 8 else rows


@functools.cache
def wanted(kind: str, rows: int, outputs: int = 1, columns: int = INPUTS, *, residual: bool = False, gated: bool = False) -> str:
    """The kernel that is fastest, whether or not it takes the shape."""
    rows, small, deep = scaled(rows, columns), outputs * columns <= SMALL, columns >= outputs
    return next(way.kernel for way in reversed(WAYS[kind])
                if rows >= way.rows and (small or not way.small) and (deep or not way.deep) and not (residual and way.bare)
                and (gated or not way.gated))


def within(kind: str, rows: int, columns: int) -> bool:
    """Whether gemv's products are better a part of a larger kernel; see MOST_WITHIN."""
    return scaled(rows, columns) <= MOST_WITHIN.get(kind, rows)


def explain(kind: str) -> str:
    """The ways of a format with their borders and reasons, for `flyweight info`."""
    return "; ".join(f"from {way.rows} row{'s' * (way.rows > 1)} on {KERNELS[way.kernel]}"
                     + f", up to {SMALL:,} weights" * way.small + ", with as many inputs as outputs" * way.deep
                     + ", without a residual" * way.bare + ", with silu·mul" * way.gated + f" ({way.why})"
                     for way in WAYS[kind])
