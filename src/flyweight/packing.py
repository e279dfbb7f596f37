"""Dense bit streams in int32 words, least significant bit first: value i sits at bit `bits * i` of
its row.

Every integer format on disk is such a stream along one axis (3-bit values straddle words), so this
is the only place that shifts bits. Values are unsigned; a row is padded with zero bits to whole
words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_words(count: int, bits: int) -> int:
    return math.ceil(count * bits / 32)


def pack(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [..., count] below 2**bits → int32 [..., ceil(count * bits / 32)]."""
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be 1 to 32, not {bits}")
    count = values.shape[-1]
    words = packed_words(count, bits)
    # so many values fill whole words: 8 for 4 bits, 32 for 3 bits
    period = 32 // math.gcd(32, bits)
    values = torch.nn.functional.pad(values.to(torch.int64), (0, -count % period)).unflatten(
        -1, (-1, period)
    )
    stream = torch.zeros(
        *values.shape[:-1], period * bits // 32, dtype=torch.int64, device=values.device
    )
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        stream[..., word] |= (values[..., i] << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            stream[..., word + 1] |= values[..., i] >> (32 - shift)
    stream = stream.flatten(-2)[..., :words]
    return torch.where(stream >= 1 << 31, stream - (1 << 32), stream).to(torch.int32)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: int32 [..., words] → unsigned values [..., count], as int64 (int32 up
    to 16 bits).
    """
    expected = packed_words(count, bits)
    if words.shape[-1] != expected:
        raise ValueError(
            f"{count} values of {bits} bits take {expected} words, not {words.shape[-1]}"
        )
    period = 32 // math.gcd(32, bits)
    span = period * bits // 32
    stream = torch.nn.functional.pad(words, (0, -words.shape[-1] % span)).unflatten(-1, (-1, span))
    stream = stream.to(torch.int64) & 0xFFFFFFFF
    values = torch.empty(
        *stream.shape[:-1],
        period,
        dtype=torch.int64 if bits > 16 else torch.int32,
        device=words.device,
    )
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = stream[..., word] >> shift
        if shift + bits > 32:
            value = value | (stream[..., word + 1] << (32 - shift))
        values[..., i] = value & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]
