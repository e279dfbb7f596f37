"""A linear of 2 to 16 rows with its inputs cut into slices: host side of cuda/gemv_split.cu, and when that is worth it.

Every CTA of gemv.cu fetches and converts all of x for itself, which with several rows takes longer than the weights, and x no
longer fits beside another kernel. A slice has 1 / slices of both; sums then meet in memory, which costs about a
microsecond. `choose` weighs these by estimates (`Cost`); nothing is measured at run time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.kernels.gemv import BLOCK_BYTES, SHARED_LIMIT, Gemv, Plan, plan, processors, slice_blocks, turns

# The others quantize x by the row's maximum, which a slice does not know.
KINDS = ("plain", "int4", "int8", "sparse-int4", "sparse-int8")
ROWS = (2, 4, 8, 16)
WARPS = {(kind, rows): 16 for kind in ("int4", "sparse-int4") for rows in (2, 4)}  # 8 for others: columns take registers
MOST_SLICES = 24
MOST_MAIL = 32 << 20
# Estimated cycles of an SM at CLOCK MHz: a byte of weights; a block and a tile multiplied with so many rows (a + b · rows); an
# input fetched and converted; a word of sums written, read and emptied; the hand-over itself, and each slice's share of it.
CLOCK = 1980
WEIGHT_BYTE, INPUT, SUM_WORD, HAND_OVER, PER_SLICE = 1 / 16, 0.19, 0.6, 1800, 60
BLOCK_CYCLES = {"int4": (10, 1.1), "int8": (8, 1.1), "plain": (6, 0.8), "sparse-int4": (9, 0.9), "sparse-int8": (7, 0.9)}
TILE_CYCLES = 100, 6
_mail: dict[tuple[int, torch.device], Tensor] = {}


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    slices: int
    plan: Plan
    microseconds: float  # estimated

    def mail_words(self, tiles: int, grid: int) -> int:
        return (grid + tiles * 16) * self.slices * self.rows


def estimate(kind: str, outputs: int, columns: int, group: int, rows: int, slices: int, processors: int) -> float:
    """Microseconds of the CTA with the largest share: weights fetched or multiplied, inputs before and sums after that."""
    tiles = math.ceil(math.ceil(outputs / 16) / (processors // slices))
    _, blocks, _ = slice_blocks(kind, columns, group, slices)
    block = BLOCK_BYTES[kind] + (64 * 64 / group if kind != "plain" else 0)
    fetched = tiles * blocks * block * WEIGHT_BYTE
    per_block, per_tile = (fixed + row * rows for fixed, row in (BLOCK_CYCLES[kind], TILE_CYCLES))
    multiplied = tiles * (blocks * per_block + per_tile)
    handed_over = HAND_OVER + PER_SLICE * slices + tiles * 16 * rows * SUM_WORD if slices > 1 else 0
    return (max(fetched, multiplied) + rows * blocks * 64 * INPUT + handed_over) / CLOCK


@functools.cache
def choose(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int,
           slices: int | None = None) -> Choice | None:
    """The cut with the least estimated time of those that leave room for another kernel; None where there is none."""
    if kind not in KINDS or not 1 < rows <= ROWS[-1]:
        return None
    padded = next(size for size in ROWS if size >= rows)
    warps = WARPS.get((kind, padded), 8)
    found = []
    for count in (slices,) if slices else range(2, min(MOST_SLICES, processors) + 1):
        if slice_blocks(kind, columns, group, count)[2] < 1:
            continue
        tiles = math.ceil(math.ceil(outputs / 16) / (processors // count))
        for stage_bytes, fewest in ((16384, 3), (8192, 3), (4096, 4)):
            fits = plan(kind, columns, group, padded, tiles=tiles, warps=warps, limit=SHARED_LIMIT, slices=count,
                        stage_bytes=stage_bytes, fewest=fewest)
            if fits is not None:
                time = estimate(kind, outputs, columns, group, padded, count, processors)
                choice = Choice(padded, count, fits, time)
                if choice.mail_words(math.ceil(outputs / 16), processors) * 4 <= MOST_MAIL:
                    found.append(choice)
                break
    return min(found, key=lambda choice: choice.microseconds, default=None)


def mail(words: int, device: torch.device) -> Tensor:
    """Empty (all ones) before each launch and after it; it is never freed or moved, since captured graphs hold its address."""
    rounded = 1 << max(16, (words - 1).bit_length())
    if (rounded, device) not in _mail:
        _mail[rounded, device] = torch.full((rounded,), -1, dtype=torch.int32, device=device)
    return _mail[rounded, device]


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, slices: int | None = None) -> Tensor:
    """x [rows, in], 2 to 16 rows → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, grid = x.shape[0], processors(x.device.index or 0)
    chosen = choose(weight.kind, weight.out_features, weight.in_features, weight.group, rows, grid, slices)
    if chosen is None:
        raise ValueError(f"{rows} rows of {weight.in_features} inputs cannot be cut into slices for {weight.kind}")
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=x.device)
    epilogue = "silu" if weight.interleaved else "store" if residual is None else "residual"
    defines = weight.defines(chosen.rows, chosen.plan, norm=norm is not None, epilogue=epilogue)
    kernel = jit.load("gemv_split.cu", defines=defines | {"SLICES": chosen.slices}).kernel("gemv_split")
    box = mail(chosen.mail_words(math.ceil(weight.out_features / 16), grid), x.device)
    args = (weight.weights, weight.records, x, norm, weight.bias, residual, out, box, float(epsilon), rows,
            turns(weight.kind, rows, x.device))
    kernel.launch(grid, 32 * (chosen.plan.warps + 1), args, shared=chosen.plan.shared, pdl=pdl)
    return out
