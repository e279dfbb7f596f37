"""Few rows times a weight of any integer, float8 or plain kind: host side of cuda/gemv.cu.

`prepare` re-lays a weight out once, in the order in which the matrix units read it; `Gemv.__call__` launches. Norm
before, and bias, residual or silu·mul after, are fused: they are compile-time choices of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.choices import WARPS
from flyweight.packing import unpack
from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, QuantTensor, Sparse24

FORMATS = {"plain": 0, "int4": 1, "int8": 2, "w8a8": 3, "fp8": 4, "sparse-int4": 1, "sparse-int8": 2, "sparse-w8a8": 3}
EPILOGUES = {"store": 0, "residual": 1, "silu": 2}
BLOCK_BYTES = {"plain": 2048, "int4": 512, "int8": 1024, "w8a8": 1024, "fp8": 1024,  # of 16 outputs × 64 inputs
               "sparse-int4": 384, "sparse-int8": 640, "sparse-w8a8": 640}
GROUPED = ("int4", "int8", "sparse-int4", "sparse-int8")
SIGNED = ("int8", "sparse-int4", "sparse-int8")  # formats whose codes without zero points are worth a kernel of their own
QUANTIZED = {"w8a8": 1, "sparse-w8a8": 1, "fp8": 2}  # x becomes int8 (1) or float8 (2) codes
IN_REGISTERS = ("int4", "int8")  # formats of which 8 rows can stay in registers (cuda/gemv_registers.cuh)
MOST_PROCESSORS = 1024
# Format → most rows whose linears fill their rings one after the other. 16 bits lose by it, W8A8 where batch.cu has some of them.
IN_TURN = {"int4": 4, "few.cu": 16, "int8": 2, "w8a8": 2, "sparse-int4": 1, "sparse-int8": 2, "sparse-w8a8": 2}
# Stages of the ring that are fetched only when the kernel's inputs are there, so that memory has work meanwhile; 2 of others.
HELD = {"int4": 3}
SHARED_LIMIT = 112 * 1024  # two kernels on one SM: the next one streams weights while this one ends
# The driver sets an SM up for two CTAs of the kernel that comes first: below 97 KB for 196 KB of shared memory in all, where few
# pairs of kernels fit, instead of 228. It stays so while anything runs there.
SHARED_LEAST = 98 * 1024
SHARED_ALONE = 220 * 1024  # what a kernel takes when it does not fit beside another
SHARED_MORE = 116 * 1024  # two never fit on an SM
ROWS = (1, 2, 4, 8)


def format_of(tensor: QuantTensor, dtype: torch.dtype) -> str | None:
    """The kernel's name for this weight, or None where it has no such path."""
    if tensor.experts is not None or tensor.matrix_shape[1] % 8 or dtype not in (torch.float16, torch.bfloat16):
        return None
    if isinstance(tensor, Sparse24):
        kind = _format_of(tensor.inner, stretch=2)
        return kind and f"sparse-{kind}"
    return _format_of(tensor)


def _format_of(tensor: QuantTensor, stretch: int = 1) -> str | None:
    """`stretch`: inputs for one column of the weight."""
    if isinstance(tensor, Plain):
        return "plain"
    if isinstance(tensor, Float8) and tensor.activation in ("token", "static") and tensor.block is None:
        return "fp8" if has_float8(tensor.device) else None
    if isinstance(tensor, Int8Channel) and tensor.input_zero is None:
        return "w8a8"
    if isinstance(tensor, IntGroup) and tensor.bits in (4, 8) and tensor.g_idx is None:
        group = stretch * tensor.group_size
        if group in (32, 64) or group % 128 == 0 or group >= stretch * tensor.in_features:
            return f"int{tensor.bits}"
    return None


def has_float8(device: torch.device) -> bool:
    return device.type != "cuda" or gpu.capability(device) >= (8, 9)


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
    "fp8": (TILE, BLOCK, HALF, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN),
}


def layout(values: Tensor, kind: str, *, interleave: bool = False) -> Tensor:
    """Codes or plain weights [out, in] in the kernel's order, as bytes."""
    ordered = blocks(values, interleave=interleave).permute(ORDER[kind]).contiguous()
    if kind == "int4":
        pairs = ordered.view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)
    return ordered.view(-1).view(torch.uint8)


