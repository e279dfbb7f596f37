"""Few rows times a weight of any integer, plain or W8A8 kind: host side of cuda/gemv.cu.

`prepare` re-lays a weight out once, in the order in which the matrix units read it; `Gemv.__call__` launches. Norm
before, and bias, residual or silu·mul after, are fused: they are compile-time choices of the call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.tensors import Int8Channel, IntGroup, Plain, QuantTensor

FORMATS = {"plain": 0, "int4": 1, "int8": 2, "w8a8": 3}
EPILOGUES = {"store": 0, "residual": 1, "silu": 2}
VECTORS = {"plain": 4, "int4": 1, "int8": 2, "w8a8": 2}  # 16-byte words a lane reads of a 16 × 64 block
# Warps that multiply: int4 is bound by instructions, the others by how soon x is ready (bf16 3.78 instead of 4.40 ms a token of
# Qwen3-8B, W8A8 2.35 instead of 2.62, with 8 instead of 16).
WARPS = {"plain": 8, "int4": 16, "int8": 8, "w8a8": 8}
SHARED_LIMIT = 112 * 1024  # two kernels on one SM: the next one streams weights while this one ends
SHARED_ALONE = 220 * 1024  # what a kernel takes when it does not fit beside another
ROWS = (1, 2, 4, 8)


def format_of(tensor: QuantTensor, dtype: torch.dtype) -> str | None:
    """The kernel's name for this weight, or None where it has no such path."""
    if tensor.experts is not None or tensor.matrix_shape[1] % 8 or dtype not in (torch.float16, torch.bfloat16):
        return None
    if isinstance(tensor, Plain):
        return "plain"
    if isinstance(tensor, Int8Channel) and tensor.input_scale is None:
        return "w8a8"
    if isinstance(tensor, IntGroup) and tensor.bits in (4, 8) and tensor.g_idx is None:
        group = tensor.group_size
        if group in (32, 64) or group % 128 == 0 or group >= tensor.in_features:
            return f"int{tensor.bits}"
    return None


def blocks(values: Tensor, *, interleave: bool) -> Tensor:
    """[out, in] → [tile, half row, row, block, half, lane column, step, pair, within pair]: 16 × 64 blocks, padded with zeros.

    Row 8·(half row) + row of a tile; input 32·half + 8·column + 4·step + 2·pair + within. With `interleave` the first
    half of a tile's rows comes from the gate and the second from the up projection, so that one thread holds both.
    """
    rows, columns = values.shape
    if interleave:
        values = interleave_rows(values)
    values = torch.nn.functional.pad(values, (0, -columns % 64, 0, -rows % 16))
    return values.view(values.shape[0] // 16, 2, 8, values.shape[1] // 64, 2, 4, 2, 2, 2)


# For each format: the order of the nine axes of `blocks` in memory.
TILE, HALF_ROW, ROW, BLOCK, HALF, COLUMN, STEP, PAIR, WITHIN = range(9)
ORDER = {
    "plain": (TILE, BLOCK, HALF, STEP, ROW, COLUMN, PAIR, HALF_ROW, WITHIN),
    "int4": (TILE, BLOCK, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN, HALF),
    "int8": (TILE, BLOCK, HALF, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN),
    "w8a8": (TILE, BLOCK, HALF, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN),
}


def layout(values: Tensor, kind: str, *, interleave: bool = False) -> Tensor:
    """Codes or plain weights [out, in] in the kernel's order, as bytes."""
    ordered = blocks(values, interleave=interleave).permute(ORDER[kind]).contiguous()
    if kind == "int4":
        pairs = ordered.view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)
    return ordered.view(-1).view(torch.uint8)


def group_records(tensor: IntGroup, *, interleave: bool) -> Tensor:
    """int32 [tiles, groups, 16]: scale bits in the low half, zero point in the high half."""
    rows, groups = tensor.scales.shape
    scales = tensor.scales.to(scale_dtype(tensor)).view(torch.int16).int() & 0xFFFF
    zeros = torch.full_like(scales, 1 << (tensor.bits - 1)) if tensor.zeros is None else tensor.zeros.int()
    records = scales | (zeros << 16)
    if interleave:
        records = interleave_rows(records)
    records = torch.nn.functional.pad(records, (0, 0, 0, -rows % 16))
    return records.view(-1, 16, groups).transpose(1, 2).contiguous()


def scale_dtype(tensor: IntGroup) -> torch.dtype:
    """Scales keep the float type they came in: fp16 scales rounded to bf16 would cost quality."""
    return torch.bfloat16 if tensor.scales.dtype == torch.bfloat16 else torch.float16


@dataclass(frozen=True)
class Plan:
    """How a weight streams through shared memory."""

    stage_blocks: int
    stages: int
    slots: int  # tiles between two meetings of the warps
    shared: int


