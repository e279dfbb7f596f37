"""Rows times a tiled weight with Hopper's warpgroup products: host side of cuda/pack.cu and
cuda/gemm.cu.

x is packed first, with the norm and W8A8's quantization in the same pass; bias, residual or
act(gate)·up end the product. Where neither is to be done, the kernel that makes x writes it packed
(`GemmInput`): gate/up for down, decode attention for o. That kernel may still read its own packed
x, so there are two buffers; two are enough, because every kernel writes only after its wait for the
one before it, which has itself waited: nothing earlier is still reading.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.fused import Norm, PackedInput
from flyweight.kernels.linear.gemm_shape import (
    CLUSTERS,
    LEAST_TOKENS,
    MAILBOX,
    Forced,
    Product,
    Shape,
    shape_for,
)
from flyweight.kernels.linear.tiles import EPILOGUES, Matrix, TiledWeight

PACK_WARPS = 8  # of a CTA of pack.cu that neither norms nor quantizes
INT16_CODES = 3  # QUANTIZE of pack.cu


@dataclass(frozen=True)
class Order:
    """Of the inputs in packed x (cuda/packed.cuh)."""

    stage_blocks: int  # of the product that reads it
    order: int

    @property
    def defines(self) -> dict[str, int]:
        """For the kernel before that product."""
        return {"PACKED": self.stage_blocks, "ORDER": self.order}


@dataclass(frozen=True, eq=False)
class GemmInput(PackedInput):
    order: Order = Order(1, 0)


class Packing(NamedTuple):
    """Of pack.cu: rows and warps of a CTA, and how many CTAs share its rows."""

    rows: int
    warps: int
    parts: int


def unsupported_reason(
    matrix: Matrix, rows: int, device: Gpu, *, interleaved: bool = False
) -> str | None:
    """None, or why these rows do not go through gemm.cu."""
    return _unsupported_reason(matrix, padded_rows(rows), device, interleaved)


@functools.cache
def _unsupported_reason(matrix: Matrix, rows: int, device: Gpu, interleaved: bool) -> str | None:
    if not device.has_warpgroups:
        return "needs Hopper's matrix units"
    if matrix.out_features % (4 if interleaved else 2):
        return "outputs are written in pairs"
    if shape_for(Product(matrix, rows), device) is None:
        return (
            f"{matrix.in_features} inputs in groups of {matrix.group} do not fit into whole stages"
        )
    return None


def padded_rows(rows: int) -> int:
    """Calls with so many rows are alike: the next power of two, or multiple of 64, 128 or the
    largest tile.
    """
    if rows <= 256:
        return max(LEAST_TOKENS, 1 << (rows - 1).bit_length())
    step = 64 if rows <= 384 else 128 if rows <= 1024 else 256
    return -(-rows // step) * step


def packing_for(
    columns: int, padded: int, *, norm: bool, quantized: bool, int16: bool = False
) -> Packing:
    """8 rows that fill whole lines, fewer where there are few and something is to be known of whole
    rows. A thread that holds 16 pieces of normed x has too few registers: 11 are faster. Quantized,
    4 or 2 rows are: then an SM has several CTAs, and one writes while another reads. For int16
    inputs one row, of which 16 lanes have a group.
    """
    eights = math.ceil(columns / 64) * 8
    if int16 and not norm:
        warps = next((count for count in (4, 2, 1) if eights % (32 * count) == 0), 4)
        return Packing(1, warps, 1 if eights % (32 * warps) else eights // (32 * warps))
    if not norm and not quantized:
        return Packing(
            8, PACK_WARPS, 1 if eights % (4 * PACK_WARPS) else eights // (4 * PACK_WARPS)
        )
    if padded <= 512 and norm and quantized:
        return Packing(1, 8 if eights <= 1024 else 16, 1)
    if padded <= 32:
        warps = 4 if eights <= 1024 else 8
        return Packing(1, warps, math.ceil(eights / (32 * warps)))
    if padded <= 512:
        warps = 8 if eights <= 2048 else 16
        split = 2 if norm else 3 if padded <= 64 and eights > 1024 else 1  # 64 rows are 32 CTAs
        return Packing(2, warps, split if eights > 16 * warps else 1)
    if norm and quantized and eights % 64 == 0 and 4 <= eights // 64 <= 16:
        return Packing(2, eights // 64, 1)  # four pieces a thread
    return (None if norm else _even_packing(eights)) or Packing(
        8, max(8, min(24, math.ceil(eights / (64 if quantized else 43)))), 1
    )


def _even_packing(eights: int) -> Packing | None:
    """Many rows to be quantized, in CTAs whose threads all have as much to do."""
    for rows, most in ((4, 16), (2, 24)):
        for warps in range(4, most + 1):
            held, rest = divmod(eights * rows, 32 * warps)
            if held <= 16 and not rest:
                return Packing(rows, warps, 1)
    return None


@dataclass(frozen=True)
class Ends:
    """What is compiled into the two kernels besides the product."""

    norm: bool = False
    epilogue: str = "store"
    to: Order | None = None  # results are packed x
    experts: bool = False  # rows in tiles of one expert each (experts/)


def kernels(
    weight: TiledWeight, shape: Shape, packing: Packing, ends: Ends
) -> tuple[jit.Kernel, jit.Kernel]:
    """pack.cu's and gemm.cu's, kept with the weight: prompts launch them from Python, and should
    not wait for that.
    """
    key = (shape, packing, ends)
    if key not in weight.calls:
        weight.calls[key] = _load_kernels(weight, shape, packing, ends)
    return weight.calls[key]


def _load_kernels(
    weight: TiledWeight, shape: Shape, packing: Packing, ends: Ends
) -> tuple[jit.Kernel, jit.Kernel]:
    form = weight.format
    types = weight.type_defines
    common = {"FP16": types["FP16"], "KDIM": weight.in_features, "SB": shape.stage_blocks}
    pack = jit.load(
        "pack.cu",
        defines=common
        | {
            "NORM": int(ends.norm),
            "QUANTIZE": form.input_codes,
            "STATIC": int(weight.static),
            "ORDER": form.input_order,
            "ROWS": packing.rows,
            "WARPS": packing.warps,
            "PARTS": packing.parts,
            "TILE": shape.tokens if ends.experts else 0,
            **(
                {"QUANTIZE": INT16_CODES, "SYMMETRIC": int(weight.symmetric)}
                if shape.int16_inputs
                else {}
            ),
        },
    )
    named = {
        "IN_PLANES": shape.int16_inputs,
        "APART": shape.separate_exchange,
        "BY_ROWS": weight.by_rows,
    }
    gemm = jit.load(
        "gemm.cu",
        registers=shape.registers,
        defines=common
        | {
            **form.defines(symmetric=weight.symmetric),
            "SCALE_FP16": types["SCALE_FP16"],
            "NDIM": weight.out_features,
            "GROUP": weight.group,
            "EPILOGUE": EPILOGUES[ends.epilogue],
            "BIAS": int(weight.bias is not None),
            "TOKENS": shape.tokens,
            "WGS": shape.warpgroups,
            "STAGES": shape.stages,
            "SPLIT": shape.split,
            "CLUSTER": shape.cluster,
            "STAGED": shape.staged,
            "LOADERS": shape.loaders,
            "TEAMS": shape.teams,
            "EXPERTS": int(ends.experts),
            **{name: 1 for name, value in named.items() if value},
            **({"BEFORE": shape.early_stages} if shape.early_stages < shape.stages else {}),
            **(ends.to.defines if ends.to else {}),
        },
    )
    return pack.kernel("pack"), gemm.kernel("gemm")


@dataclass(frozen=True)
class Call:
    """Everything about multiplying one weight with up to so many rows that does not change from
    call to call.
    """

    pack: jit.Kernel
    gemm: jit.Kernel
    shape: Shape
    order: Order
    packing: Packing
    grid: int
    packed_bytes: int
    scale_bytes: int
    sums: int  # words of partial sums

    @property
    def cluster(self) -> int:
        return self.shape.cluster if self.shape.split == CLUSTERS else 1

    def padded(self, rows: int) -> int:
        return -(-rows // self.shape.tokens) * self.shape.tokens

    def partials(self, here: workspace.Workspace, processors: int) -> Tensor:
        if self.shape.split == MAILBOX:
            return here.mailbox(self.grid * self.sums)
        return here.bytes("partials", processors * self.sums * 4)


def packed_size(weight: TiledWeight, rows: int, *, int16: bool = False) -> int:
    """Bytes of so many rows of packed x."""
    each = 64 if weight.format.quantizes_input else 132 if int16 else 128
    return rows * weight.matrix.blocks * each


def _make_call(weight: TiledWeight, rows: int, device: Gpu, ends: Ends, forced: Forced) -> Call:
    residual = ends.epilogue == "residual"
    bare = not (ends.norm or residual or weight.interleaved)
    shape = shape_for(Product(weight.matrix, rows, residual=residual, bare=bare), device, forced)
    assert shape is not None
    padded = math.ceil(rows / shape.tokens) * shape.tokens
    packing = packing_for(
        weight.in_features,
        padded,
        norm=ends.norm,
        quantized=weight.format.quantizes_input,
        int16=shape.int16_inputs,
    )
    pack, gemm = kernels(weight, shape, packing, ends)
    return Call(
        pack,
        gemm,
        shape,
        Order(shape.stage_blocks, weight.format.input_order),
        packing,
        grid=shape.grid(device.processors),
        packed_bytes=packed_size(weight, padded, int16=shape.int16_inputs),
        scale_bytes=padded * 4,
        sums=shape.warpgroups * 64 * shape.tokens,
    )


def _call(
    weight: TiledWeight, rows: int, device: torch.device, ends: Ends, forced: Forced | None
) -> Call:
    most = padded_rows(rows)
    key = (most, ends.norm, ends.epilogue, ends.to, forced)
    call = weight.calls.get(key)
    if call is None:
        call = weight.calls[key] = _make_call(
            weight, most, gpu.of(device), ends, forced or Forced()
        )
    return call


def packed_input(
    weight: TiledWeight,
    rows: int,
    device: torch.device,
    *,
    residual: bool,
    forced: Forced | None = None,
) -> GemmInput | None:
    """Where the kernel before writes x for `multiply`, which has to be called with the same
    residual and cut; None where x becomes integers, of which that kernel knows nothing.
    """
    epilogue = weight.activation or ("residual" if residual else "store")
    call = _call(weight, rows, device, Ends(epilogue=epilogue), forced)
    if call.shape.int16_inputs:
        return None
    data = workspace.current(device).bytes("packed ahead", call.packed_bytes)
    return GemmInput(data, rows, call.padded(rows) // 8, call.order.defines, order=call.order)


def multiply(
    weight: TiledWeight,
    x: Tensor | PackedInput,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    to: PackedInput | None = None,
    pdl: bool = True,
    forced: Forced | None = None,
) -> Tensor:
    """x [rows, in] → [rows, out] (half of it for an interleaved gate/up: act(gate) · up); `to`:
    into the next one's x.
    """
    data, rows = (x.data, x.rows) if isinstance(x, PackedInput) else (x, x.shape[0])
    ends = Ends(
        norm is not None, weight.epilogue(residual), to.order if isinstance(to, GemmInput) else None
    )
    call = _call(weight, rows, data.device, ends, forced)
    here = workspace.current(data.device)
    if to is not None:
        out = to.data
    elif out is None:
        out = weight.empty_result(rows, data.device)
    row_scale = here.bytes("row scale", call.scale_bytes)
    if isinstance(x, GemmInput):
        assert norm is None and (x.groups * 8, x.order) == (call.padded(rows), call.order)
    else:
        data = here.bytes("packed", call.packed_bytes)
        _pack(weight, call, x, data, row_scale, norm=norm, pdl=pdl)
    processors = gpu.of(data.device).processors
    args = (
        weight.weights,
        weight.records,
        weight.channel_scale,
        data,
        row_scale,
        weight.bias,
        residual,
        out,
        call.partials(here, processors),
        here.bytes("flags", processors * 4),
        None,
        None,
        rows,
        to.groups if to else 0,
    )
    call.gemm.launch(
        call.grid, call.shape.block, args, shared=call.shape.shared, pdl=pdl, cluster=call.cluster
    )
    return out


def _pack(
    weight: TiledWeight,
    call: Call,
    x: Tensor | PackedInput,
    packed: Tensor,
    row_scale: Tensor,
    *,
    norm: Norm | None,
    pdl: bool,
) -> None:
    assert isinstance(x, Tensor)
    rows = x.shape[0]
    padded = call.padded(rows)
    groups = padded // (4 if call.shape.int16_inputs else 8)
    args = (
        x,
        norm and norm.weight,
        packed,
        row_scale,
        rows,
        groups,
        norm.epsilon if norm else 0.0,
        weight.static_scale,
        None,
        None,
    )
    call.pack.launch(
        padded // call.packing.rows * call.packing.parts, 32 * call.packing.warps, args, pdl=pdl
    )
