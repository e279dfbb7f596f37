"""A QuantTensor in the layout of source/matrix.h: blocks of eight outputs, groups of inputs under
one scale.

Every kind keeps about the bits of its file:

    IntGroup      2 to 6 and 8 bits as they are, 7 → 8; scales in float16 where that holds them (a
                  power of two for all may help), else float32. Act-order: x is reordered.
    IntBlock      as it is, sub-scales and sub-minima in 8 bits (blocks.py)
    Float4, NvFloat4  as they are (blocks.py)
    Int8Channel   8 bits, one float32 scale an output, x in 8 bits by token: what the format means
    Plain         as it is; float32 in 16 bits where those hold every value. Where the processor
                  multiplies float16, 16 bits become float16 times a power of two
    Float8        8 bits; x rounded to float8 where the format says so
    Sparse24      with its zeros written out, in the bits of the kept values
    Trellis       as it is, its words by output; scales in float32
    VectorQuant   16-bit indices, residual indices in 8 or 16 bits; books of vectors of eight

`exact` keeps x in float32 for weight-only kinds; without it integers multiply integers, x
rounded to 8 bits by group, and float16 multiplies float16.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels.native import blocks as small_codes
from flyweight.kernels.native import library
from flyweight.kernels.native.matrix import (
    ACTIVATIONS,
    FLOATS,
    FORMATS,
    HALF_WEIGHT,
    INPUT_GROUP,
    LONGEST_GROUP,
    WIDTH,
    Packing,
    Weight,
    blocks,
    empty_matrix,
)
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    NvFloat4,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
    VectorQuant,
)
from flyweight.tensors.trellis import BLOCK as TRELLIS_BLOCK
from flyweight.tensors.trellis import UNIT as TRELLIS_UNIT


@dataclass(frozen=True)
class Source:
    """What the packer reads: rows of codes, scales by output and group of the weight's own."""

    codes: Tensor  # uint8 or int8 [outputs, bytes]; floats [outputs, inputs]
    bits: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0
    is_signed: bool = False


def pack(tensor: QuantTensor, *, exact: bool = False, bias: Tensor | None = None) -> Weight:
    if tensor.experts is not None:
        raise ValueError("experts are packed one by one")
    weight = _pack(tensor, exact)
    if bias is not None:
        padded = torch.zeros(blocks(tensor.matrix_shape[0]) * WIDTH)
        padded[: len(bias)] = bias.float()
        weight.keep("bias", padded)
    return weight


def _pack(tensor: QuantTensor, exact: bool) -> Weight:
    if isinstance(tensor, Sparse24):
        return _pack(tensor.to_dense(), exact)
    if isinstance(tensor, IntBlock) and tensor.group_size % 16 == 0:
        return small_codes.pack_blocks(tensor, exact=exact)
    if isinstance(tensor, Float4 | NvFloat4) and small_codes.holds_floats(tensor):
        return small_codes.pack_floats(tensor, exact=exact)
    if isinstance(tensor, IntGroup) and (layout := group_layout(tensor)):
        return pack_groups(tensor, layout, exact=exact)
    if isinstance(tensor, Int8Channel):
        return pack_channels(tensor)
    if isinstance(tensor, Float8) and not bool(
        (tensor.weight.view(torch.uint8) & 0x7F == 0x7F).any()
    ):
        return pack_float8(tensor)
    if isinstance(tensor, Plain):
        return pack_floats(tensor.weight, "as it is", exact=exact)
    if isinstance(tensor, VectorQuant) and takes_vectors(tensor):
        return pack_vectors(tensor)
    if isinstance(tensor, Trellis):
        return pack_trellis(tensor, exact=exact)
    # a float8 weight that holds NaN gives NaN whatever x is rounded to
    return pack_floats(
        tensor.dequantize(), f"no native layout for this {tensor.kind}: written out as floats"
    )


def _fill(weight: Weight, source: Source) -> Weight:
    """Make the data."""
    matrix = weight.matrix
    data = torch.empty(blocks(matrix.outputs) * matrix.block_bytes, dtype=torch.uint8)
    weight.keep("data", data)
    codes = source.codes.contiguous()
    scales = None if source.scales is None else source.scales.float().contiguous()
    zeros = None if source.zeros is None else source.zeros.contiguous()
    packing = Packing(
        w=ctypes.addressof(matrix),
        codes=codes.data_ptr(),
        row_bytes=codes.stride(0) * codes.element_size(),
        source_bits=source.bits,
        is_signed=source.is_signed,
        scales=_address(scales),
        zeros=_address(zeros),
        weight_group=source.group,
        weight_groups=0 if scales is None else scales.shape[1],
        factor=1 / matrix.factor,
        from_bfloats=codes.dtype == torch.bfloat16,
        to=data.data_ptr(),
    )
    library.load().matrix_pack(library.team(), ctypes.byref(packing))
    return weight


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- integers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLayout:
    group: int  # inputs under one copy of a scale: the weight's group or a part of it
    groups: int
    order: Tensor | None  # int32 [columns]: the input of each column, −1 for filling


