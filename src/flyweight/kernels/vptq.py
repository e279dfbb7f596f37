"""VPTQ weights on the GPU: which kernel multiplies with one, and its launch.

`prepare` lays a weight out once (see vptq_layout.py) and keeps nothing else of it; `join` makes one linear of several that share
x, each of which then has some of a launch's thread blocks. One or two rows multiply straight from the codebook (cuda/vptq.cu),
up to 128 through warpgroup products (vptq_rows.py); for more the weight is decoded into a scratch that torch multiplies with, or
gemm.cu, where silu·mul follows.
A weight no kernel takes (very long vectors, large residual books) is decoded once: `why` says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import choices, gemm, jit, vptq_decode, vptq_rows
from flyweight.kernels.gemv import Gemv, processors
from flyweight.kernels.vptq_layout import CHUNK, SLICE_BITS, Layout, lay_out, why_not
from flyweight.kernels.vptq_parts import Ends, Parts, part_arguments, share_out
from flyweight.tensors import VectorQuant

KERNELS = {"staged": 0, "direct": 1, "sliced": 2}
FEW_ROWS = 8  # of vptq.cu at once
FEWEST_PRODUCTS = 3  # rows from which on warpgroup products are faster
GATHERED_ROWS = 16  # most rows of vptq.cu, where there are no warpgroup products
MILLION = 1 << 20

# Borders in lookups (weights / vector length), from the measurements on one H200.
DIRECT_ITEMS = MILLION // 4  # fewer do not pay for staging a codebook: 2048 × 1024
HALF_ITEMS = MILLION // 2  # so few that half of the processors are faster: the next launch stages its codebook on the rest
CROWDED_ITEMS = 2 * MILLION  # up to here two launches on one processor pay for fewer copies of the residual book
DOUBLED_ITEMS = 6 * MILLION  # from here a second copy of a codebook up to 4096 entries pays for its staging


@dataclass(frozen=True)
class Launch:
    """What of a launch is a matter of speed only."""

    kernel: str
    warps: int = 16
    copies: int = 8  # of the residual book
    resident: int = 1  # 2: small enough that the next launch stages its codebook while this one ends
    share: int = 1  # 2: one thread block for every second multiprocessor


@dataclass(frozen=True)
class Plan:
    """A launch for one number of rows, worked out."""

    launch: Launch
    rows: int
    ctas: tuple[int, ...]  # of each part
    shared: int  # bytes of dynamic shared memory
    phase: int = 0  # chunks whose x is staged at once
    x_columns: int = 0  # columns that the staged x has room for


@functools.cache
def shared_limit(device: torch.device, resident: int) -> int:
    """Shared memory of one thread block, 1 KB of which the system takes."""
    properties = gpu.properties(device)
    return min(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor // resident - 1024)


def candidates(parts: Parts, rows: int, *, plain: bool = True) -> list[Launch]:
    """Launches for this weight, the fastest first. `plain`: nothing but the product."""
    layout = parts[0]
    items = sum(part.row_blocks for part in parts) * 256 * layout.chunks
    if layout.sliced:
        return [Launch("sliced", warps=32 if rows <= 2 else 16, copies=copies) for copies in (8, 4, 2, 1)]
    alone = rows == 1 and plain and len(parts) == 1
    table = [
        (alone and layout.dense is None and items <= DIRECT_ITEMS, Launch("direct", warps=max(1, min(8, layout.chunks)))),
        (rows == 1, Launch("staged", resident=2)),
        (rows == 1 and items <= CROWDED_ITEMS, Launch("staged", resident=2, copies=4)),
        (plain and items <= HALF_ITEMS, Launch("staged", share=2)),
    ]
    return [launch for fits, launch in table if fits] + [Launch("staged", copies=copies) for copies in (8, 4, 2, 1)]


def plan(parts: Parts, launch: Launch, rows: int, *, count: int, limit: int) -> Plan | None:
    """Work a launch out for `count` multiprocessors, or None where it does not fit into `limit` bytes."""
    layout = parts[0]
    halves, form = layout.halves, layout.form
    books = 16 * halves * ((1 << form.main) + (launch.copies << form.residual if form.residual else 0))
    static = math.ceil((16 + 8 * rows * (launch.warps + 1)) / 128) * 128  # the kernel's own variables
    if launch.kernel == "direct":
        return Plan(launch, rows, (layout.row_blocks,), 512 * layout.chunks) if 512 * layout.chunks <= 16384 else None
    if launch.kernel == "sliced":
        shared = books + 2 * rows * (layout.dense_begin + 32 * layout.dense_steps)
        grid = max(1, min(count // layout.slices, layout.row_blocks)) * layout.slices
        return Plan(launch, rows, (grid,), shared) if shared + static <= limit else None
    blocks = tuple(part.row_blocks for part in parts)
    ctas = share_out(blocks, count // launch.share)
    here, align = max(math.ceil(b / c) for b, c in zip(blocks, ctas, strict=True)), max(1, form.window // CHUNK)
    for several in (False, True):  # phases: then the sums of the row blocks need room of their own
        fixed = books + 4 * rows * 8 * halves * (launch.warps + here + here * several)
        most = ((limit - static - fixed) // (2 * rows) - 32 * layout.dense_steps) // (256 * align) * align  # chunks of x
        if several and (launch.resident > 1 or most < CHUNK):
            return None
        if several or most >= layout.chunks:
            break
    phase = math.ceil(math.ceil(layout.chunks / math.ceil(layout.chunks / most)) / align) * align
    x_columns = 256 * min(phase, layout.chunks) + 32 * layout.dense_steps
    return Plan(launch, rows, ctas, fixed + 2 * rows * x_columns, phase, x_columns)


@dataclass(frozen=True, eq=False)
class Vptq:
    """Weights with one input in the kernels' layout, their outputs side by side; call it with x [..., in]."""

    parts: Parts
    arrived: Tensor  # int32 counters of thread blocks that meet: sliced
    bias: Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict)
    why: str = "up to 128 rows straight from the codebook; more are written out in 16 bits for cuBLAS, or gemm.cu and silu·mul"

    @property
    def layout(self) -> Layout:
        return self.parts[0]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor, out: Tensor | None = None, *, launch: Launch | None = None, pdl: bool = True) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        result = None if out is None else out.view(-1, self.out_features)
        return self.fused(flat, result, launch=launch, pdl=pdl).view(*x.shape[:-1], -1)

    @functools.cached_property
    def tiles(self) -> Gemv:
        """Gate and up in 16-bit tiles, which are written for each call."""
        return Gemv("plain", self.layout.stream[:0], None, None, None, self.out_features, self.layout.in_features, group=64,
                    interleaved=True, dtype=self.layout.dtype, scale_fp16=False, by_rows=True)

    def takes_silu(self, rows: int, device: torch.device) -> bool:
        """Whether so many rows' products of gate and up are better followed by silu·mul at once."""
        return (rows >= choices.GATED.rows and self.bias is None and vptq_decode.takes_silu(self.parts)
                and gemm.why_not(self.tiles, gemm.padded_rows(rows), device) is None)

    def _by_products(self, rows: int, device: torch.device) -> bool:
        return FEWEST_PRODUCTS <= rows <= vptq_rows.MOST and vptq_rows.takes(self.parts, rows, device)

    def packed_results(self, rows: int, kv_heads: int) -> vptq_rows.Packed | None:
        """Where decode attention leaves x ready for the product; None where it cannot."""
        device = self.layout.affine.device
        return vptq_rows.packed_results(self.parts, rows, kv_heads, device) if self._by_products(rows, device) else None

    def fused(self, x: Tensor | vptq_rows.Packed, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
              gated: bool = False, silu: bool = False, residual: Tensor | None = None, launch: Launch | None = None,
              coming: vptq_rows.Coming | None = None, pdl: bool = True) -> Tensor:
        """x [rows, in], or gate and up of so many inputs (`gated`); the norm before, the residual after, or `silu` (where
        `takes_silu`): silu·mul of gate and up. See `packed_results` for x that is packed; `coming` is what some kernels ask for
        in L2."""
        if silu:
            assert isinstance(x, Tensor)
            written = vptq_decode.dequantize(self.parts, tiles=True)  # by a kernel that the product must not run ahead of
            return gemm.multiply(replace(self.tiles, weights=written), x, out, norm=norm, epsilon=epsilon, pdl=False)
        ends = Ends(norm, epsilon, gated, self.bias, residual)
        rows, device = (x.rows, x.data.device) if isinstance(x, vptq_rows.Packed) else (x.shape[0], x.device)
        if out is None:
            out = torch.empty(rows, self.out_features, dtype=self.layout.dtype, device=device)
        if isinstance(x, vptq_rows.Packed) or self._by_products(rows, device):
            vptq_rows.multiply(self.parts, x, out, ends, coming=coming, pdl=pdl)
        elif rows <= GATHERED_ROWS and not self.layout.sliced:
            self._gather(x, out, ends, launch, pdl)
        else:
            self._plainly(x, out, ends, launch, pdl)
        return out

    def _gather(self, x: Tensor, out: Tensor, ends: Ends, launch: Launch | None, pdl: bool) -> None:
        step = 1 << (min(x.shape[0], FEW_ROWS) - 1).bit_length()
        if step == 4 and not self.layout.sliced:
            step = FEW_ROWS  # which brings x in a better order
        while (chosen := self.choose(step, x.device, launch, plain=not ends.some)) is None:
            if step == 1:
                raise ValueError(f"{self.layout.in_features} inputs do not fit into the shared memory of {x.device}")
            step //= 2
        for begin in range(0, x.shape[0], step):
            here = slice(begin, begin + step)
            run(self, chosen, x[here], out[here], ends.of(here), pdl=pdl)

    def _plainly(self, x: Tensor, out: Tensor, ends: Ends, launch: Launch | None, pdl: bool) -> None:
        """One after the other: what comes before, the product, what comes after."""
        from flyweight.kernels.dispatch import decoder_ops  # which imports this file

        ops = decoder_ops(x.device)
        x = ops.silu_mul(x) if ends.gated else x
        x = x if ends.norm is None else ops.rms_norm(x, ends.norm, ends.epsilon)
        if x.shape[0] > GATHERED_ROWS:
            vptq_decode.multiply(self.parts, x, out, residual=ends.residual)
        else:
            product = out if ends.residual is None else torch.empty_like(out)
            self._gather(x, product, Ends(), launch, pdl)
            if ends.residual is not None:
                torch.add(product, ends.residual, out=out)
        if ends.bias is not None:
            out += ends.bias

    def choose(self, rows: int, device: torch.device, launch: Launch | None = None, *, plain: bool = True) -> Plan | None:
        """The first candidate that fits, or the given one."""
        key = (rows, launch, plain)
        if key not in self.plans:
            tried = [launch] if launch else candidates(self.parts, rows, plain=plain)
            count = processors(device.index or 0)
            plans = (plan(self.parts, c, rows, count=count, limit=shared_limit(device, c.resident)) for c in tried)
            self.plans[key] = next((p for p in plans if p), None)
        return self.plans[key]


