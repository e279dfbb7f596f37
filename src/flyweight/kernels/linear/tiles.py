"""A weight in tiles: the one copy that a GPU holds, in the order in which the matrix units read it.

`prepare` lays a QuantTensor out once. All kernels of this folder read the same tiles: 16 outputs ×
64 inputs are a block, the blocks of 16 outputs a tile. Group scales and zero points lie beside them
as records of 16 outputs.
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
from flyweight.gpu import Gpu
from flyweight.kernels.linear.bits import tile_planes, tile_records
from flyweight.kernels.linear.format import FORMATS, PLAIN, Codes, WeightFormat
from flyweight.packing import unpack
from flyweight.tensors import QuantTensor, Sparse24

# Of a merged gate/up, as the CUDA sources number them (cuda/activation.cuh); 0: none.
ACTIVATIONS = {"silu": 2, "gelu_tanh": 3, "clipped_swiglu": 4}
EPILOGUES = {"store": 0, "residual": 1, **ACTIVATIONS}  # EPILOGUE of the CUDA sources


@dataclass(frozen=True)
class Matrix:
    """What plans depend on of a weight."""

    format: WeightFormat
    out_features: int
    in_features: int
    group: int  # inputs that share a scale

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def tiles(self) -> int:
        return math.ceil(self.out_features / 16)

    @property
    def blocks(self) -> int:
        """Of 64 inputs, in a tile."""
        return math.ceil(self.in_features / 64)

    def cuts_units(self, blocks: int) -> bool:
        """Whether stages of so many have parts of what is read together."""
        return blocks % self.format.unit_blocks > 0 and blocks != self.blocks

    @property
    def in_sixteen_bits(self) -> Matrix:
        return Matrix(PLAIN, self.out_features, self.in_features, 64)

    @property
    def deep(self) -> bool:
        return self.in_features >= self.out_features


@dataclass(frozen=True)
class Outline:
    """What the choice of a kernel depends on of a weight; the same linear of all layers has one."""

    matrix: Matrix
    interleaved: bool
    static: bool
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """A weight in the kernels' layout."""

    matrix: Matrix
    weights: Tensor  # uint8, tiles
    dtype: torch.dtype
    records: Tensor | None = None  # group scales and zero points
    # float32 [out]; then one for x where that is known beforehand (`static`)
    channel_scale: Tensor | None = None
    bias: Tensor | None = None
    # of a merged gate/up: its rows lie by turns, and act(gate) · up ends the product
    activation: str | None = None
    scale_fp16: bool = False
    static: bool = False
    symmetric: bool = False  # codes are taken as signed
    # 16-bit tiles as untile.cu and vptq_decode.cu write them: for gemm.cu alone
    by_rows: bool = False
    # int16 [in]: which input of x each column is for, where that is not their order (permuted.py)
    order: Tensor | None = None
    # a ring of one row is filled at once: memory has nothing else to do before x is there
    early: bool = False
    # Kernels loaded once, by rows and fusion: prompts launch from Python, and should not wait for
    # that. No addresses.
    calls: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def format(self) -> WeightFormat:
        return self.matrix.format

    @property
    def out_features(self) -> int:
        return self.matrix.out_features

    @property
    def in_features(self) -> int:
        return self.matrix.in_features

    @property
    def group(self) -> int:
        return self.matrix.group

    @property
    def interleaved(self) -> bool:
        """Whether outputs of gate and up lie by turns."""
        return self.activation is not None

    @functools.cached_property
    def outline(self) -> Outline:
        return Outline(self.matrix, self.interleaved, self.static, self.dtype)

    @property
    def width(self) -> int:
        """Of a result: half of the outputs where gate and up are multiplied."""
        return self.out_features // 2 if self.interleaved else self.out_features

    @property
    def nbytes(self) -> int:
        parts = (self.weights, self.records, self.channel_scale, self.bias, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def static_scale(self) -> Tensor | None:
        return (
            self.channel_scale[self.out_features :]
            if self.static and self.channel_scale is not None
            else None
        )

    @property
    def type_defines(self) -> dict[str, int]:
        return {"FP16": int(self.dtype == torch.float16), "SCALE_FP16": int(self.scale_fp16)}

    def epilogue(self, residual: Tensor | None) -> str:
        return self.activation or ("store" if residual is None else "residual")

    def empty_result(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty(rows, self.width, dtype=self.dtype, device=device)

    def in_sixteen_bits(self) -> TiledWeight:
        """The same linear with weights in 16 bits, which are written for each call."""
        key = ("sixteen bits",)
        if key not in self.calls:
            self.calls[key] = dataclasses.replace(
                self,
                matrix=self.matrix.in_sixteen_bits,
                weights=self.weights[:0],
                records=None,
                scale_fp16=False,
                symmetric=False,
                by_rows=True,
                calls={},
            )
        return self.calls[key]

    def in_eight_bits(self, form: WeightFormat, largest: Tensor) -> TiledWeight:
        """The same linear in 8-bit codes that are written for each call, x in 8 bits too.
        `largest`: of each output the largest weight, [out] in the order of the tiles.
        """
        scale = (largest.float() / form.largest_code).clamp(min=torch.finfo(torch.float16).tiny)
        return dataclasses.replace(
            self,
            matrix=Matrix(form, self.out_features, self.in_features, 64),
            weights=self.weights[:0],
            records=None,
            channel_scale=scale,
            scale_fp16=False,
            symmetric=False,
            calls={},
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"calls": {}}  # kernels cannot be copied


def format_of(tensor: QuantTensor, dtype: torch.dtype) -> WeightFormat | None:
    """The format whose tiles hold this weight, or None where there is none."""
    on_gpu = tensor.device.type == "cuda"
    return format_for(tensor, dtype, gpu.of(tensor.device) if on_gpu else None)


def format_for(tensor: QuantTensor, dtype: torch.dtype, device: Gpu | None) -> WeightFormat | None:
    """The same on a GPU, whatever device the weight is on (None: one that takes all formats)."""
    if (
        tensor.experts is not None
        or tensor.matrix_shape[1] % 8
        or dtype not in (torch.float16, torch.bfloat16)
    ):
        return None
    has_float8 = device is None or device.has_float8

    def takes(one: WeightFormat) -> bool:
        unfit = one.widened if has_float8 else one.needs_float8
        return one.matches(tensor) and not unfit

    found = next((one for one in FORMATS.values() if takes(one)), None)
    return None if found is None else found.of(tensor)


def prepare(
    tensor: QuantTensor,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> TiledWeight:
    """Lay `tensor` out; `activation` is that of a merged gate/up, to be fused."""
    interleave = activation is not None
    form = format_of(tensor, dtype)
    if form is None:
        raise ValueError(f"no tiles hold {tensor.kind}")
    rows, columns = tensor.matrix_shape
    parts = form.read(tensor, dtype)
    channel_scale = parts.channel_scale
    if interleave:
        bias = None if bias is None else interleave_rows(bias)
        channel_scale = None if channel_scale is None else interleave_rows(channel_scale)
    if channel_scale is not None and parts.input_scale is not None:
        channel_scale = torch.cat([channel_scale, parts.input_scale.float().view(1)])
    if interleave and not form.pairs_rows:
        raise ValueError(f"rows of {tensor.kind} stay where they are")
    if parts.tiles is not None:
        weights = parts.tiles
    elif isinstance(tensor, Sparse24):
        places = unpack(tensor.positions, 2, parts.codes.shape[1])
        weights = sparse_layout(parts.codes, places, form, interleave=interleave)
    else:
        weights = layout(parts.codes, form, interleave=interleave)
    return TiledWeight(
        matrix=Matrix(form, rows, columns, parts.group),
        weights=weights,
        dtype=dtype,
        records=group_records(parts, interleave=interleave),
        channel_scale=channel_scale,
        bias=None if bias is None else bias.to(dtype).contiguous(),
        activation=activation,
        scale_fp16=parts.scales is not None and scale_dtype(parts.scales) == torch.float16,
        static=parts.input_scale is not None,
        symmetric=form.signed_pays and parts.scales is not None and parts.zeros is None,
    )


def blocks(values: Tensor, *, interleave: bool) -> Tensor:
    """[out, in] → [tile, half row, row, block, half, lane column, step, pair, within pair]: 16 × 64
    blocks, padded with zeros.

    Row 8·(half row) + row of a tile; input 32·half + 8·column + 4·step + 2·pair + within. With
    `interleave` the first half of a tile's rows comes from the gate and the second from the up
    projection, so that one thread holds both.
    """
    rows, columns = values.shape
    if interleave:
        values = interleave_rows(values)
    values = torch.nn.functional.pad(values, (0, -columns % 64, 0, -rows % 16))
    return values.view(values.shape[0] // 16, 2, 8, values.shape[1] // 64, 2, 4, 2, 2, 2)


def layout(values: Tensor, form: WeightFormat, *, interleave: bool = False) -> Tensor:
    """Codes or plain weights [out, in] in the format's order, as bytes."""
    ordered = blocks(values, interleave=interleave).permute(form.order).contiguous()
    if form.in_planes:  # lanes of 4 words of 4 codes
        lanes = ordered.flatten(7).flatten(5, 6).flatten(3, 4)
        return tile_planes(lanes, form.bits)
    if form.bits == 4:
        pairs = ordered.view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)
    return ordered.view(-1).view(torch.uint8)


def sparse_layout(
    kept: Tensor, places: Tensor, form: WeightFormat, *, interleave: bool = False
) -> Tensor:
    """Kept codes and their places among four neighbours, both [out, in / 2]: of each block the
    codes, then a word for each lane.

    The sparse matrix units see the fours of 32 inputs in the order 0, 2, 4, 6, 1, 3, 5, 7: so x can
    lie as for the others.
    """
    rows, half = kept.shape
    tiles = math.ceil(rows / 16)
    count = math.ceil(half / 32)

    def fours(values: Tensor, fill: tuple[int, int]) -> Tensor:
        """→ [tile, half row, row, block, half, four, kept], fours as the matrix units see them."""
        padded = torch.tensor(fill, dtype=values.dtype, device=values.device).repeat(
            16 * tiles, 16 * count
        )
        padded[:rows, :half] = interleave_rows(values) if interleave else values
        return padded.view(tiles, 2, 8, count, 2, 4, 2, 2).transpose(5, 6).flatten(5, 6)

    # four → lane column, four of the lane
    codes = fours(kept.view(torch.uint8), (0, 0)).unflatten(5, (4, 2))
    if form.bits == 3:  # two codes to a byte, and a bit for their places
        codes = codes[:, :, :, :, 0] | codes[:, :, :, :, 1] << 4
        codes = codes.permute(0, 3, 2, 4, 1, 5, 6)  # tile, block, row, column, half row, four, kept
    else:
        # tile, block, row, column, half, half row, four, kept
        codes = codes.permute(0, 3, 2, 5, 4, 1, 6, 7)
    bits = fours(places, (0, 1)).flatten(5)  # two for each kept code
    words = (bits.long() << 2 * torch.arange(16, device=bits.device)).sum(-1).int()
    words = words.permute(0, 3, 2, 4, 1).contiguous()  # tile, block, row, half, half row
    return torch.cat([codes.flatten(2), words.view(torch.uint8).flatten(2)], 2).flatten()


def group_records(parts: Codes, *, interleave: bool) -> Tensor | None:
    """int32 [tiles, groups, 16]: scale bits in the low half, the zero point in the high half; or as
    many exponents in bytes; or (codes in planes) bytes [tiles, records, …].
    """
    if parts.record_parts is not None:
        own = parts.record_parts
        return tile_records([interleave_rows(part) for part in own] if interleave else own)
    if parts.block_scales is not None:
        return block_records(parts.block_scales, interleave=interleave)
    if parts.exponents is not None:
        records = parts.exponents
    elif parts.scales is not None:
        scales = parts.scales.to(scale_dtype(parts.scales)).view(torch.int16).int() & 0xFFFF
        zeros = torch.full_like(scales, parts.middle) if parts.zeros is None else parts.zeros.int()
        records = scales | (zeros << 16)
    else:
        return None
    rows, groups = records.shape
    if interleave:
        records = interleave_rows(records)
    records = torch.nn.functional.pad(records, (0, 0, 0, -rows % 16))
    return records.view(-1, 16, groups).transpose(1, 2).contiguous()


def block_records(scales: Tensor, *, interleave: bool) -> Tensor:
    """float32 [tiles, groups, 4]: the scales of a tile's first and last eight outputs, and room
    that makes a record 16 bytes.
    """
    rows, groups = scales.shape
    if interleave:
        scales = interleave_rows(scales)
    halves = torch.nn.functional.pad(scales, (0, 0, 0, -rows % 16)).view(-1, 2, 8, groups)[:, :, 0]
    return torch.nn.functional.pad(halves.transpose(1, 2), (0, 2)).contiguous()


def scale_dtype(scales: Tensor) -> torch.dtype:
    """Scales keep the float type they came in: fp16 scales rounded to bf16 would cost quality."""
    return torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float16


def interleave_rows(rows: Tensor) -> Tensor:
    """[gate | up] → gate and up by turns, eight rows each: how an interleaved weight stores its
    outputs.
    """
    return rows.view(2, rows.shape[0] // 16, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def deinterleave(rows: Tensor, interleaved: bool) -> Tensor:
    return rows.view(-1, 2, 8).transpose(0, 1).reshape(-1) if interleaved else rows
