"""Rows of x times VPTQ weights that are never written out: host side of cuda/vptq_pack.cu and vptq_rows.cu (Hopper)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.gemm import buffer
from flyweight.kernels.gemv import processors
from flyweight.kernels.gemv_split import mail
from flyweight.kernels.vptq_layout import CHUNK
from flyweight.kernels.vptq_parts import MOST as MOST_PARTS
from flyweight.kernels.vptq_parts import Ends, Parts, part_arguments, share_out

PACK_WARPS = 4
PACKERS = 6  # thread blocks of vptq_pack.cu for a processor, at most
BESIDE = 2176  # bytes left for a thread block of vptq_pack.cu on the same SM, and for the kernel's own variables
AHEAD = {12: 1, 8: 2}  # warps that multiply, each two row blocks of a tile → steps whose lookups are under way
# Rows of a launch → steps of 32 columns in a stage of x; how long a lookup of 8 warps takes where that of 12 takes 1; lookups of
# 32 items in the time that a share of a second tile costs. More rows are faster written out.
SHAPES = {8: (8, 1.1, 500), 16: (8, 1.1, 500), 32: (4, 1.0, 500), 64: (4, 0.97, 900), 128: (2, 1.0, 900)}
MOST = max(SHAPES)


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, besides the weight's form."""

    tokens: int
    warps: int
    steps: int  # of a stage
    stages: int
    copies: int  # of the residual book
    shared: int

    @property
    def registers(self) -> int:
        """At most so many a thread at launch: 64 of 128 threads of vptq_pack.cu are left."""
        return (65536 - 8192) // (32 * (self.warps + 4)) // 8 * 8

    @property
    def defines(self) -> dict[str, int]:
        return {"TOKENS": self.tokens, "WARPS": self.warps, "STAGE_STEPS": self.steps, "AHEAD": AHEAD[self.warps],
                "STAGES": self.stages, "COPIES": self.copies, "REGISTERS": self.registers}