def sparse_layout(kept: Tensor, places: Tensor, kind: str, *, interleave: bool = False) -> Tensor:
    """Kept codes and their places among four neighbours, both [out, in / 2]: of each block the codes, then a word for each lane.

    The sparse matrix units see the fours of 32 inputs in the order 0, 2, 4, 6, 1, 3, 5, 7: so x can lie as for the others.
    """
    rows, half = kept.shape
    tiles, blocks = math.ceil(rows / 16), math.ceil(half / 32)

    def fours(values: Tensor, fill: tuple[int, int]) -> Tensor:
        """→ [tile, half row, row, block, half, four, kept], fours in the order of the matrix units."""
        padded = torch.tensor(fill, dtype=values.dtype, device=values.device).repeat(16 * tiles, 16 * blocks)
        padded[:rows, :half] = interleave_rows(values) if interleave else values
        return padded.view(tiles, 2, 8, blocks, 2, 4, 2, 2).transpose(5, 6).flatten(5, 6)

    codes = fours(kept.view(torch.uint8), (0, 0)).unflatten(5, (4, 2))  # four → lane column, four of the lane
    if kind == "sparse-int4":
        codes = codes[:, :, :, :, 0] | codes[:, :, :, :, 1] << 4
        codes = codes.permute(0, 3, 2, 4, 1, 5, 6)  # tile, block, row, column, half row, four, kept
    else:
        codes = codes.permute(0, 3, 2, 5, 4, 1, 6, 7)  # tile, block, row, column, half, half row, four, kept
    bits = fours(places, (0, 1)).flatten(5)  # two for each kept code
    words = (bits.long() << 2 * torch.arange(16, device=bits.device)).sum(-1).int()
    words = words.permute(0, 3, 2, 4, 1).contiguous()  # tile, block, row, half, half row
    return torch.cat([codes.flatten(2), words.view(torch.uint8).flatten(2)], 2).flatten()


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
    warps: int
    in_registers: bool = False  # x, or in shared memory


def slice_blocks(kind: str, columns: int, group: int, slices: int) -> tuple[int, int, int]:
    """(blocks that inputs are cut at, of the longest slice, of the shortest): the sizes of gemv.cuh."""
    total, grouped = math.ceil(columns / 64), kind in GROUPED
    unit = 2 if grouped and group % 128 == 0 else 1
    cut = group // 64 if grouped and 64 * unit < group < columns else unit
    cuts = math.ceil(total / cut)
    return cut, min(total, math.ceil(cuts / slices) * cut), cuts // slices * cut - (cuts * cut - total)