def run(weight: Vptq, chosen: Plan, x: Tensor, out: Tensor, ends: Ends, *, pdl: bool) -> None:
    """One launch of up to `chosen.rows` rows."""
    layout, launch = weight.layout, chosen.launch
    defines = layout.form.defines() | ends.defines | {
        "KERNEL": KERNELS[launch.kernel], "PIECES": layout.halves, "COPIES": launch.copies, "ROWS": chosen.rows,
        "FP16": int(layout.dtype == torch.float16), "WARPS": launch.warps, "RESIDENT": launch.resident,
    }
    kernel = jit.load("vptq.cu", defines=defines).kernel(f"vptq_{launch.kernel}")
    columns = (layout.affine, layout.source, x, out)
    shape = (x.shape[0], layout.in_features, layout.out_features, layout.length)
    if launch.kernel == "direct":
        args: tuple = (layout.stream, layout.book, layout.residual, *columns, *shape, layout.chunks)
    elif launch.kernel == "staged":
        args = (*part_arguments(weight.parts, chosen.ctas), x, ends.norm, ends.bias, ends.residual, out, float(ends.epsilon),
                x.shape[0], layout.in_features, weight.out_features, layout.length, layout.chunks, chosen.phase, chosen.x_columns,
                layout.dense_steps)
    else:
        workspace = torch.empty(layout.slices * chosen.rows * layout.row_blocks * 8 * layout.halves, device=x.device)
        args = (layout.stream, layout.offsets, layout.book, layout.residual, layout.dense, *columns, workspace, weight.arrived,
                *shape, layout.row_blocks, layout.slices, layout.residual_books, layout.ranges, layout.width,
                layout.dense_begin, layout.dense_steps)
    kernel.launch(sum(chosen.ctas), 32 * launch.warps, args, shared=chosen.shared, pdl=pdl)


