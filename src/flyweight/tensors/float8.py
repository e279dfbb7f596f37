"""Float8 weights, with float8 activations or without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.tensors.base import QuantTensor, generator_on
from flyweight.values import same

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


def quantize_float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per-token float8: codes and float32 scales [..., 1]."""
    most = x.float().abs().amax(-1, keepdim=True)
    # by a number CUDA would multiply with its inverse
    scale = (most / torch.full_like(most, FLOAT8_MAX)).clamp(min=1e-12)
    return (x.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale


@dataclass(frozen=True, eq=False)
class Float8(QuantTensor):
    """W = weight · scales, e4m3. `activation`: "none", "token" (dynamic rows), "static"
    (input_scale), "group" (dynamic, 128).
    """

    kind: ClassVar[str] = "fp8"
    weight: Tensor  # float8_e4m3fn [out, in]
    # [1, 1] per tensor, [out, 1] per channel, [ceil(out / block), ceil(in / block)] per block
    scales: Tensor
    activation: str = "token"
    block: int | None = None
    input_scale: Tensor | None = None  # [1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[-2], self.weight.shape[-1]

    def _dequantize(self) -> Tensor:
        rows, columns = self.matrix_shape
        scales = self.scales.float()
        if self.block:
            scales = scales.repeat_interleave(self.block, 0)[:rows].repeat_interleave(
                self.block, 1
            )[:, :columns]
        return self.weight.float() * scales

    def quantize_input(self, x: Tensor) -> Tensor:
        if self.activation == "none":
            return x
        if self.activation == "static":
            assert self.input_scale is not None
            scale = self.input_scale.float()
            return (x.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(
                FLOAT8
            ).double() * scale.double()
        codes, scale = quantize_float8_rows(
            x.unflatten(-1, (-1, 128)) if self.activation == "group" else x
        )
        values = codes.double() * scale.double()
        return values.flatten(-2) if self.activation == "group" else values

    def _merge(self, others: Sequence[Any]) -> Self | None:
        if self.block and self.matrix_shape[0] % self.block:
            return None
        if self.input_scale is not None:
            return self._merge_static(others)
        if self.block:
            return super()._merge(others)
        if any(not isinstance(o, Float8) for o in others):
            return None
        # A scale per tensor becomes a scale per channel: the same numbers, and rows can follow each
        # other.
        wide = [
            dataclasses.replace(t, scales=t.scales.expand(*t.weight.shape[:-1], 1))
            for t in (self, *others)
        ]
        return QuantTensor._merge(wide[0], wide[1:])

    def _merge_static(self, others: Sequence[Any]) -> Self | None:
        """Siblings share an input; calibrated alike, they share its scale."""
        assert self.input_scale is not None
        scales = [getattr(o, "input_scale", None) for o in others]
        if any(scale is None or not same(scale, self.input_scale) for scale in scales):
            return None
        joined = dataclasses.replace(self, input_scale=None)._merge(
            [dataclasses.replace(o, input_scale=None) for o in others]
        )
        return joined and dataclasses.replace(joined, input_scale=self.input_scale)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        activation: str = "token",
        block: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float8:
        generator = generator_on(seed, device)
        weight = (
            torch.empty(*shape, device=device)
            .normal_(0, 64, generator=generator)
            .clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        )
        scales = (
            (0.75 + torch.rand(*shape[:-1], 1, generator=generator, device=device) / 2)
            / 64
            / math.sqrt(shape[-1])
        )
        if block is not None:
            rows, columns = (math.ceil(size / block) for size in shape[-2:])
            spread = 0.75 + torch.rand(rows, columns, generator=generator, device=device) / 2
            inputs = "none" if shape[-1] % 128 else "group"  # whose groups are of 128
            return cls(
                weight.to(FLOAT8), (spread / 64 / math.sqrt(shape[-1])).float(), inputs, block
            )
        return cls(weight.to(FLOAT8), scales.to(dtype), activation)
