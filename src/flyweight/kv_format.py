"""Keys and values in 8 bits: the codes that a paged cache can hold, and what they mean.

    x ≈ code · scale,  one scale for each token and kv head of K and of V: largest |x| / limit

A block of the cache fills token by token, so a scale of a whole block would have to grow, and its
older codes be written again. With a scale of its own a token is written once, by whichever kernel
writes it, and what it means never changes: blocks can be shared, dropped and found again as ever.
The scale costs 2 bytes beside head_dim codes. It is a bfloat16 rounded upwards, so that no code is
cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 2
# Of a token whose values are all zeros or nearly so: far below what a model can tell from zero
SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class KVFormat:
    name: str
    dtype: torch.dtype
    limit: float  # the largest code
    number: int  # KV8 of the CUDA sources

    def scales(self, x: Tensor) -> Tensor:
        """bfloat16 [...] of x [..., head_dim]"""
        most = x.float().abs().amax(-1)
        # by a tensor: CUDA would multiply with the inverse of a number, which rounds differently
        wanted = (most / torch.full_like(most, self.limit)).clamp_(min=SMALLEST_SCALE)
        # a bfloat16 is the upper half of a float32's bits
        upper = (wanted.view(torch.int32) + 0xFFFF) >> 16
        return upper.to(torch.int16).view(torch.bfloat16)

    def encode(self, x: Tensor, scales: Tensor) -> Tensor:
        """The nearest codes of x [..., head_dim]; x beyond the limit (fixed scales) is cut off."""
        scaled = (x.float() / scales.float()[..., None]).clamp_(-self.limit, self.limit)
        return (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes.float() * scales.float()[..., None]).to(dtype)

    def rounded(self, x: Tensor, fixed: float | None = None) -> Tensor:
        """x as a cache in this format would give it back."""
        if fixed is None:
            scales = self.scales(x)
        else:
            scales = x.new_full(x.shape[:-1], fixed, dtype=torch.bfloat16)
        return self.decode(self.encode(x, scales), scales, x.dtype)


FP8 = KVFormat("fp8", torch.float8_e4m3fn, 448.0, 1)
INT8 = KVFormat("int8", torch.int8, 127.0, 2)
KV_FORMATS = {one.name: one for one in (FP8, INT8)}
AUTO = "auto"  # as the checkpoint asks for, else as `MODEL`
MODEL = "model"  # the type of activations
