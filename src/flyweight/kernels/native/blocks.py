"""Codes of 2 to 6 bits in the layout of source/product_blocks.c: those of GGUF's files, integers of
bits that have no kernel of their own, and floats of 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels.native.matrix import (
    ACTIVATIONS,
    INPUT_GROUP,
    WIDTH,
    Weight,
    blocks,
    empty_matrix,
)
from flyweight.tensors import Float4, IntBlock, IntGroup, NvFloat4, QuantTensor
from flyweight.tensors.float4 import FLOAT4, FLOAT4_BLOCK, FLOAT4_GROUP

BITS = (2, 3, 4, 5, 6)
MINS_NONE, MINS_STORED, MINS_ZEROS = range(3)  # `Mins` of source/matrix.h
SUBS_NONE, SUBS_BYTES, SUBS_NIBBLES, SUBS_FLOAT8, SUBS_EXPONENTS = range(5)
SUB_BIAS = 128
AT_ONCE = 1 << 24  # codes that are put into order together


@dataclass(frozen=True)
class Spread:
    """Scales and zero points of an IntGroup by groups of the kernel's."""

    scales: Tensor  # float32 [out, groups]
    zeros: Tensor | None
    group: int
    bits: int
    wide: bool


def planes(values: Tensor, bits: int) -> Tensor:
    """uint8 codes [8 · n, columns] → [n, columns / 16, 16 · bits]: steps of 16 inputs."""
    # [n, output, step, quarter, input] → [n, step, quarter, output, input]
    parts = values.view(-1, WIDTH, values.shape[1] // 16, 4, 4).permute(0, 2, 3, 1, 4).flatten(2)
    if bits < 4:
        lower = _plane(parts & 3, 2)
        left = (parts >> 2, bits - 2)
    else:
        quarters = (parts & 15).unflatten(2, (2, 2, 32))
        lower = (quarters[:, :, :, 0] | quarters[:, :, :, 1] << 4).flatten(2)
        left = (parts >> 4, bits - 4)
    return torch.cat([lower, _plane(*left)], 2) if left[1] else lower


def _plane(parts: Tensor, bits: int) -> Tensor:
    """[…, 128] below 2^bits → […, 16 · bits], a byte holding codes that lie 16 · bits apart."""
    pieces = parts.unflatten(2, (8 // bits, 16 * bits))
    packed = pieces[:, :, 0].clone()
    for i in range(1, 8 // bits):
        packed |= pieces[:, :, i] << (bits * i)
    return packed


def _by_block(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, groups] → bytes [blocks, groups, 8 · bytes of one]"""
    padded = torch.zeros(blocks(len(rows)) * WIDTH, rows.shape[1], dtype=dtype)
    padded[: len(rows)] = rows.to(dtype)
    return padded.view(-1, WIDTH, rows.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _assemble(weight: Weight, headers: Tensor, subs: list[Tensor], values: Tensor) -> None:
    """headers [blocks, supers, bytes], subs [blocks, groups, 8], values uint8 [out, columns]."""
    matrix = weight.matrix
    count = blocks(matrix.outputs)
    supers = headers.shape[1]
    step = 16 * matrix.bits
    group_bytes = 8 * len(subs) + matrix.group // 16 * step
    super_bytes = headers.shape[2] + matrix.super_groups * group_bytes
    data = torch.zeros(count, supers, super_bytes, dtype=torch.uint8)
    data[:, :, : headers.shape[2]] = headers
    body = data[:, :, headers.shape[2] :].unflatten(2, (matrix.super_groups, group_bytes))
    for i, sub in enumerate(subs):
        body[..., 8 * i : 8 * i + 8] = sub.view(count, supers, matrix.super_groups, 8)
    codes = body[..., 8 * len(subs) :]
    many = max(1, AT_ONCE // (WIDTH * values.shape[1]))
    for begin in range(0, count, many):
        rows = values[begin * WIDTH : (begin + many) * WIDTH]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % WIDTH))
        made = planes(rows.contiguous(), matrix.bits)  # [blocks, steps, bytes]
        codes[begin : begin + many] = made.view(len(made), supers, matrix.super_groups, -1)
    matrix.block_bytes = supers * super_bytes
    weight.keep("data", data.flatten())


def _begin(tensor: QuantTensor, *, bits: int, group: int, groups: int, exact: bool) -> Weight:
    matrix = empty_matrix(tensor, "blocks", group=group, groups=groups)
    matrix.activation = ACTIVATIONS.index("as it is" if exact else "int8 by group")
    matrix.input_group = min(group, INPUT_GROUP)
    matrix.bits = bits
    matrix.super_groups = 1
    words = "x in float32" if exact else "x in 8 bits by group"
    return Weight(matrix, f"int{bits}, groups of {group}, {words}")


def pack_integers(tensor: IntGroup, values: Tensor, spread: Spread, *, exact: bool) -> Weight:
    """`values` uint8 [out, columns] are the codes in the kernel's order."""
    groups = spread.scales.shape[1]
    weight = _begin(tensor, bits=spread.bits, group=spread.group, groups=groups, exact=exact)
    matrix = weight.matrix
    matrix.wide_scales = int(spread.wide)
    matrix.mins = MINS_NONE if spread.zeros is None else MINS_ZEROS
    matrix.middle = 1 << (spread.bits - 1) if spread.zeros is None else 0
    headers = _by_block(spread.scales, torch.float32 if spread.wide else torch.float16)
    subs = [] if spread.zeros is None else [_by_block(spread.zeros, torch.uint8)]
    _assemble(weight, headers, subs, values)
    return weight


def pack_blocks(tensor: IntBlock, *, exact: bool) -> Weight:
    weight = _begin(
        tensor, bits=tensor.bits, group=tensor.group_size, groups=tensor.groups, exact=exact
    )
    matrix = weight.matrix
    matrix.super_groups = tensor.groups // tensor.scales.shape[1]
    matrix.middle = tensor.middle
    headers = [_by_block(tensor.scales, torch.float16)]
    if tensor.mins is not None:
        matrix.mins = MINS_STORED
        headers.append(_by_block(tensor.mins, torch.float16))
    if tensor.table is not None:
        weight.keep("table", torch.tensor(tensor.table, dtype=torch.int8))
    _assemble(weight, torch.cat(headers, 2), _subs(weight, tensor), tensor.values())
    return weight


def _subs(weight: Weight, tensor: IntBlock) -> list[Tensor]:
    """Sub-scales are signed in some files: all are stored with the same bias, or none."""
    if tensor.sub_scales is None:
        return []
    if tensor.sub_bits == 4 and tensor.sub_mins is not None:
        weight.matrix.subs = SUBS_NIBBLES
        both = tensor.sub_scales.view(torch.uint8) | tensor.sub_mins << 4
        return [_by_block(both, torch.uint8)]
    weight.matrix.subs = SUBS_BYTES
    weight.matrix.sub_bias = SUB_BIAS
    subs = [_by_block(tensor.sub_scales.to(torch.int16) + SUB_BIAS, torch.uint8)]
    if tensor.sub_mins is not None:
        subs.append(_by_block(tensor.sub_mins, torch.uint8))
    return subs


def pack_floats(tensor: Float4 | NvFloat4, *, exact: bool) -> Weight:
    """Twice their values are integers, so the scale of a row is half of what it was."""
    nvidia = isinstance(tensor, NvFloat4)
    own = tensor.scales.view(torch.uint8) if isinstance(tensor, NvFloat4) else tensor.exponents
    group = FLOAT4_BLOCK if nvidia else FLOAT4_GROUP
    weight = _begin(tensor, bits=4, group=group, groups=own.shape[1], exact=exact)
    matrix = weight.matrix
    matrix.wide_scales = 1
    matrix.super_groups = own.shape[1]  # of all of a row
    matrix.subs = SUBS_FLOAT8 if nvidia else SUBS_EXPONENTS
    whole = tensor.global_scale if isinstance(tensor, NvFloat4) else torch.ones(len(own), 1)
    doubled = [int(2 * value) for value in FLOAT4]
    weight.keep("table", torch.tensor([*doubled, *(-value for value in doubled)], dtype=torch.int8))
    headers = _by_block(whole / 2, torch.float32)
    _assemble(weight, headers, [_by_block(own, torch.uint8)], tensor.unpacked())
    return weight


def holds_floats(tensor: Float4 | NvFloat4) -> bool:
    """Whether no scale is infinite or no number, which the kernels do not know."""
    if isinstance(tensor, NvFloat4):
        return not bool((tensor.scales.view(torch.uint8) & 0x7F == 0x7F).any())
    return not bool((tensor.exponents == 255).any())
