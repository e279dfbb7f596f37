"""4-bit floats with an exponent or a scale for each group of inputs: MXFP4, NVFP4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flyweight.tensors.base import QuantTensor, generator_on

# e2m1: a sign, two bits of exponent, one of mantissa
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4_GROUP = 32
FLOAT4_BLOCK = 16  # of NVFP4
EXPONENT_BIAS = 127  # of e8m0


def unpack_float4(codes: Tensor) -> Tensor:
    """uint8 [..., in / 2] → [..., in]"""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def float4_values(codes: Tensor) -> Tensor:
    """What packed codes mean: float32 [..., in]."""
    values = torch.tensor([*FLOAT4, *(-value for value in FLOAT4)], device=codes.device)
    return values[unpack_float4(codes).int()]


@dataclass(frozen=True, eq=False)
class Float4(QuantTensor):
    """W = e2m1 code · 2^(exponent − 127), one exponent for 32 inputs."""

    kind: ClassVar[str] = "mxfp4"
    codes: Tensor  # uint8 [out, in / 2]: of two inputs the first in the low half
    exponents: Tensor  # uint8 [out, in / 32]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.codes.shape[-2], 2 * self.codes.shape[-1]

    def unpacked(self) -> Tensor:
        """uint8 [out, in]"""
        return unpack_float4(self.codes)

    def _dequantize(self) -> Tensor:
        groups = float4_values(self.codes).unflatten(-1, (-1, FLOAT4_GROUP))
        return torch.ldexp(groups, self.exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Float4:
        generator = generator_on(seed, device)
        *rows, columns = shape
        options: dict[str, Any] = dict(generator=generator, dtype=torch.uint8, device=device)
        codes = torch.randint(0, 256, (*rows, columns // 2), **options)
        usual = EXPONENT_BIAS - 1 - round(math.log2(columns) / 2)
        exponents = torch.randint(usual - 1, usual + 1, (*rows, columns // FLOAT4_GROUP), **options)
        return cls(codes, exponents)


@dataclass(frozen=True, eq=False)
class NvFloat4(QuantTensor):
    """W = e2m1 code · scales[n, g] · global_scale[n], one float8 scale for 16 inputs: NVFP4. Its
    files have one global scale a matrix; here each output has it, so that matrices can be merged.
    """

    kind: ClassVar[str] = "nvfp4"
    file_format: ClassVar[str | None] = "modelopt"
    codes: Tensor  # uint8 [out, in / 2]: of two inputs the first in the low half
    scales: Tensor  # float8_e4m3fn [out, in / 16]
    global_scale: Tensor  # float32 [out, 1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.codes.shape[-2], 2 * self.codes.shape[-1]

    def unpacked(self) -> Tensor:
        """uint8 [out, in]"""
        return unpack_float4(self.codes)

    def _dequantize(self) -> Tensor:
        groups = float4_values(self.codes).unflatten(-1, (-1, FLOAT4_BLOCK))
        return (groups * (self.scales.float() * self.global_scale)[..., None]).flatten(-2)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
    ) -> NvFloat4:
        generator = generator_on(seed, device)
        *rows, columns = shape
        options: dict[str, Any] = dict(generator=generator, device=device)
        codes = torch.randint(0, 256, (*rows, columns // 2), dtype=torch.uint8, **options)
        scales = 100 + 200 * torch.rand(*rows, columns // FLOAT4_BLOCK, **options)
        whole = torch.full((*rows, 1), 1 / (600 * math.sqrt(columns)), device=device)
        return cls(codes, scales.to(torch.float8_e4m3fn), whole)
