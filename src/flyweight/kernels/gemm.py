"""Nine rows or more times a weight in gemv's tiles: host side of cuda/pack.cu and cuda/gemm.cu (Hopper).

x is packed first, with the norm and W8A8's quantization in the same pass; bias, residual or silu·mul end the product.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.kernels.gemv import EPILOGUES, FORMATS, VECTORS, Gemv, processors

SHARED = 225 * 1024
_buffers: dict[tuple[str, int, torch.device], Tensor] = {}


def buffer(name: str, size: int, device: torch.device) -> Tensor:
    """Zeroed bytes that live on: captured graphs hold their addresses, so a buffer is never freed or moved."""
    rounded = 1 << (max(size, 1024) - 1).bit_length()
    if (name, rounded, device) not in _buffers:
        _buffers[name, rounded, device] = torch.zeros(rounded, dtype=torch.uint8, device=device)
    return _buffers[name, rounded, device]


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, the weight aside."""

    tokens: int  # columns of a tile
    warpgroups: int  # 64 outputs each
    stage_blocks: int
    stages: int
    shared: int


@functools.cache
def shape_for(kind: str, columns: int, group: int, rows: int, tokens: int | None = None, warpgroups: int | None = None,
              stage_blocks: int | None = None) -> Shape | None:
    """None where no cut of the inputs into stages fits."""
    tokens = tokens or min(256 if kind != "plain" else 128, max(16, 1 << (rows - 1).bit_length()))
    warpgroups = warpgroups or (4 if tokens <= 32 else 2)
    total = math.ceil(columns / 64)
    grouped = kind in ("int4", "int8")
    for count in (stage_blocks,) if stage_blocks else (2, 1):
        span = count * 64
        if total % count or (grouped and group < columns and span % group and group % span):
            continue
        tiles = 4 * warpgroups
        records = tiles * math.ceil(span / group) * 64 if grouped else 0
        stage = tiles * count * VECTORS[kind] * 512 + records + tokens * span * (1 if kind == "w8a8" else 2)
        stages = min(12, (SHARED - 512) // stage)
        if stages >= 2:
            return Shape(tokens, warpgroups, count, stages, stages * (stage + 16) + 256)
    return None


def why_not(weight: Gemv, rows: int, device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs Hopper's matrix units"
    if weight.out_features % 2 or (weight.interleaved and weight.out_features % 4):
        return "outputs are written in pairs"
    if shape_for(weight.kind, weight.in_features, weight.group, rows) is None:
        return f"{weight.in_features} inputs in groups of {weight.group} do not fit into whole stages"
    return None


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, **choices: int) -> Tensor:
    """x [rows, in] → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, device = x.shape[0], x.device
    shape = shape_for(weight.kind, weight.in_features, weight.group, rows, **choices)
    assert shape is not None
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=device)
    quantize = weight.kind == "w8a8"
    n_tiles = math.ceil(rows / shape.tokens)
    padded, blocks = n_tiles * shape.tokens, math.ceil(weight.in_features / 64)
    packed = buffer("packed", padded * blocks * 64 * (1 if quantize else 2), device)
    row_scale = buffer("row scale", padded * 4, device)
    common = {"FP16": int(weight.dtype == torch.float16), "KDIM": weight.in_features, "SB": shape.stage_blocks}
    per_cta = 1 if padded <= 1024 else 8
    pack = jit.load("pack.cu", defines=common | {
        "NORM": int(norm is not None), "QUANTIZE": int(quantize), "ORDER": int(weight.kind in ("int4", "int8")),
        "PER_CTA": per_cta})
    pack.kernel("pack").launch(padded // per_cta, 256, (x, norm, packed, row_scale, rows, padded // 8, float(epsilon)), pdl=pdl)

    count = processors(device.index or 0)
    m_tiles = math.ceil(math.ceil(weight.out_features / 16) / (4 * shape.warpgroups))
    tiles = m_tiles * n_tiles
    split = tiles / (math.ceil(tiles / count) * count) < 0.8  # whole tiles would leave a fifth of the SMs idle
    units = tiles * (blocks // shape.stage_blocks)
    epilogue = "silu" if weight.interleaved else "store" if residual is None else "residual"
    kernel = jit.load("gemm.cu", defines=common | {
        "FORMAT": FORMATS[weight.kind], "SCALE_FP16": int(weight.scale_fp16), "NDIM": weight.out_features, "GROUP": weight.group,
        "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(weight.bias is not None), "TOKENS": shape.tokens, "WGS": shape.warpgroups,
        "STAGES": shape.stages, "SPLIT": int(split)}).kernel("gemm")
    partials = buffer("partials", count * shape.warpgroups * 64 * shape.tokens * 4, device)
    flags = buffer("flags", count * 4, device)
    args = (weight.weights, weight.records, weight.channel_scale, packed, row_scale, weight.bias, residual, out, partials, flags, rows)
    kernel.launch(min(count, units if split else tiles), shape.warpgroups * 128 + 128, args, shared=shape.shared, pdl=pdl)
    return out
