"""What every kind of weight has in common, and the plain one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Base of the family. `dims` is the number of dimensions of the first tensor field of one
    (expert-less) weight.
    """

    kind: ClassVar[str]
    dims: ClassVar[int] = 2
    # the only one that holds this kind, where there is just one
    file_format: ClassVar[str | None] = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        raise NotImplementedError

    def _dequantize(self) -> Tensor:
        """Float32 [out, in] of one weight without experts."""
        raise NotImplementedError

    def quantize_input(self, x: Tensor) -> Tensor:
        """The values the matmul really sees: x itself unless this kind quantizes
        activations too.
        """
        return x

    @property
    def by_rows(self) -> bool:
        """Can a row be read alone, on a device that records what it is asked? Then an embedding may
        stay as it is.
        """
        return False

    # -- the same for every kind -------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, nested ones as `inner.codes`."""
        found: dict[str, Tensor] = {}
        for name, value in self.fields().items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, QuantTensor):
                found.update({f"{name}.{key}": tensor for key, tensor in value.tensors().items()})
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor field."""
        changed: dict[str, Any] = {}
        for name, value in self.fields().items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, QuantTensor):
                changed[name] = value.map(change)
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def experts(self) -> int | None:
        first = next(iter(self.tensors().values()))
        return first.shape[0] if first.ndim > self.dims else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix_shape if self.experts is None else (self.experts, *self.matrix_shape)

    def __getitem__(self, expert: int) -> Self:
        return self.map(lambda tensor: tensor[expert])

    @classmethod
    def stack(cls, tensors: Sequence[QuantTensor]) -> QuantTensor:
        """One weight per expert → one tensor with a leading expert dimension. All must be alike."""
        first = tensors[0]
        if any(type(t) is not type(first) or t._metadata() != first._metadata() for t in tensors):
            raise ValueError("experts of one layer must share one scheme")
        columns = [list(t.tensors().values()) for t in tensors]
        stacked = iter([torch.stack(parts) for parts in zip(*columns, strict=True)])
        return first.map(lambda _: next(stacked))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.experts is None:
            return self._dequantize().to(dtype)
        return torch.stack([self[i]._dequantize().to(dtype) for i in range(self.experts)])

    def matmul_reference(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """x [..., in] → [..., out], accumulated in `dtype`; with experts x is [experts,
        rows, in].
        """
        return self.quantize_input(x).to(dtype) @ self.dequantize(dtype).mT

    @property
    def nbytes(self) -> int:
        """Bytes as stored on disk: packed codes, scales, zero points, codebooks, indices and their
        padding.
        """
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / math.prod(self.shape)

    def _metadata(self) -> dict[str, Any]:
        """Everything that is not a tensor and must agree between weights that are stacked or
        merged.
        """
        data: dict[str, Any] = {"in": self.matrix_shape[1]}
        for name, value in self.fields().items():
            if isinstance(value, QuantTensor):
                data[name] = (value.kind, value._metadata())
            elif isinstance(value, Tensor):
                data[name] = value.dtype
            elif name != "out_features":
                data[name] = value
        return data

    def _merge(self, others: Sequence[Any]) -> Self | None:
        """self and others as one weight with their rows one after the other, or None where that is
        not possible.
        """
        if any(type(o) is not type(self) or o._metadata() != self._metadata() for o in others):
            return None
        rows = iter(
            [
                torch.cat(parts, dim=-2)
                for parts in zip(*(t.tensors().values() for t in (self, *others)), strict=True)
            ]
        )
        return self.map(lambda _: next(rows))


def merge(tensors: Sequence[QuantTensor]) -> list[QuantTensor]:
    """Segments of a merged projection (q/k/v, gate/up): neighbours that agree become one weight,
    the rest stay.
    """
    segments: list[QuantTensor] = []
    for tensor in tensors:
        joined = segments[-1]._merge([tensor]) if segments else None
        if joined is None:
            segments.append(tensor)
        else:
            segments[-1] = joined
    return segments


def generator_on(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True, eq=False)
class Plain(QuantTensor):
    """The weight itself, in float32, float16 or bfloat16."""

    kind: ClassVar[str] = "plain"
    weight: Tensor  # [out, in]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[-2], self.weight.shape[-1]

    def _dequantize(self) -> Tensor:
        return self.weight.float()

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Plain:
        weight = torch.empty(*shape, dtype=dtype, device=device)
        return cls(weight.normal_(0, shape[-1] ** -0.5, generator=generator_on(seed, device)))