@functools.cache
def plan(kind: str, columns: int, group: int, rows: int, *, tiles: int, warps: int, limit: int,
         stage_bytes: int = 16384, more: int = 0, slices: int = 1, fewest: int = 2, slots: int | None = None,
         in_registers: bool = False) -> Plan | None:
    """`tiles`: the most that one CTA gets; `more`: bytes of shared memory that the kernel needs besides; `fewest` stages."""
    block_bytes, grouped = BLOCK_BYTES[kind], kind in GROUPED
    _, total, shortest = slice_blocks(kind, columns, group, slices)
    step = max(1, min(group, columns) // 64) if grouped and group < columns else (2 if grouped else 1)
    count = max(1, round(total * block_bytes / stage_bytes))
    while True:  # until no stage of the shortest slice is empty
        stage_blocks = min(math.ceil(math.ceil(total / count) / step) * step, math.ceil(total / step) * step)
        if (math.ceil(total / stage_blocks) - 1) * stage_blocks < shortest or count == 1:
            break
        count -= 1
    groups = math.ceil(stage_blocks * 64 / group) if grouped else 0
    stage = stage_blocks * block_bytes + groups * 64
    sums = (2 * total if group == 32 else total) * rows * 8 if grouped else 8 * rows
    slots = slots or max(1, min(tiles, 16 // rows))
    x_row = total * 128 + 64 if kind == "plain" else (total | 1) * 64 * (2 if grouped else 1)
    stats = rows * warps * 8 if rows == 1 else rows * (math.ceil(total / 4) + 1) * 8
    partial = slots * warps * 16 * rows * 4
    if in_registers:
        units = math.ceil(total / stage_blocks) * math.ceil(stage_blocks / 2 / warps)  # of 128 inputs, in a warp
        if units > 4 or total < 2 * warps:
            return None
        x_row, stats, partial = 0, rows * (warps + 1) * 8, max(partial, (total + 1) * 128)  # or the norm's weights
    fixed = rows * x_row + sums + partial + stats + 16 * 16 + 256 + more
    stages = min(16, (limit - fixed) // stage)
    shared = max(fixed + stages * stage, SHARED_LEAST)
    return Plan(stage_blocks, stages, slots, shared, warps, in_registers) if stages >= fewest else None


def register_plan(kind: str, columns: int, group: int, rows: int, **options: int) -> Plan | None:
    """With x in registers and an SM for itself, where format, groups and length of the rows allow it."""
    if kind not in IN_REGISTERS or rows != 8 or group % 128:
        return None
    return plan(kind, columns, group, rows, fewest=3, in_registers=True, limit=SHARED_ALONE, warps=8, **options)


@functools.cache
def fitting_plan(kind: str, columns: int, group: int, rows: int, *, alone: bool = False, **options: int) -> Plan | None:
    """Beside another kernel, or else (or `alone`: in any case) with an SM for itself; None where even that is too much.

    Several rows leave less room: three smaller stages keep memory busier than two large ones.
    """
    if alone:
        found = register_plan(kind, columns, group, rows, **options)
        found = found or plan(kind, columns, group, rows, limit=SHARED_ALONE, **{"warps": WARPS[kind]} | options)
        return found and dataclasses.replace(found, shared=max(found.shared, SHARED_MORE))
    options.setdefault("warps", WARPS[kind])
    several = [dict(fewest=3), dict(fewest=3, stage_bytes=8192), dict(fewest=3, stage_bytes=8192, slots=1)] if rows > 1 else []
    for choice in [*several, {}]:
        if found := plan(kind, columns, group, rows, limit=SHARED_LIMIT, **options | choice):
            return found
    return plan(kind, columns, group, rows, limit=SHARED_ALONE, **options)


@dataclass(frozen=True, eq=False)
class Gemv:
    """A weight in the kernel's layout."""

    kind: str
    weights: Tensor  # uint8, tiles
    records: Tensor | None  # group scales and zero points
    channel_scale: Tensor | None  # float32 [out], W8A8 and float8; then one for x where it is `static`
    bias: Tensor | None
    out_features: int
    in_features: int
    group: int
    interleaved: bool
    dtype: torch.dtype
    scale_fp16: bool
    static: bool = False
    symmetric: bool = False  # zero points in the middle: codes of 8 bits, and 2:4 ones, can be taken as signed
    by_rows: bool = False  # 16-bit tiles as untile.cu and vptq_decode.cu write them: for gemm.cu alone
    calls: dict[tuple, Any] = field(default_factory=dict, repr=False)  # what gemm.py has made ready for it, by rows and epilogue

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weights, self.records, self.channel_scale, self.bias) if t is not None)

    @property
    def static_scale(self) -> Tensor | None:
        return self.channel_scale[self.out_features:] if self.static and self.channel_scale is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"calls": {}}  # a copy has weights at other addresses

    def fits(self, rows: int) -> bool:
        return self.plan(rows, tiles=16 // rows) is not None

    def plan(self, rows: int, **options: int) -> Plan | None:
        return fitting_plan(self.kind, self.in_features, self.group, rows, **options)

    def defines(self, rows: int, chosen: Plan, *, norm: bool, epilogue: str = "store") -> dict[str, int]:
        """What gemv.cuh is compiled for."""
        return {
            **format_defines(self.kind, symmetric=self.symmetric), "STATIC": int(self.static),
            "FP16": int(self.dtype == torch.float16), "SCALE_FP16": int(self.scale_fp16),
            "KDIM": self.in_features, "NDIM": self.out_features, "ROWS": rows, "GROUP": self.group, "NORM": int(norm),
            "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(self.bias is not None), "WARPS": chosen.warps, "STAGES": chosen.stages,
            "STAGE_BLOCKS": chosen.stage_blocks, "SHARED_BYTES": chosen.shared, "SLOTS": chosen.slots,
            "HELD": min(HELD.get(self.kind, 2), chosen.stages - 1), **({"IN_REGISTERS": 1} if chosen.in_registers else {}),
        }

    def __call__(self, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
                 residual: Tensor | None = None, pdl: bool = True, alone: bool = False) -> Tensor:
        """x [rows, in], rows 1, 2, 4 or 8 → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
        rows = x.shape[0]
        epilogue = "silu" if self.interleaved else "store" if residual is None else "residual"
        if out is None:
            out = torch.empty(rows, self.out_features // (2 if self.interleaved else 1), dtype=self.dtype, device=x.device)
        grid = processors(x.device.index or 0)  # one on every SM, so that all offer the same room
        chosen = self.plan(rows, tiles=math.ceil(math.ceil(self.out_features / 16) / grid), alone=alone)
        if chosen is None:
            raise ValueError(f"{rows} rows of {self.in_features} inputs do not fit into shared memory")
        defines = self.defines(rows, chosen, norm=norm is not None, epilogue=epilogue)
        kernel = jit.load("gemv.cu", defines=defines).kernel("gemv")
        args = (self.weights, self.records, self.channel_scale, x, norm, self.bias, residual, out, float(epsilon),
                turns(self.kind, rows, x.device))
        kernel.launch(grid, 32 * (chosen.warps + 1), args, shared=chosen.shared, pdl=pdl)
        return out


def format_defines(kind: str, *, symmetric: bool = False) -> dict[str, int]:
    named = {"SPARSE": kind.startswith("sparse"), "SYMMETRIC": symmetric}  # only where true: the others keep their cubins
    return {"FORMAT": FORMATS[kind]} | {name: 1 for name, value in named.items() if value}


def interleave_rows(rows: Tensor) -> Tensor:
    """[gate | up] → gate and up by turns, eight rows each: how an interleaved weight stores its outputs."""
    return rows.view(2, rows.shape[0] // 16, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def deinterleave(rows: Tensor, interleaved: bool) -> Tensor:
    return rows.view(-1, 2, 8).transpose(0, 1).reshape(-1) if interleaved else rows


def turns(kind: str, rows: int, device: torch.device) -> Tensor | None:
    """Where linears of a format find out whose turn it is."""
    return _turns(device) if rows <= IN_TURN.get(kind, 0) else None


@functools.cache
def _turns(device: torch.device) -> Tensor:
    """Two numbers for each SM, never freed or moved: captured graphs hold their address."""
    return torch.zeros(2 * MOST_PROCESSORS, dtype=torch.int32, device=device)


@functools.cache
def processors(device: int) -> int:
    return gpu.properties(device).multi_processor_count


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
    inner = tensor.inner if isinstance(tensor, Sparse24) else tensor
    if isinstance(inner, Plain):
        codes = inner.weight.to(dtype)
    elif isinstance(inner, Int8Channel | Float8):
        codes = inner.codes if isinstance(inner, Int8Channel) else inner.weight.view(torch.uint8)
        channel_scale = inner.scales.float().expand(rows, 1).reshape(-1).contiguous()
        if interleave:
            channel_scale = interleave_rows(channel_scale)
        if inner.input_scale is not None:
            channel_scale = torch.cat([channel_scale, inner.input_scale.float().view(1)])
    else:
        assert isinstance(inner, IntGroup)
        codes = inner.values().to(torch.uint8)
        records, group = group_records(inner, interleave=interleave), min(columns // codes.shape[1] * inner.group_size, columns)
        scale_fp16 = scale_dtype(inner) == torch.float16
    if isinstance(tensor, Sparse24):
        weights = sparse_layout(codes, unpack(tensor.positions, 2, codes.shape[1]), kind, interleave=interleave)
    else:
        weights = layout(codes, kind, interleave=interleave)
    return Gemv(kind, weights, records, channel_scale, None if bias is None else bias.to(dtype).contiguous(), rows, columns,
                group, interleave, dtype, scale_fp16, static=channel_scale is not None and len(channel_scale) > rows,
                symmetric=kind in SIGNED and isinstance(inner, IntGroup) and inner.zeros is None)
