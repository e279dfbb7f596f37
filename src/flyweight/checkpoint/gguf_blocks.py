"""GGUF's quantized types as QuantTensors: the same codes and scales in our order, nothing rounded.

A row of a GGUF tensor is a run of blocks, each with its scales beside its codes. Here is, for each
type, where those lie (`BlockType`). Reading cuts a row into parts by byte and puts the codes into
the order of the inputs; what the numbers mean is said by `IntGroup` and `IntBlock`.

Codes come in planes: `nibbles(bytes, run)` has `run` inputs in the low halves of as many bytes,
then `run` more in their high halves; `pairs` and `single_bits` go on likewise with 2 bits and 1
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.tensors import Float4, IntBlock, IntGroup, QuantTensor

SUPER = 256  # inputs of a block of the K types
KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4


@dataclass(frozen=True)
class BlockType:
    """One of GGUF's types."""

    name: str
    inputs: int  # of a block
    nbytes: int  # of a block
    read: Callable[[Tensor], QuantTensor] | None = None  # uint8 [out, blocks, nbytes] → the weight


def spread(data: Tensor, run: int, bits: int) -> Tensor:
    """[..., bytes] → [..., bytes · 8 / bits]: runs of `run` bytes, each once for every shift."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    runs = data.unflatten(-1, (-1, 1, run))
    return (runs >> shifts & ((1 << bits) - 1)).flatten(-3)


def nibbles(data: Tensor, run: int) -> Tensor:
    return spread(data, run, 4)


def pairs(data: Tensor, run: int) -> Tensor:
    return spread(data, run, 2)


def single_bits(data: Tensor, run: int) -> Tensor:
    return spread(data, run, 1)


def halves(data: Tensor) -> Tensor:
    """[out, blocks, 2] → float16 [out, blocks]"""
    return data.contiguous().view(torch.float16)[..., 0]


def int_group(codes: Tensor, scales: Tensor, bits: int) -> IntGroup:
    """Codes uint8 [out, blocks, 32] around the middle of their range."""
    flat = codes.flatten(1)
    words = flat if bits == 8 else flat[:, ::2] | flat[:, 1::2] << 4
    return IntGroup(
        words.contiguous().view(torch.int32), scales.contiguous(), None, bits, 32, flat.shape[1]
    )


def int_block(
    codes: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    *,
    bits: int,
    group: int = 32,
    middle: int = 0,
    subs: tuple[Tensor, Tensor | None] | None = None,
    sub_bits: int = 8,
    table: tuple[int, ...] | None = None,
) -> IntBlock:
    sub_scales, sub_mins = (None, None) if subs is None else subs
    return IntBlock(
        *IntBlock.planes(codes.flatten(1), bits),
        scales.contiguous(),
        None if mins is None else mins.contiguous(),
        None if sub_scales is None else sub_scales.flatten(1).to(torch.int8),
        None if sub_mins is None else sub_mins.flatten(1),
        bits,
        group,
        middle,
        table,
        sub_bits,
    )


def read_q4_0(data: Tensor) -> QuantTensor:
    return int_group(nibbles(data[..., 2:18], 16), halves(data[..., :2]), 4)


def read_q4_1(data: Tensor) -> QuantTensor:
    """d · q + m: a minimum of −m."""
    return int_block(
        nibbles(data[..., 4:20], 16), halves(data[..., :2]), -halves(data[..., 2:4]), bits=4
    )


def fifth_bits(words: Tensor) -> Tensor:
    """[..., 4] → [..., 32]: one bit an input, in order."""
    return single_bits(words, 1) << 4


def read_q5_0(data: Tensor) -> QuantTensor:
    codes = nibbles(data[..., 6:22], 16) | fifth_bits(data[..., 2:6])
    return int_block(codes, halves(data[..., :2]), bits=5, middle=16)


def read_q5_1(data: Tensor) -> QuantTensor:
    codes = nibbles(data[..., 8:24], 16) | fifth_bits(data[..., 4:8])
    return int_block(codes, halves(data[..., :2]), -halves(data[..., 2:4]), bits=5)


def read_q8_0(data: Tensor) -> QuantTensor:
    return int_group(data[..., 2:34] ^ 0x80, halves(data[..., :2]), 8)


def read_q2_k(data: Tensor) -> QuantTensor:
    subs = (data[..., :16] & 15, data[..., :16] >> 4)
    return int_block(
        pairs(data[..., 16:80], 32),
        halves(data[..., 80:82]),
        halves(data[..., 82:84]),
        bits=2,
        group=16,
        subs=subs,
        sub_bits=4,
    )


def read_q3_k(data: Tensor) -> QuantTensor:
    codes = pairs(data[..., 32:96], 32) | single_bits(data[..., :32], 32) << 2
    scales = nibbles(data[..., 96:104], 8) | pairs(data[..., 104:108], 4) << 4
    return int_block(
        codes,
        halves(data[..., 108:110]),
        bits=3,
        group=16,
        middle=4,
        subs=(scales.view(torch.int8) - 32, None),
        sub_bits=6,
    )


def six_bit_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight groups from 12 bytes: [..., 8] each."""
    first, second, rest = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], -1)
    mins = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], -1)
    return scales, mins