def group_layout(tensor: IntGroup) -> GroupLayout | None:
    """None where the weight's groups do not come in whole steps of 16 inputs."""
    inputs, size = tensor.in_features, tensor.group_size
    if size >= inputs and tensor.g_idx is None:
        group = best_group(inputs)
        return GroupLayout(group, -(-inputs // group), None)
    if size % 16:
        return None
    group = next(
        (g for g in (128, 64, 32, 16) if size % g == 0 and (g < 64 or inputs % g == 0)), 16
    )
    if tensor.g_idx is None:
        return GroupLayout(group, -(-inputs // group), None)
    counts = torch.bincount(tensor.g_idx.long(), minlength=tensor.groups)
    if int(counts.max()) > size:
        return None
    order = torch.full(
        (tensor.groups, size), -1, dtype=torch.int32
    )  # each group's inputs, filled up
    by_group = tensor.g_idx.long().argsort(stable=True)
    start = counts.cumsum(0) - counts
    column = torch.arange(inputs) - start[tensor.g_idx.long()[by_group]]
    order[tensor.g_idx.long()[by_group], column] = by_group.to(torch.int32)
    return GroupLayout(group, order.numel() // group, order.flatten().contiguous())


def best_group(inputs: int) -> int:
    """Where the weight has one scale a row: the longest that needs no filling, or else little."""
    return next((group for group in (LONGEST_GROUP, 64, 32) if inputs % group == 0), 32)


def pack_groups(tensor: IntGroup, layout: GroupLayout, *, exact: bool) -> Weight:
    if tensor.bits in small_codes.BITS and tensor.bits != 4:
        return pack_small(tensor, layout, exact=exact)
    kind = "int4" if tensor.bits <= 4 else "int8"
    matrix = empty_matrix(tensor, kind, group=layout.group, groups=layout.groups)
    matrix.activation = ACTIVATIONS.index("as it is" if exact else "int8 by group")
    matrix.input_group = min(layout.group, INPUT_GROUP)
    scales, matrix.factor, matrix.wide_scales = narrow(tensor.scales, exact=exact)
    zeros = tensor.zeros
    if zeros is None and tensor.bits not in (
        4,
        8,
    ):  # the middle of the file's bits is not the middle of ours
        zeros = torch.full(scales.shape, 1 << (tensor.bits - 1), dtype=torch.uint8)
    matrix.zeros = int(zeros is not None)
    header = (32 if matrix.wide_scales else 16) + 16 * matrix.zeros
    codes = layout.group * WIDTH // (2 if kind == "int4" else 1)
    matrix.block_bytes = layout.groups * (header + codes)
    weight = Weight(
        matrix,
        f"{kind}, groups of {layout.group}"
        + (", x in float32" if exact else ", x in 8 bits by group"),
    )
    weight.keep("order", layout.order)
    if tensor.bits in (4, 8):  # the stream of the file is what the packer reads
        values, bits = tensor.codes.contiguous().view(torch.uint8), tensor.bits
    else:
        values, bits = tensor.values().to(torch.uint8), 8
    return _fill(
        weight, Source(values, bits, scales, zeros, min(tensor.group_size, matrix.columns))
    )


def pack_small(tensor: IntGroup, layout: GroupLayout, *, exact: bool) -> Weight:
    """Codes of 2, 3, 5 and 6 bits."""
    scales, factor, wide = narrow(tensor.scales, exact=exact)
    values = tensor.values().to(torch.uint8)
    columns = layout.group * layout.groups
    whole = torch.nn.functional.pad(values, (0, max(0, columns - values.shape[1])))
    if layout.order is not None:  # what fills a group up meets an x of zero
        whole = values[:, layout.order.clamp(min=0).long()]
    each = -(-min(tensor.group_size, columns) // layout.group)  # copies of a scale
    spread = small_codes.Spread(
        scales=scales.repeat_interleave(each, 1)[:, : layout.groups],
        zeros=None
        if tensor.zeros is None
        else tensor.zeros.repeat_interleave(each, 1)[:, : layout.groups],
        group=layout.group,
        bits=tensor.bits,
        wide=bool(wide),
    )
    weight = small_codes.pack_integers(tensor, whole, spread, exact=exact)
    weight.matrix.factor = factor
    weight.keep("order", layout.order)
    return weight


def narrow(scales: Tensor, *, exact: bool) -> tuple[Tensor, float, int]:
    """Scales times a power of two, the way back, and whether they need float32."""
    wide = scales.float()
    largest = float(wide.abs().max())
    if not 0 < largest < float("inf"):
        return wide, 1.0, 1
    shift = 2.0 ** (14 - int(torch.tensor(largest).frexp().exponent))
    moved = wide * shift
    fits = torch.equal(moved.half().float(), moved)
    if fits or (not exact and scales.shape[-1] > 1):
        return moved, 1 / shift, 0
    return wide, 1.0, 1


def pack_channels(tensor: Int8Channel) -> Weight:
    """x by token is one group; a static scale of x is rounding that leaves floats."""
    inputs = tensor.matrix_shape[1]
    group = -(-inputs // 16) * 16
    matrix = empty_matrix(tensor, "int8", group=group, groups=1)
    matrix.wide_scales = 1
    matrix.block_bytes = 32 + group * WIDTH
    matrix.activation = ACTIVATIONS.index("int8 by group")
    if tensor.input_scale is not None:
        matrix.activation = ACTIVATIONS.index("int8 static")
        matrix.input_scale = float(tensor.input_scale)
        matrix.input_zero = 0.0 if tensor.input_zero is None else float(tensor.input_zero)
    scales = tensor.scales.float().expand(len(tensor.codes), 1)
    return _fill(
        Weight(matrix, "int8, x in 8 bits"),
        Source(tensor.codes, 8, scales, None, group, is_signed=True),
    )


# -- floats ----------------------------------------------------------------------------------------


def pack_floats(values: Tensor, why: str, *, exact: bool = True) -> Weight:
    if values.dtype == torch.float32 and torch.equal(values.half().float(), values):
        values = values.half()
    shift = half_shift(values)
    if values.dtype == torch.float16 and shift is None:
        values = values.float()  # the kernels know numbers only
    kind = FLOATS[values.dtype]
    halves = not exact and values.dtype != torch.float32 and bool(library.load().half_products())
    if halves and shift is not None:
        kind = "float16"
        why = f"{why}, x in float16, sums of 32 in float16"
    group = -(-values.shape[1] // 8) * 8
    matrix = empty_matrix(values, kind, group=group, groups=1)
    matrix.block_bytes = group * WIDTH * values.element_size()
    if halves and shift is not None:
        matrix.activation = ACTIVATIONS.index("float16 by row")
        matrix.factor = 2.0**-shift
    return _fill(Weight(matrix, f"{kind}, {why}"), Source(values, 8 * values.element_size()))


def half_shift(values: Tensor) -> int | None:
    """The power of two that brings the largest value to between HALF_WEIGHT / 2 and HALF_WEIGHT;
    None where there are NaN or infinity.
    """
    low, high = values.aminmax()
    largest = max(float(high), -float(low))
    if not largest < float("inf"):  # of NaN, too
        return None
    return int(math.log2(HALF_WEIGHT)) - math.frexp(largest)[1] if largest else 0


def pack_float8(tensor: Float8) -> Weight:
    inputs = tensor.matrix_shape[1]
    group = tensor.block or -(-inputs // 8) * 8
    groups = -(-inputs // group)
    matrix = empty_matrix(tensor, "float8", group=group, groups=groups)
    names = {
        "none": "as it is",
        "token": "float8 by token",
        "static": "float8 static",
        "group": "float8 by group",
    }
    matrix.activation = ACTIVATIONS.index(names[tensor.activation])
    if tensor.input_scale is not None:
        matrix.input_scale = float(tensor.input_scale)
    matrix.block_bytes = group * groups * WIDTH
    weight = Weight(matrix, f"float8, x {names[tensor.activation]}")
    weight.keep("scales", float8_scales(tensor, groups))
    return _fill(weight, Source(tensor.weight.view(torch.uint8), 8))


def float8_scales(tensor: Float8, groups: int) -> Tensor:
    """[blocks, groups, 8]"""
    outputs = tensor.matrix_shape[0]
    rows = tensor.scales.float()
    rows = (
        rows.repeat_interleave(tensor.block, 0)[:outputs]
        if tensor.block
        else rows.expand(outputs, 1)
    )
    padded = torch.zeros(blocks(outputs) * WIDTH, groups)
    padded[:outputs] = rows
    return padded.view(-1, WIDTH, groups).transpose(1, 2).contiguous()


# -- vectors ---------------------------------------------------------------------------------------


def takes_vectors(tensor: VectorQuant) -> bool:
    """An entry of a book must be a block of outputs, and an index fit into 16 bits."""
    return (
        tensor.length == WIDTH
        and not tensor.outliers
        and max(tensor.index_bits) <= 16
        and tensor.group_columns % 8 == 0
    )


def pack_vectors(tensor: VectorQuant) -> Weight:
    groups = tensor.codebook.shape[0]
    matrix = empty_matrix(tensor, "vectors", group=tensor.group_columns, groups=groups)
    main, residual = tensor.split_indices()  # [groups, blocks, columns]
    parts = [_by_block(main).to(torch.uint16).view(torch.uint8)]
    if residual is not None:
        matrix.residual_bytes = 1 if tensor.index_bits[1] <= 8 else 2
        parts.append(
            _by_block(residual)
            .to(torch.uint8 if matrix.residual_bytes == 1 else torch.uint16)
            .view(torch.uint8)
        )
    data = torch.cat(parts, 1).contiguous()
    matrix.block_bytes = data.shape[1]
    weight = Weight(matrix, "vectors of eight, x in float32")
    weight.keep("data", data)
    books = [book for book in (tensor.codebook, tensor.residual) if book is not None]
    dtype = book_dtype(books)
    matrix.wide_scales = (torch.float16, torch.float32, torch.bfloat16).index(dtype)
    weight.keep("book", tensor.codebook.to(dtype).contiguous())
    matrix.entries = tensor.codebook.shape[1]
    if tensor.residual is not None:
        weight.keep("residual", tensor.residual.to(dtype).contiguous())
        matrix.residual_entries = tensor.residual.shape[1]
    order = torch.arange(tensor.in_features) if tensor.perm is None else tensor.perm.long()
    weight.keep("order", None if tensor.perm is None else order.to(torch.int32).contiguous())
    weight.keep(
        "column_scale", None if tensor.scale is None else tensor.scale.float()[order].contiguous()
    )
    weight.keep(
        "column_bias", None if tensor.bias is None else tensor.bias.float()[order].contiguous()
    )
    return weight


def pack_trellis(tensor: Trellis, *, exact: bool) -> Weight:
    columns = tensor.matrix_shape[1]
    matrix = empty_matrix(tensor, "trellis", group=TRELLIS_BLOCK, groups=columns // TRELLIS_BLOCK)
    matrix.activation = ACTIVATIONS.index("as it is" if exact else "int8 by group")
    matrix.input_group = INPUT_GROUP
    matrix.bits = tensor.bits
    matrix.super_groups = matrix.groups if tensor.groups == 1 else TRELLIS_UNIT // TRELLIS_BLOCK
    why = "x in float32" if exact else "x in 8 bits by group"
    weight = Weight(matrix, f"trellis of {tensor.bits} bits, {why}")
    words = tensor.words.unflatten(2, (WIDTH, 4))  # [tile, block, g, t, word]
    whole = words.shape[1] // 2 * 2
    circles = words[:, :whole].unflatten(1, (-1, 2)).permute(0, 1, 4, 2, 5, 3)
    last = words[:, whole:].permute(0, 1, 3, 4, 2)
    data = torch.cat([circles.flatten(1), last.flatten(1)], 1)
    matrix.block_bytes = data[0].nbytes // 2
    weight.keep("data", data.view(torch.uint8).flatten())
    scales = torch.zeros(2 * WIDTH * len(data), tensor.groups)
    scales[: len(tensor.scales)] = tensor.scales.float()
    weight.keep("scales", scales.view(-1, WIDTH, tensor.groups).transpose(1, 2).contiguous())
    return weight


def book_dtype(books: list[Tensor]) -> torch.dtype:
    """Books are looked up at random: the fewer bytes, the nearer the cache that holds them."""
    if all(book.dtype == torch.bfloat16 for book in books):
        return torch.bfloat16
    fits = all(torch.equal(book.float().half().float(), book.float()) for book in books)
    return torch.float16 if fits else torch.float32


def _by_block(indices: Tensor) -> Tensor:
    """[groups, blocks, columns] → [blocks, groups · columns]"""
    return indices.transpose(0, 1).flatten(1)


def describe(weight: Weight) -> dict[str, Any]:
    """For `info` and for tests."""
    return {
        "format": FORMATS[weight.matrix.format],
        "activation": ACTIVATIONS[weight.matrix.activation],
        "group": weight.matrix.group,
        "nbytes": weight.nbytes,
        "why": weight.why,
    }
