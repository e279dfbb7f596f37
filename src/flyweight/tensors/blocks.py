"""Integer weights with a minimum for each group, and scales that share a scale: GGUF's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flyweight.tensors.base import QuantTensor, generator_on

LOW_PLANE = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4}  # bits of a code → bits of its lower plane


def pack_plane(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] below 2^bits (1, 2 or 4) → uint8 [..., n · bits / 8], the first
    value lowest.
    """
    each = 8 // bits
    parts = values.unflatten(-1, (-1, each))
    packed = parts[..., 0].clone()
    for i in range(1, each):
        packed |= parts[..., i] << (bits * i)
    return packed


def unpack_plane(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_plane`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


@dataclass(frozen=True, eq=False)
class IntBlock(QuantTensor):
    """W[n, k] = s[n, g] · v(q[n, k]) − m[n, g] with g = k // group_size, q unsigned and `bits`
    wide.

    v(q) is q − middle, or table[q]. s is `scales` itself or, where `sub_scales` are there, their
    product: scales[n, b] · sub_scales[n, g], b counting blocks of several groups. m likewise, from
    `mins` and `sub_mins`; without `mins` it is 0. All is computed in float32, in this order.

    A code lies in two planes: its lower 2 or 4 bits, and what is left of it.
    """

    kind: ClassVar[str] = "blocks"
    low: Tensor  # uint8 [out, in · LOW_PLANE / 8]
    high: Tensor | None  # uint8 [out, in · (bits − LOW_PLANE) / 8]
    scales: Tensor  # [out, groups] or [out, blocks]
    mins: Tensor | None  # the same
    sub_scales: Tensor | None  # int8 [out, groups]
    sub_mins: Tensor | None  # uint8 [out, groups]
    bits: int
    group_size: int
    middle: int = 0
    table: tuple[int, ...] | None = None  # sixteen of −127 to 127
    sub_bits: int = 8  # of a sub-scale or sub-minimum in its file

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.low.shape[-2], self.low.shape[-1] * 8 // LOW_PLANE[self.bits]

    @property
    def groups(self) -> int:
        return self.matrix_shape[1] // self.group_size

    @property
    def by_rows(self) -> bool:
        # a table has to be brought to the device
        return self.table is None and self.experts is None

    @classmethod
    def planes(cls, values: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
        """uint8 codes [out, in] as `low` and `high`."""
        lower = LOW_PLANE[bits]
        low = pack_plane(values & ((1 << lower) - 1), lower)
        return low, None if bits == lower else pack_plane(values >> lower, bits - lower)

    def values(self) -> Tensor:
        """Unsigned codes [out, in] as uint8."""
        lower = LOW_PLANE[self.bits]
        values = unpack_plane(self.low, lower)
        if self.high is not None:
            values |= unpack_plane(self.high, self.bits - lower) << lower
        return values

    def integers(self) -> Tensor:
        """What the scales multiply: int8 [out, in]."""
        values = self.values()
        if self.table is None:
            return values.view(torch.int8) - self.middle
        return torch.tensor(self.table, dtype=torch.int8, device=values.device)[values.int()]

    def group_scales(self) -> Tensor:
        """float32 [out, groups]"""
        return _product(self.scales, self.sub_scales, self.groups)

    def group_mins(self) -> Tensor | None:
        return None if self.mins is None else _product(self.mins, self.sub_mins, self.groups)

    def _dequantize(self) -> Tensor:
        grouped = self.integers().float().unflatten(-1, (self.groups, self.group_size))
        grouped.mul_(self.group_scales()[..., None])
        mins = self.group_mins()
        if mins is not None:
            grouped.sub_(mins[..., None])
        return grouped.flatten(-2)

    @property
    def nbytes(self) -> int:
        subs = sum(part.numel() for part in (self.sub_scales, self.sub_mins) if part is not None)
        whole = sum(
            part.nbytes
            for part in (self.low, self.high, self.scales, self.mins)
            if part is not None
        )
        return whole + math.ceil(subs * self.sub_bits / 8)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        bits: int = 4,
        group_size: int = 32,
        mins: bool = True,
        groups_of_block: int = 1,
        table: tuple[int, ...] | None = None,
        sub_bits: int = 6,
    ) -> IntBlock:
        *lead, rows, columns = shape
        generator = generator_on(seed, device)
        groups = columns // group_size
        blocks = groups // groups_of_block

        def draw(low: int, high: int, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.randint(
                low, high, (*lead, rows, *size), generator=generator, device=device
            ).to(dtype)

        values = draw(0, 1 << bits, columns)
        largest = max(table) if table else 1 << (bits - 1)
        subs = groups_of_block > 1
        most = 1 << sub_bits
        spread = largest * (most / 2 if subs else 1) * math.sqrt(columns)
        scales = (
            (0.75 + torch.rand(*lead, rows, blocks, generator=generator, device=device) / 2)
            / spread
        ).half()
        lowest = (scales.float() * (1 << (bits - 1))).half() if mins else None
        sub_scales = (
            draw(
                most // 4 if mins else -most // 2,
                most if mins else most // 2,
                groups,
                dtype=torch.int8,
            )
            if subs
            else None
        )
        sub_mins = draw(most // 4, most, groups) if subs and mins else None
        middle = 0 if mins or table else 1 << (bits - 1)
        return cls(
            *cls.planes(values, bits),
            scales,
            lowest,
            sub_scales,
            sub_mins,
            bits,
            group_size,
            middle,
            table,
            sub_bits,
        )


def _product(shared: Tensor, own: Tensor | None, groups: int) -> Tensor:
    wide = shared.float()
    if own is None:
        return wide
    return wide.repeat_interleave(groups // wide.shape[-1], -1) * own.float()