def read_q4_k(data: Tensor) -> QuantTensor:
    return int_block(
        nibbles(data[..., 16:144], 32),
        halves(data[..., :2]),
        halves(data[..., 2:4]),
        bits=4,
        subs=six_bit_scales(data[..., 4:16]),
        sub_bits=6,
    )


def read_q5_k(data: Tensor) -> QuantTensor:
    codes = nibbles(data[..., 48:176], 32) | single_bits(data[..., 16:48], 32) << 4
    return int_block(
        codes,
        halves(data[..., :2]),
        halves(data[..., 2:4]),
        bits=5,
        subs=six_bit_scales(data[..., 4:16]),
        sub_bits=6,
    )


def read_q6_k(data: Tensor) -> QuantTensor:
    codes = nibbles(data[..., :128], 64) | pairs(data[..., 128:192], 32) << 4
    scales = data[..., 192:208].contiguous().view(torch.int8)
    return int_block(
        codes, halves(data[..., 208:210]), bits=6, group=16, middle=32, subs=(scales, None)
    )


def read_iq4_nl(data: Tensor) -> QuantTensor:
    return int_block(nibbles(data[..., 2:18], 16), halves(data[..., :2]), bits=4, table=KVALUES)


def read_iq4_xs(data: Tensor) -> QuantTensor:
    scales = nibbles(data[..., 4:8], 1) | pairs(data[..., 2:4], 1) << 4
    return int_block(
        nibbles(data[..., 8:136], 16),
        halves(data[..., :2]),
        bits=4,
        table=KVALUES,
        subs=(scales.view(torch.int8) - 32, None),
        sub_bits=6,
    )


def read_mxfp4(data: Tensor) -> QuantTensor:
    """An exponent, then 32 codes."""
    codes = nibbles(data[..., 1:17], 16).flatten(1)
    return Float4(codes[:, ::2] | codes[:, 1::2] << 4, data[..., 0].contiguous())


TYPES: dict[int, BlockType] = {  # by the number in the file
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18, read_q4_0),
    3: BlockType("Q4_1", 32, 20, read_q4_1),
    6: BlockType("Q5_0", 32, 22, read_q5_0),
    7: BlockType("Q5_1", 32, 24, read_q5_1),
    8: BlockType("Q8_0", 32, 34, read_q8_0),
    10: BlockType("Q2_K", SUPER, 84, read_q2_k),
    11: BlockType("Q3_K", SUPER, 110, read_q3_k),
    12: BlockType("Q4_K", SUPER, 144, read_q4_k),
    13: BlockType("Q5_K", SUPER, 176, read_q5_k),
    14: BlockType("Q6_K", SUPER, 210, read_q6_k),
    20: BlockType("IQ4_NL", 32, 18, read_iq4_nl),
    23: BlockType("IQ4_XS", SUPER, 136, read_iq4_xs),
    39: BlockType("MXFP4", 32, 17, read_mxfp4),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_blocks(kind: BlockType, data: Tensor) -> QuantTensor:
    """uint8 [out, bytes of a row] → the weight."""
    assert kind.read is not None
    return kind.read(data.unflatten(1, (-1, kind.nbytes)))