@dataclass(frozen=True, eq=False)
class Decoded:
    """A weight no kernel takes, decoded once."""

    weight: Tensor
    why: str

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def counters(device: torch.device) -> Tensor:
    """Zero before and after each launch; one for every part of the row blocks, of which there are no more than processors."""
    return torch.zeros(1024, dtype=torch.int32, device=device)


def worth_doubling(tensor: VectorQuant) -> bool:
    """Whether the codebook is stored twice, so that each lookup can choose between two banks."""
    main, residual = tensor.index_bits
    columns = tensor.in_features - tensor.outliers
    small = tensor.length <= 8 and main < SLICE_BITS and main + residual <= 21 and columns <= 16384
    return small and tensor.codebook.shape[0] == 1 and tensor.indices.shape[1] * columns >= DOUBLED_ITEMS


def prepare(tensor: VectorQuant, *, dtype: torch.dtype, doubled: bool | None = None, bias: Tensor | None = None
            ) -> Vptq | Decoded:
    """Lay a weight out for the kernels, or decode it where none takes it."""
    if tensor.experts is not None:
        raise ValueError("a weight per expert: prepare them one by one")
    reason = why_not(tensor, dtype)
    if reason:
        return Decoded(tensor.dequantize(dtype), f"decoded once: {reason}")
    layout = lay_out(tensor, dtype=dtype, doubled=worth_doubling(tensor) if doubled is None else doubled)
    return Vptq((layout,), counters(tensor.device), bias)


def join(weights: Sequence[Any], bias: Tensor | None = None) -> Vptq | None:
    """One linear of several (q, k and v; gate and up), where they are alike in all but their outputs."""
    if not all(isinstance(weight, Vptq) for weight in weights) or len(weights) > 3:
        return None
    parts = tuple(part for weight in weights for part in weight.parts)
    alike = {(part.form, part.halves, part.length, part.dense_steps, part.chunks, part.residual is None) for part in parts}
    if len(alike) > 1 or any(part.sliced for part in parts):
        return None
    return Vptq(parts, counters(parts[0].stream.device), bias)