@functools.cache
def plan(kind: str, columns: int, group: int, rows: int, *, tiles: int, warps: int, limit: int,
         stage_bytes: int = 16384, more: int = 0) -> Plan | None:
    """`tiles`: the most that one CTA gets; `more`: bytes of shared memory that the kernel needs besides."""
    total = math.ceil(columns / 64)
    block_bytes = VECTORS[kind] * 512
    grouped = kind in ("int4", "int8")
    step = max(1, min(group, columns) // 64) if grouped and group < columns else (2 if grouped else 1)
    count = max(1, round(total * block_bytes / stage_bytes))
    stage_blocks = min(math.ceil(math.ceil(total / count) / step) * step, math.ceil(total / step) * step)
    groups = math.ceil(stage_blocks * 64 / group) if grouped else 0
    stage = stage_blocks * block_bytes + groups * 64
    sums = (2 * total if group == 32 else total) * rows * 8 if grouped else 8 * rows
    slots = max(1, min(tiles, 16 // rows))
    x_row = total * 128 + 64 if kind == "plain" else (total | 1) * 64 * (2 if grouped else 1)
    fixed = rows * x_row + sums + slots * warps * 16 * rows * 4 + rows * warps * 8 + 16 * 16 + 256 + more
    stages = min(16, (limit - fixed) // stage)
    return Plan(stage_blocks, stages, slots, fixed + stages * stage) if stages >= 2 else None


@dataclass(frozen=True, eq=False)
class Gemv:
    """A weight in the kernel's layout."""

    kind: str
    weights: Tensor  # uint8, tiles
    records: Tensor | None  # group scales and zero points
    channel_scale: Tensor | None  # float32 [out], W8A8
    bias: Tensor | None
    out_features: int
    in_features: int
    group: int
    interleaved: bool
    dtype: torch.dtype
    scale_fp16: bool

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weights, self.records, self.channel_scale, self.bias) if t is not None)

    def fits(self, rows: int) -> bool:
        return self.plan(rows, tiles=1) is not None

    def plan(self, rows: int, *, tiles: int, warps: int | None = None, limit: int = SHARED_LIMIT, **more: int) -> Plan | None:
        """Beside another kernel, or else alone on its SM; None where even that is too much."""
        shape = (self.kind, self.in_features, self.group, rows)
        options = dict(more, tiles=tiles, warps=warps or WARPS[self.kind])
        return plan(*shape, limit=limit, **options) or plan(*shape, limit=SHARED_ALONE, **options)

    def defines(self, rows: int, chosen: Plan, *, warps: int, norm: bool, epilogue: str = "store") -> dict[str, int]:
        """What gemv.cuh is compiled for."""
        return {
            "FORMAT": FORMATS[self.kind], "FP16": int(self.dtype == torch.float16), "SCALE_FP16": int(self.scale_fp16),
            "KDIM": self.in_features, "NDIM": self.out_features, "ROWS": rows, "GROUP": self.group, "NORM": int(norm),
            "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(self.bias is not None), "WARPS": warps, "STAGES": chosen.stages,
            "STAGE_BLOCKS": chosen.stage_blocks, "SHARED_BYTES": chosen.shared, "SLOTS": chosen.slots,
        }

    def __call__(self, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
                 residual: Tensor | None = None, pdl: bool = True, warps: int | None = None, limit: int = SHARED_LIMIT,
                 stage_bytes: int = 16384, grid: int | None = None) -> Tensor:
        """x [rows, in], rows 1, 2, 4 or 8 → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
        rows, warps = x.shape[0], warps or WARPS[self.kind]
        epilogue = "silu" if self.interleaved else "store" if residual is None else "residual"
        if out is None:
            out = torch.empty(rows, self.out_features // (2 if self.interleaved else 1), dtype=self.dtype, device=x.device)
        tiles = math.ceil(self.out_features / 16)
        grid = grid or min(tiles, processors(x.device.index or 0))
        chosen = self.plan(rows, tiles=math.ceil(tiles / grid), warps=warps, limit=limit, stage_bytes=stage_bytes)
        if chosen is None:
            raise ValueError(f"{rows} rows of {self.in_features} inputs do not fit into shared memory")
        defines = self.defines(rows, chosen, warps=warps, norm=norm is not None, epilogue=epilogue)
        kernel = jit.load("gemv.cu", defines=defines).kernel("gemv")
        args = (self.weights, self.records, self.channel_scale, x, norm, self.bias, residual, out, float(epsilon))
        kernel.launch(grid, 32 * (warps + 1), args, shared=chosen.shared, pdl=pdl)
        return out


def interleave_rows(rows: Tensor) -> Tensor:
    """[gate | up] → gate and up by turns, eight rows each: how an interleaved weight stores its outputs."""
    return rows.view(2, rows.shape[0] // 16, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def deinterleave(rows: Tensor, interleaved: bool) -> Tensor:
    return rows.view(-1, 2, 8).transpose(0, 1).reshape(-1) if interleaved else rows


@functools.cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def prepare(tensor: QuantTensor, *, dtype: torch.dtype, bias: Tensor | None = None, interleave: bool = False) -> Gemv:
    """Lay `tensor` out for the kernel; `interleave` for a merged gate/up whose silu·mul is to be fused."""
    kind = format_of(tensor, dtype)
    if kind is None:
        raise ValueError(f"no gemv path for {tensor.kind}")
    rows, columns = tensor.matrix_shape
    if interleave and bias is not None:
        bias = interleave_rows(bias)
    records = channel_scale = None
    group, scale_fp16 = 64, False
    if isinstance(tensor, Plain):
        codes = tensor.weight.to(dtype)
    elif isinstance(tensor, Int8Channel):
        codes = tensor.codes
        channel_scale = tensor.scales.float().flatten()
        if interleave:
            channel_scale = interleave_rows(channel_scale)
    else:
        assert isinstance(tensor, IntGroup)
        codes = tensor.values().to(torch.uint8)
        records, group = group_records(tensor, interleave=interleave), min(tensor.group_size, columns)
        scale_fp16 = scale_dtype(tensor) == torch.float16
    return Gemv(kind, layout(codes, kind, interleave=interleave), records, channel_scale,
                None if bias is None else bias.to(dtype).contiguous(), rows, columns, group, interleave, dtype, scale_fp16)
