"""A linear of 3 to 64 rows: host side of cuda/batch_pack.cu and cuda/batch.cu, and how it is cut.

x is converted once (norm weights multiplied in, W8A8 quantized) into images that the product fetches step by step beside the
weights. `choose` cuts tiles and inputs over the SMs by an estimate (bytes, instructions, steps one after the other); nothing
is measured at run time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.kernels.gemm import buffer
from flyweight.kernels.gemv import BLOCK_BYTES, EPILOGUES, GROUPED, QUANTIZED, Gemv, format_defines, processors
from flyweight.kernels.gemv_split import CLOCK, mail

KINDS = ("plain", "int4", "int8", "w8a8", "sparse-int4", "sparse-int8", "sparse-w8a8")
ROWS = (8, 16, 32, 64)
SHARED_LEAST, SHARED = 116 * 1024, 200 * 1024  # two never fit on an SM; batch_pack's few bytes always fit beside one
WARPS, LOADERS, PACK_WARPS = 12, 4, 8  # 128 registers for each of 12 + 4
MOST_MAIL = 64 << 20
MOST_SLICES = 6  # more were not measured
# Cycles of an SM at CLOCK MHz, fitted to 200 times of Qwen3-8B's linears on an H200 (11 % off on average): a byte of weights; one
# through L2; what each step of 128 inputs waits, however little it has to do; a word of sums written, read and emptied; the
# hand-over itself; a block, for each part of the columns that takes its weights apart and for each row.
WEIGHT_BYTE, L2_BYTE, STEP, SUM_WORD, HAND_OVER, START = 0.058, 0.051, 570, 0.57, 8000, 400
BLOCK_CYCLES = {"int4": (13.8, 1.6), "int8": (5.4, 1.25), "w8a8": (0, 0.65), "plain": (0.2, 0.03),
                "sparse-int4": (12, 1.2), "sparse-int8": (5, 1), "sparse-w8a8": (0, 0.5)}  # the sparse ones: guesses


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    slices: int
    tiles: int  # at a time
    together: int  # of one warp
    column_warps: int
    stages: int
    shared: int
    microseconds: float  # estimated, batch_pack included

    @property
    def warps(self) -> int:
        return math.ceil(self.tiles / self.together) * self.column_warps


def x_bytes(kind: str, group: int, rows: int) -> int:
    """Of an image of 128 inputs."""
    if kind not in GROUPED:
        return rows * (256 if kind == "plain" else 128)
    scales = 4 if group == 32 else 1 if group % 128 == 0 else 2
    return rows * (256 + 8 * scales)


def column_warps(kind: str, rows: int) -> int:
    """Parts that the columns are cut into: a warp holds x of a step for its part in at most 32 registers."""
    return max(1, rows // (32 if kind in QUANTIZED else 16))


@functools.cache
def choose(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int,
           slices: int | None = None) -> Choice | None:
    """The cut with the least estimated time; None where there is none."""
    if kind not in KINDS or not 1 < rows <= ROWS[-1]:
        return None
    padded = next(size for size in ROWS if size >= rows)
    grouped, parts, steps = kind in GROUPED, column_warps(kind, padded), math.ceil(columns / 128)
    cut = group // 128 if grouped and 128 < group < columns else 1
    records = (128 // group if group < 128 else 1) * 64 if grouped else 0
    step = 2 * BLOCK_BYTES[kind] + records
    found = []
    for count in (slices,) if slices else range(1, MOST_SLICES + 1):
        if count > min(processors, math.ceil(steps / cut)):
            continue
        mine, length = math.ceil(math.ceil(outputs / 16) / (processors // count)), math.ceil(math.ceil(steps / cut) / count) * cut
        rounds = math.ceil(mine / 16)
        tiles = math.ceil(mine / rounds)
        together = max(1 if parts == 1 else 2, math.ceil(tiles * parts / WARPS))
        stage = tiles * step + x_bytes(kind, group, padded)
        stages = min(12, (SHARED - 1024) // (stage + 16))
        if stages < 3 or together > 4:
            continue
        if count > 1 and count * math.ceil(outputs / 16) * 16 * padded * 4 > MOST_MAIL:
            continue
        weights, inputs = mine * length * step, rounds * length * x_bytes(kind, group, padded)
        fetched = max(weights * WEIGHT_BYTE, (weights + inputs) * L2_BYTE)
        multiplied = mine * length * 2 * (BLOCK_CYCLES[kind][0] * parts + BLOCK_CYCLES[kind][1] * padded)
        handed_over = HAND_OVER + mine * 16 * padded * SUM_WORD if count > 1 else 0
        cycles = START + math.hypot(fetched, multiplied, rounds * length * STEP) + handed_over  # they overlap in part
        shared = max(SHARED_LEAST, stages * (stage + 16) + padded * 4 + 256)
        found.append(Choice(padded, count, tiles, together, parts, stages, shared, cycles / CLOCK))
    return min(found, key=lambda choice: choice.microseconds, default=None)


@functools.cache
def kernels(kind: str, outputs: int, columns: int, group: int, fp16: bool, scale_fp16: bool, chosen: Choice, *, norm: bool,
            epilogue: str, bias: bool, static: bool, symmetric: bool, parts: int) -> tuple[jit.Kernel, jit.Kernel]:
    common = {**format_defines(kind, symmetric=symmetric), "STATIC": int(static), "FP16": int(fp16), "KDIM": columns,
              "GROUP": group, "ROWS": chosen.rows}
    pack = jit.load("batch_pack.cu", defines=common | {"NORM": int(norm), "PARTS": parts, "WARPS": PACK_WARPS})
    product = jit.load("batch.cu", defines=common | {
        "SCALE_FP16": int(scale_fp16), "NDIM": outputs, "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(bias), "ROUND": chosen.tiles,
        "PER_WARP": chosen.together, "COLUMN_WARPS": chosen.column_warps, "SLICES": chosen.slices, "STAGES": chosen.stages,
        "LOADERS": LOADERS, "SHARED_BYTES": chosen.shared})
    return pack.kernel("batch_pack"), product.kernel("batch")


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, slices: int | None = None) -> Tensor:
    """x [rows, in], up to 64 rows → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, grid = x.shape[0], processors(x.device.index or 0)
    shape = (weight.kind, weight.out_features, weight.in_features, weight.group)
    chosen = choose(*shape, rows, grid, slices)
    if chosen is None:
        raise ValueError(f"{rows} rows of {weight.in_features} inputs do not go through batch.cu as {weight.kind}")
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=x.device)
    epilogue = "silu" if weight.interleaved else "store" if residual is None else "residual"
    parts = max(1, grid // chosen.rows)
    pack, product = kernels(*shape, weight.dtype == torch.float16, weight.scale_fp16, chosen, norm=norm is not None,
                            epilogue=epilogue, bias=weight.bias is not None, static=weight.static, symmetric=weight.symmetric,
                            parts=parts)
    packed = buffer("batch", math.ceil(weight.in_features / 128) * x_bytes(weight.kind, weight.group, chosen.rows), x.device)
    factors = buffer("batch factors", 4 * chosen.rows, x.device)
    words = chosen.slices * math.ceil(weight.out_features / 16) * 16 * chosen.rows
    box = mail(words, x.device) if chosen.slices > 1 else None
    pack.launch(max(grid, parts * chosen.rows), 32 * PACK_WARPS,
                (x, norm, packed, factors, weight.static_scale, float(epsilon), rows), pdl=pdl)
    product.launch(grid, 32 * (chosen.warps + LOADERS), (weight.weights, weight.records, weight.channel_scale, packed, factors,
                                                         weight.bias, residual, out, box, rows), shared=chosen.shared, pdl=pdl)
    return out

