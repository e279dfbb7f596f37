"""Two rows and more times VPTQ weights that are never written out: host side of cuda/vptq_pack.cu and vptq_rows.cu (Hopper)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.gemm import buffer
from flyweight.kernels.vptq_layout import CHUNK, Layout
from flyweight.kernels.vptq_parts import Ends, Parts, part_arguments, share_out

MOST = 128  # rows, 64 at a time: more are faster written out
TOKENS = (16, 32, 64)
WARPS = 16
TILE, TILES = 2 * WARPS, 1024  # row blocks of a tile; counters of a part
PACK_WARPS = 4


@functools.cache
def room(form_main: int, form_residual: int, span: int, tokens: int, limit: int) -> tuple[int, int, int] | None:
    """Copies of the residual book, stages of x and bytes of shared memory, or None where two stages do not fit."""
    for copies in (8, 4, 2):
        books = 16 * ((1 << form_main) + (copies << form_residual if form_residual else 0))
        fixed, stage = books + WARPS * 2 * span * 128, tokens * 256 + 512 + 16
        stages = min(8, (limit - fixed - 128) // stage)
        if stages >= 2:
            return copies, stages, fixed + stages * stage + 16
    return None


def _room(layout: Layout, tokens: int, device: torch.device) -> tuple[int, int, int] | None:
    limit = gpu.properties(device).shared_memory_per_block_optin
    return room(layout.form.main, layout.form.residual, max(CHUNK, layout.form.window), tokens, limit)


def takes(parts: Parts, device: torch.device) -> bool:
    layout = parts[0]
    return (not layout.sliced and layout.length == 8 and gpu.capability(device)[0] == 9
            and max(part.row_blocks for part in parts) <= TILE * TILES and _room(layout, TOKENS[-1], device) is not None)


def multiply(parts: Parts, x: Tensor, out: Tensor, ends: Ends, *, arrived: Tensor, pdl: bool = True) -> None:
    """x [rows, in] → out [rows, outputs of all parts]."""
    for begin in range(0, x.shape[0], TOKENS[-1]):
        here = slice(begin, begin + TOKENS[-1])
        _multiply(parts, x[here], out[here], ends.of(here), arrived, pdl)


def _multiply(parts: Parts, x: Tensor, out: Tensor, ends: Ends, arrived: Tensor, pdl: bool) -> None:
    layout, rows, device = parts[0], x.shape[0], x.device
    tokens = next(tokens for tokens in TOKENS if tokens >= rows)
    stored = layout.affine.numel()
    stages, fp16 = -(-stored // 128), int(layout.dtype == torch.float16)
    sources = [part.source for part in parts]
    packs = 1 if all(source is None for source in sources) else len(parts)
    packed = buffer("vptq packed", packs * stages * tokens * 256, device)
    pack = jit.load("vptq_pack.cu", defines={"FP16": fp16, "WARPS": PACK_WARPS, **ends.defines}).kernel("vptq_pack")
    count = gpu.properties(device).multi_processor_count
    slices = max(1, min(-(-stored // (256 * PACK_WARPS)), 2 * count // (rows * packs)))
    pack.launch((rows * slices, packs), 32 * PACK_WARPS, (x, ends.norm, *(*sources, None, None)[:3], packed, float(ends.epsilon),
                                                          layout.in_features, stored, tokens // 8, slices), pdl=pdl)
    found = _room(layout, tokens, device)
    assert found is not None
    copies, ring, shared = found
    units = layout.chunks * CHUNK // max(CHUNK, layout.form.window) + (layout.dense_steps > 0)
    ctas = share_out([-(-part.row_blocks // TILE) * units for part in parts], count)
    defines = layout.form.defines() | {"PIECES": 1, "COPIES": copies, "WARPS": WARPS, "FP16": fp16, "TOKENS": tokens,
                                       "STAGES": ring, "DENSE": int(layout.dense_steps > 0)}
    partials = buffer("vptq partials", count * 2 * tokens * WARPS * 64, device)
    args = (*part_arguments(parts, ctas, paired=True), packed, ends.bias, ends.residual, out, partials, arrived, rows,
            sum(part.out_features for part in parts), layout.chunks, layout.dense_steps,
            stages * tokens * 256 if packs > 1 else 0)
    kernel = jit.load("vptq_rows.cu", defines=defines).kernel("vptq_rows")
    kernel.launch(sum(ctas), 32 * (WARPS + 4), args, shared=shared, pdl=pdl)
