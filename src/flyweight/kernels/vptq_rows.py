"""Two rows and more times VPTQ weights that are never written out: host side of cuda/vptq_pack.cu and vptq_rows.cu (Hopper)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.gemm import buffer
from flyweight.kernels.gemv import processors
from flyweight.kernels.vptq_layout import CHUNK, Layout
from flyweight.kernels.vptq_parts import MOST as MOST_PARTS
from flyweight.kernels.vptq_parts import Ends, Parts, part_arguments, share_out

TILES = 1024  # of a part
PACK_WARPS = 4
BESIDE = 1408  # bytes left for a thread block of vptq_pack.cu on the same SM, and for the kernel's own variables
# Rows of a launch → warps that multiply, and steps of 32 columns in a stage of x. More rows are faster written out.
SHAPES = {16: (16, 4), 32: (16, 4), 64: (16, 2), 128: (12, 1)}
MOST = max(SHAPES)
COUNTERS = {16: 0, 12: 1}  # by warps: who shares a tile depends on its size, and counters go on from launch to launch


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, besides the weight's form."""

    tokens: int
    warps: int
    steps: int  # of a stage
    stages: int
    copies: int  # of the residual book
    shared: int


@functools.cache
def shape_for(main: int, residual: int, span: int, tokens: int, limit: int) -> Shape | None:
    """For index bits, and steps of a span; None where two stages do not fit into `limit` bytes."""
    warps, steps = SHAPES[tokens]
    for copies in (8, 4, 2):
        fixed = 16 * ((1 << main) + (copies << residual if residual else 0)) + warps * 2 * span * 128
        stage = steps * (64 * tokens + 128)
        stages = min(8, (limit - BESIDE - fixed) // (stage + 16))
        if stages >= 2:
            return Shape(tokens, warps, steps, stages, copies, fixed + stages * (stage + 16) + 16)
    return None


def choose(layout: Layout, rows: int, device: torch.device) -> Shape | None:
    """The smallest shape that takes so many rows, up to MOST, at once."""
    tokens = next(tokens for tokens in SHAPES if tokens >= rows)
    limit = gpu.properties(device).shared_memory_per_block_optin
    return shape_for(layout.form.main, layout.form.residual, max(CHUNK, layout.form.window), tokens, limit)


def counters(device: torch.device) -> Tensor:
    """[shapes, parts, tiles], for one weight."""
    return torch.zeros(len(COUNTERS), MOST_PARTS, TILES, dtype=torch.int32, device=device)


def takes(parts: Parts, rows: int, device: torch.device) -> bool:
    layout = parts[0]
    if layout.sliced or layout.length != 8 or gpu.capability(device)[0] != 9:
        return False
    shape = choose(layout, rows, device)
    return shape is not None and max(part.row_blocks for part in parts) <= 2 * shape.warps * TILES


def multiply(parts: Parts, x: Tensor, out: Tensor, ends: Ends, *, arrived: Tensor, pdl: bool = True) -> None:
    """x [up to MOST rows, in] → out [rows, outputs of all parts]."""
    layout, rows, device = parts[0], x.shape[0], x.device
    shape = choose(layout, rows, device)
    assert shape is not None
    stored, count = layout.affine.numel(), processors(device.index or 0)
    stages, common = -(-stored // (32 * shape.steps)), {"FP16": int(layout.dtype == torch.float16), "STAGE_STEPS": shape.steps}
    part_bytes = stages * shape.steps * shape.tokens * 64
    sources = [part.source for part in parts]
    packs = 1 if all(source is None for source in sources) else len(parts)
    packed = buffer("vptq packed", packs * part_bytes, device)
    pack = jit.load("vptq_pack.cu", defines=common | ends.defines | {"WARPS": PACK_WARPS}).kernel("vptq_pack")
    slices = max(1, min(-(-stored // (256 * PACK_WARPS)), 2 * count // (rows * packs)))
    pack.launch((rows * slices, packs), 32 * PACK_WARPS, (x, ends.norm, *(*sources, None, None)[:3], packed, float(ends.epsilon),
                                                          layout.in_features, stored, shape.tokens // 8, slices), pdl=pdl)
    tile, units = 2 * shape.warps, layout.chunks * CHUNK // max(CHUNK, layout.form.window) + (layout.dense_steps > 0)
    ctas = share_out(tuple(-(-part.row_blocks // tile) * units for part in parts), count)
    kernel = jit.load("vptq_rows.cu", defines=common | layout.form.defines() | {
        "PIECES": 1, "COPIES": shape.copies, "WARPS": shape.warps, "TOKENS": shape.tokens, "STAGES": shape.stages,
        "DENSE": int(layout.dense_steps > 0)}).kernel("vptq_rows")
    partials = buffer("vptq partials", count * 2 * shape.tokens * shape.warps * 64, device)
    args = (*part_arguments(parts, ctas, paired=True), packed, ends.bias, ends.residual, out, partials,
            arrived[COUNTERS[shape.warps]], rows, sum(part.out_features for part in parts), layout.chunks, layout.dense_steps,
            part_bytes if packs > 1 else 0)
    kernel.launch(sum(ctas), 32 * (shape.warps + 4), args, shared=shape.shared, pdl=pdl)
