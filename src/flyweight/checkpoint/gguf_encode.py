"""Weights as the bytes of GGUF's types: integers that are on such a grid already, and floats
rounded to it.

The K types have scales that share a scale (gguf_blocks.py has their layout); here they are found
from the largest and the smallest weight of each group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flyweight.errors import UnsupportedError
from flyweight.tensors import IntBlock, IntGroup, Plain, QuantTensor


def halves(values: Tensor) -> Tensor:
    """[...] → bytes [..., 2]"""
    return values.half()[..., None].contiguous().view(torch.uint8)


def two_to_a_byte(codes: Tensor, run: int) -> Tensor:
    """`gguf_blocks.nibbles` backwards."""
    pairs = codes.unflatten(-1, (-1, 2, run))
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)


def planes(codes: Tensor, run: int, bits: int) -> Tensor:
    """`gguf_blocks.spread` backwards."""
    each = 8 // bits
    parts = codes.unflatten(-1, (-1, each, run))
    packed = parts[..., 0, :].clone()
    for i in range(1, each):
        packed |= parts[..., i, :] << (bits * i)
    return packed.flatten(-2)


# -- what is there already -------------------------------------------------------------------------


def encode_stored(weight: QuantTensor, *, where: str) -> tuple[str, Tensor]:
    """The type that holds the weight without loss, and its bytes or numbers."""
    if isinstance(weight, Plain):
        half = weight.weight.half()
        if not torch.equal(half.to(weight.weight.dtype), weight.weight):
            raise UnsupportedError(
                f"{where}: its {str(weight.weight.dtype).removeprefix('torch.')} weights do not "
                "all fit into F16; --dtype F16 rounds them"
            )
        return "F16", half
    if isinstance(weight, IntGroup):
        return encode_integers(weight, where)
    if isinstance(weight, IntBlock) and weight.table is None and weight.sub_scales is None:
        return encode_blocks(weight, where)
    raise UnsupportedError(
        f"{where}: a {weight.kind} weight has no GGUF type of its own; --dtype Q8_0 rounds it"
    )


def encode_integers(weight: IntGroup, where: str) -> tuple[str, Tensor]:
    rows, columns = weight.matrix_shape
    size = min(weight.group_size, columns)
    if weight.bits not in (4, 8) or weight.g_idx is not None or size % 32 or columns % size:
        raise UnsupportedError(
            f"{where}: {weight.bits} bits in groups of "
            f"{size}{' with act-order' * (weight.g_idx is not None)} "
            "have no GGUF type of their own; --dtype Q8_0 rounds them"
        )
    scales = weight.scales.float()
    if not torch.equal(scales.half().float(), scales):
        raise UnsupportedError(
            f"{where}: its scales do not fit into float16; --dtype Q8_0 rounds the weights"
        )
    each = size // 32
    scale = scales.repeat_interleave(each, 1)
    codes = weight.values().to(torch.uint8).view(rows, -1, 32)
    if weight.bits == 8:
        zeros = 128 if weight.zeros is None else weight.zeros
        if isinstance(zeros, Tensor) and not bool((zeros == 128).all()):
            raise UnsupportedError(
                f"{where}: 8 bits with zero points have no GGUF type; --dtype "
                f"Q8_0 rounds the weights"
            )
        return "Q8_0", torch.cat([halves(scale), codes ^ 0x80], -1).flatten(1)
    if weight.zeros is None:
        return "Q4_0", torch.cat([halves(scale), two_to_a_byte(codes, 16)], -1).flatten(1)
    least = -scale * weight.zeros.float().repeat_interleave(each, 1)
    if not torch.equal(least.half().float(), least):
        raise UnsupportedError(
            f"{where}: scale · zero point of some groups does not fit into the float16 of Q4_1; "
            "use a symmetric scheme, or --dtype Q8_0, which rounds the weights"
        )
    return "Q4_1", torch.cat([halves(scale), halves(least), two_to_a_byte(codes, 16)], -1).flatten(
        1
    )


def encode_blocks(weight: IntBlock, where: str) -> tuple[str, Tensor]:
    """Q4_1, Q5_0 and Q5_1 as they were read."""
    codes = weight.values().view(len(weight.low), -1, weight.group_size)
    name = {(4, 0, True): "Q4_1", (5, 16, False): "Q5_0", (5, 0, True): "Q5_1"}.get(
        (weight.bits, weight.middle, weight.mins is not None)
    )
    if name is None or weight.group_size != 32:
        raise UnsupportedError(
            f"{where}: {weight.bits} bits in groups of {weight.group_size} "
            f"have no GGUF type of their own"
        )
    parts = [halves(weight.scales), *([] if weight.mins is None else [halves(-weight.mins)])]
    if weight.bits == 5:
        parts.append(planes(codes >> 4, 1, 1))
    return name, torch.cat([*parts, two_to_a_byte(codes & 15, 16)], -1).flatten(1)


# -- rounding --------------------------------------------------------------------------------------


def divide(values: Tensor, by: Tensor) -> Tensor:
    """Groups of zeros have the scale 0, and the codes of 0."""
    return torch.where(
        by == 0, torch.zeros_like(values), values / torch.where(by == 0, torch.ones_like(by), by)
    )


def round_q8_0(weight: Tensor) -> Tensor:
    grouped = weight.float().unflatten(1, (-1, 32))
    scale = (grouped.abs().amax(-1) / 127).half()
    codes = divide(grouped, scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([halves(scale), codes.view(torch.uint8)], -1).flatten(1)


def round_q4_0(weight: Tensor) -> Tensor:
    """The weight that is farthest from zero becomes −8, as in llama.cpp: the longer end of the
    codes.
    """
    grouped = weight.float().unflatten(1, (-1, 32))
    far = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    scale = (far / -8).half()
    codes = (divide(grouped, scale.float()[..., None]).round() + 8).clamp(0, 15).to(torch.uint8)
    return torch.cat([halves(scale), two_to_a_byte(codes, 16)], -1).flatten(1)


def round_q6_k(weight: Tensor) -> Tensor:
    grouped = weight.float().unflatten(1, (-1, 16, 16))  # [out, blocks, groups, 16]
    wanted = grouped.abs().amax(-1) / 31
    scale = (wanted.amax(-1) / 127).half()
    subs = divide(wanted, scale.float()[..., None]).round().clamp(0, 127)
    steps = (scale.float()[..., None] * subs)[..., None]
    codes = (divide(grouped, steps).round().clamp(-32, 31) + 32).to(torch.uint8).flatten(2)
    low, high = two_to_a_byte(codes & 15, 64), planes(codes >> 4, 32, 2)
    return torch.cat([low, high, subs.to(torch.uint8), halves(scale)], -1).flatten(1)


def round_q4_k(weight: Tensor) -> Tensor:
    grouped = weight.float().unflatten(1, (-1, 8, 32))
    lowest = -grouped.amin(-1).clamp(max=0)
    wanted = (grouped.amax(-1).clamp(min=0) + lowest) / 15
    scale, least = ((part.amax(-1) / 63).half() for part in (wanted, lowest))
    subs = divide(wanted, scale.float()[..., None]).round().clamp(0, 63)
    mins = divide(lowest, least.float()[..., None]).round().clamp(0, 63)
    steps, offset = (
        (scale.float()[..., None] * subs)[..., None],
        (least.float()[..., None] * mins)[..., None],
    )
    codes = divide(grouped + offset, steps).round().clamp(0, 15).to(torch.uint8).flatten(2)
    s, m = subs.to(torch.uint8), mins.to(torch.uint8)
    packed = torch.cat(
        [
            s[..., :4] | s[..., 4:] >> 4 << 6,
            m[..., :4] | m[..., 4:] >> 4 << 6,
            s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
        ],
        -1,
    )
    return torch.cat([halves(scale), halves(least), packed, two_to_a_byte(codes, 32)], -1).flatten(
        1
    )


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": round_q8_0,
    "Q4_0": round_q4_0,
    "Q6_K": round_q6_k,
    "Q4_K": round_q4_k,
}