@functools.cache
def shape_for(main: int, residual: int, tokens: int, warps: int, limit: int) -> Shape | None:
    """For index bits; None where two stages do not fit into `limit` bytes."""
    steps, _, _ = SHAPES[tokens]
    for copies in (8, 4, 2):
        fixed = 16 * ((1 << main) + (copies << residual if residual else 0))
        stage = 64 * tokens * steps
        stages = min(8, (limit - BESIDE - fixed) // (stage + 16))
        if stages >= 2:
            return Shape(tokens, warps, steps, stages, copies, fixed + stages * (stage + 16) + 16)
    return None


@dataclass(frozen=True)
class Cut:
    """The work of a launch."""

    ctas: tuple[int, ...]  # thread blocks of each part
    most: float  # units of the busiest
    apart: int = 0  # of them for a last tile that is small


@functools.cache
def cut(blocks: tuple[int, ...], tile: int, units: int, count: int, spanning: float) -> Cut:
    """For row blocks of parts; shares of two tiles cost `spanning` units. So either every tile has as many thread blocks, those
    with few row blocks at least half as many, or the line of all units is cut evenly."""
    tiles, small = [-(-n // tile) for n in blocks], [0 < n % tile <= tile // 3 for n in blocks]
    spread = share_out(tuple(units * n for n in tiles), count)
    found = [Cut(spread, spanning + max(-(-units * n // ctas) for n, ctas in zip(tiles, spread, strict=True)))]
    whole = sum(tiles) - sum(small)
    for each in range(1, min(count // max(1, whole), units) + 1):
        apart = min(each, (count - each * whole) // sum(small)) if any(small) else 0
        if apart >= each / 2 or not any(small):
            ctas = tuple(each * (n - last) + apart * last for n, last in zip(tiles, small, strict=True))
            found.append(Cut(ctas, -(-units // each), apart))
    return min(found, key=lambda one: one.most)


def cut_for(parts: Parts, tokens: int, warps: int, count: int) -> tuple[Cut, float]:
    """And how many lookups of 32 items the busiest thread block has."""
    layout, (_, eight, spanning) = parts[0], SHAPES[tokens]
    span = max(CHUNK, layout.form.window)
    units, lookups = layout.chunks * CHUNK // span + (layout.dense_steps > 0), 2 * warps * span  # of a tile; of a unit
    found = cut(tuple(part.row_blocks for part in parts), 2 * warps, units, count, spanning / lookups)
    return found, found.most * lookups * (eight if warps == 8 else 1)


def warps_for(parts: Parts, tokens: int, count: int) -> int:
    """With which the busiest thread block is done first."""
    most = 12 if tokens <= 64 else 8  # sums of more rows leave no registers for more
    return min((warps for warps in AHEAD if warps <= most), key=lambda warps: cut_for(parts, tokens, warps, count)[1])


def choose(parts: Parts, rows: int, device: torch.device) -> Shape | None:
    """The smallest shape that takes so many rows, up to MOST, at once."""
    layout, tokens = parts[0], next(tokens for tokens in SHAPES if tokens >= rows)
    limit = gpu.properties(device).shared_memory_per_block_optin
    warps = warps_for(parts, tokens, processors(device.index or 0))
    return shape_for(layout.form.main, layout.form.residual, tokens, warps, limit)


def takes(parts: Parts, rows: int, device: torch.device) -> bool:
    layout = parts[0]
    if layout.sliced or layout.length != 8 or gpu.capability(device)[0] != 9:
        return False
    return choose(parts, rows, device) is not None


def multiply(parts: Parts, x: Tensor, out: Tensor, ends: Ends, *, pdl: bool = True) -> None:
    """x [up to MOST rows, in] → out [rows, outputs of all parts]."""
    layout, rows, device = parts[0], x.shape[0], x.device
    shape = choose(parts, rows, device)
    assert shape is not None
    count = processors(device.index or 0)
    packed, sums, squares, part_bytes, slices = pack(parts, x, ends, shape, count=count, pdl=pdl)
    work, _ = cut_for(parts, shape.tokens, shape.warps, count)
    kernel = jit.load("vptq_rows.cu", defines=layout.form.defines() | shape.defines | {
        "FP16": int(layout.dtype == torch.float16), "PIECES": 1, "DENSE": int(layout.dense_steps > 0)}).kernel("vptq_rows")
    partials = mail(count * 2 * shape.tokens * shape.warps * 16, device)
    args = (*part_arguments(parts, work.ctas), packed, sums, squares, ends.bias, ends.residual, out, partials,
            float(ends.epsilon), rows, out.shape[1], layout.in_features, layout.chunks, layout.dense_steps, part_bytes, slices,
            work.apart)
    kernel.launch(count, 32 * (shape.warps + 4), args, shared=shape.shared, pdl=pdl)


def pack(parts: Parts, x: Tensor, ends: Ends, shape: Shape, *, count: int, pdl: bool
         ) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """x in the order of the products, what biases add, squares where the norm is left to the products, the bytes of a part, and
    how many add up to what biases add, or to a row's squares."""
    layout, rows, device = parts[0], x.shape[0], x.device
    stored = layout.affine.numel()
    part_bytes = -(-stored // (32 * shape.steps)) * shape.steps * shape.tokens * 64
    packed = buffer("vptq packed", len(parts) * part_bytes, device)
    slices = -(-stored // (256 * PACK_WARPS))
    if len(parts) == 1:
        slices = max(1, min(slices, PACKERS * count // rows))
    whole = stored == layout.in_features and stored % 256 == 0 and all(part.source is None for part in parts)
    added = 4 * len(parts) * rows * slices
    sums = buffer("vptq sums", 2 * added, device)
    kernel = jit.load("vptq_pack.cu", defines=ends.defines | {
        "FP16": int(layout.dtype == torch.float16), "STAGE_STEPS": shape.steps, "WARPS": PACK_WARPS, "PARTS": len(parts),
        "BOOK_BYTES": 16 << layout.form.main, "WHOLE": int(whole)}).kernel("vptq_pack")
    columns = [tensor for part in parts for tensor in (part.source, part.pairs, part.book)]
    given = (*columns, *[None] * (3 * MOST_PARTS - len(columns)), x, ends.norm, packed, sums, float(ends.epsilon), rows,
             layout.in_features, stored, shape.tokens // 8, slices)
    kernel.launch(rows * slices, 32 * PACK_WARPS, given, pdl=pdl)
    late = whole and ends.norm is not None and layout.dtype != torch.float16
    return packed, sums, sums[added:] if late else None, part_bytes, slices
