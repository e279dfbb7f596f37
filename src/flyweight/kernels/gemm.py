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

SHARED, SHARED_SMALL = 225 * 1024, 110 * 1024  # alone on an SM, and beside another
REGISTERS_SMALL = 96
WHOLE, LINE, CLUSTERS = range(3)
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
    split: int
    cluster: int
    tiles: int
    shared: int

    @property
    def loaders(self) -> int:
        return 2 if self.split == CLUSTERS else 4


@functools.cache
def shape_for(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int, *, tokens: int | None = None,
              warpgroups: int | None = None, stage_blocks: int | None = None, cluster: int | None = None,
              split: int | None = None, limit: int | None = None) -> Shape | None:
    """What was measured to be fastest, where nothing is asked for; None where no cut of the inputs into stages fits."""
    tokens = tokens or min(256 if kind != "plain" else 128, max(16, 1 << (rows - 1).bit_length()))
    if split is None:
        split = CLUSTERS if rows <= min(tokens, 64 if kind == "w8a8" else 32) else LINE
    small, large = split == CLUSTERS, outputs * columns > 1 << 25
    if warpgroups is None:
        warpgroups = 2 if not small else 1 if not large or (kind != "int4" and outputs <= 16384) else 3 if kind == "int4" else 2
    m_tiles, total = math.ceil(outputs / (64 * warpgroups)), math.ceil(columns / 64)
    tiles = m_tiles * math.ceil(rows / tokens)
    if split == LINE and tiles / (math.ceil(tiles / processors) * processors) >= 0.8:
        split = WHOLE  # at most a fifth of the SMs is idle
    if cluster is None or not small:
        room = 2 * processors if m_tiles <= processors // 2 and kind == "int4" and large else max(processors, 2 * m_tiles)
        cluster = max(1, min(8, room // m_tiles)) if small and m_tiles <= processors else 1
    grouped = kind in ("int4", "int8")
    limit = limit or (SHARED_SMALL if small else SHARED)
    for count in (stage_blocks,) if stage_blocks else (4, 2, 1) if kind in ("int4", "int8") and tokens <= 64 else (2, 1):
        span = count * 64
        if total % count or (grouped and group < columns and span % group and group % span) or total // count < cluster:
            continue
        records = 4 * warpgroups * math.ceil(span / group) * 64 if grouped else 0
        stage = 4 * warpgroups * count * VECTORS[kind] * 512 + records + tokens * span * (1 if kind == "w8a8" else 2)
        owned = tokens // 8 // min(8, tokens // 8, 1 << (cluster.bit_length() - 1))
        exchange = cluster * owned * warpgroups * 128 * 16 if cluster > 1 else 0
        stages = min(12, limit // (stage + 16))
        if stages >= (3 if count == 4 else 2):
            shared = max(exchange, stages * stage) + 16 * stages + 512
            return Shape(tokens, warpgroups, count, stages, split, cluster, tiles, shared)
    return None


def why_not(weight: Gemv, rows: int, device: torch.device) -> str | None:
    return _why_not(weight.kind, weight.out_features, weight.in_features, weight.group, weight.interleaved, rows, device)


@functools.cache
def _why_not(kind: str, outputs: int, columns: int, group: int, interleaved: bool, rows: int, device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs Hopper's matrix units"
    if outputs % (4 if interleaved else 2):
        return "outputs are written in pairs"
    if shape_for(kind, outputs, columns, group, rows, processors(device.index or 0)) is None:
        return f"{columns} inputs in groups of {group} do not fit into whole stages"
    return None


@functools.cache
def kernels(kind: str, outputs: int, columns: int, group: int, fp16: bool, scale_fp16: bool, shape: Shape, *, norm: bool,
            epilogue: str, bias: bool, per_cta: int, experts: bool = False) -> tuple[jit.Kernel, jit.Kernel]:
    """`experts`: rows in tiles of one expert each (experts.py)."""
    common = {"FP16": int(fp16), "KDIM": columns, "SB": shape.stage_blocks}
    pack = jit.load("pack.cu", defines=common | {
        "NORM": int(norm), "QUANTIZE": int(kind == "w8a8"), "ORDER": int(kind in ("int4", "int8")), "PER_CTA": per_cta,
        "BESIDE": int(per_cta == 8 and kind != "w8a8"), "TILE": shape.tokens if experts else 0})
    gemm = jit.load("gemm.cu", registers=REGISTERS_SMALL if shape.split == CLUSTERS else None, defines=common | {
        "FORMAT": FORMATS[kind], "SCALE_FP16": int(scale_fp16), "NDIM": outputs, "GROUP": group, "EPILOGUE": EPILOGUES[epilogue],
        "BIAS": int(bias), "TOKENS": shape.tokens, "WGS": shape.warpgroups, "STAGES": shape.stages, "SPLIT": shape.split,
        "CLUSTER": shape.cluster, "LOADERS": shape.loaders, "EXPERTS": int(experts)})
    return pack.kernel("pack"), gemm.kernel("gemm")


def rows_packed_at_once(weight: Gemv, padded: int) -> int:
    """By a CTA of pack.cu."""
    if padded <= 512:
        return 1
    pieces = math.ceil(math.ceil(weight.in_features / 64) * 2 / 3)
    team = 1 << max(5, (pieces - 1).bit_length())  # threads of a row that keep three pieces of 32 inputs each
    return max(1, 256 // team) if weight.kind == "w8a8" else 8


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, **choices: int) -> Tensor:
    """x [rows, in] → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, device = x.shape[0], x.device
    count = processors(device.index or 0)
    shape = shape_for(weight.kind, weight.out_features, weight.in_features, weight.group, rows, count, **choices)
    assert shape is not None
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=device)
    padded, blocks = math.ceil(rows / shape.tokens) * shape.tokens, math.ceil(weight.in_features / 64)
    quantize, per_cta = weight.kind == "w8a8", rows_packed_at_once(weight, padded)
    pack, gemm = kernels(weight.kind, weight.out_features, weight.in_features, weight.group, weight.dtype == torch.float16,
                         weight.scale_fp16, shape, norm=norm is not None, bias=weight.bias is not None, per_cta=per_cta,
                         epilogue="silu" if weight.interleaved else "store" if residual is None else "residual")
    packed = buffer("packed", padded * blocks * 64 * (1 if quantize else 2), device)
    row_scale = buffer("row scale", padded * 4, device)
    pack.launch(padded // per_cta, 256, (x, norm, packed, row_scale, None, None, rows, padded // 8, float(epsilon)), pdl=pdl)

    partials = buffer("partials", count * shape.warpgroups * 64 * shape.tokens * 4, device)
    flags = buffer("flags", count * 4, device)
    grid = {CLUSTERS: shape.tiles * shape.cluster, WHOLE: min(count, shape.tiles), LINE: count}[shape.split]
    args = (weight.weights, weight.records, weight.channel_scale, packed, row_scale, weight.bias, residual, out, partials, flags,
            None, None, rows)
    gemm.launch(grid, (4 * shape.warpgroups + shape.loaders) * 32, args, shared=shape.shared, pdl=pdl,
                cluster=shape.cluster if shape.cluster > 1 else None)
    return out
