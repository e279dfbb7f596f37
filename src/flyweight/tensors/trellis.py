"""Weights of 2 and 3 bits by a trellis: four neighbouring weights are a hash of 18 or 20 bits of a
stream, of which every step takes only 8 or 12 new ones.

Rows go in tiles of 16, inputs in units of 128 (two blocks of 64; a row may end with one block).
Lane 4 g + t of a unit has rows g and g + 8 and, of each half of 32 inputs, the eight from 8 t on:
what a thread of the matrix units multiplies. Its steps, in order of block, half and quarter (first
four inputs of row g, of row g + 8, last four of row g, of row g + 8), read one stream of bits that
is a circle: the last steps' bits go on with the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.tensors.base import QuantTensor, generator_on

TILE = 16  # outputs
BLOCK = 64  # inputs
UNIT = 2 * BLOCK  # inputs of one circle, where the row has so many left
LANES = 32
STEP = 4  # weights
STATE_BITS = {2: 18, 3: 20}  # of the stream, that a step sees
SPREAD = 128.0  # standard deviation of the values, nearly
MASK = 0xFFFFFFFF
FIRST, OFFSET, SECOND, THIRD = 0xCBAC1FED, 0x01234567, 0x9E3779B1, 0x85EBCA6B


def hashed(states: Tensor) -> Tensor:
    """The four values of each state, int16 [..., 4]: sums of three signed bytes."""
    first = (states.long() * FIRST + OFFSET) & MASK
    turned = (first >> 16 | first << 16) & MASK
    words = torch.stack([first, turned * SECOND & MASK, turned * THIRD & MASK])
    octets = torch.stack([words >> 8 * i & 0xFF for i in range(STEP)], -1)
    return ((octets ^ 0x80) - 0x80).sum(0).to(torch.int16)


def circle(words: Tensor, bits: int) -> Tensor:
    """States [..., steps] of streams [..., words]."""
    stream = words.long() & MASK
    steps = stream.shape[-1] * 32 // (STEP * bits)
    begin = STEP * bits * torch.arange(steps, device=words.device)
    low, high = stream[..., begin // 32], stream.roll(-1, -1)[..., begin // 32]
    return (low | high << 32) >> begin % 32 & ((1 << STATE_BITS[bits]) - 1)


def stream(states: Tensor, bits: int) -> Tensor:
    """Words [..., words] int32 of the streams of `states` [..., steps], which must agree."""
    fresh = states.long() & ((1 << STEP * bits) - 1)
    places = torch.arange(STEP * bits, device=states.device)
    each = (fresh[..., None] >> places & 1).flatten(-2).unflatten(-1, (-1, 32))
    words = (each << torch.arange(32, device=states.device)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def unit_columns(columns: int) -> list[int]:
    """Inputs of each unit of a row."""
    return [UNIT] * (columns // UNIT) + [BLOCK] * (columns % UNIT // BLOCK)


@dataclass(frozen=True, eq=False)
class Trellis(QuantTensor):
    """weight = value · scale; a scale for each row, or for each 128 inputs of it."""

    kind: ClassVar[str] = "trellis"
    file_format: ClassVar[str | None] = "trellis"
    dims: ClassVar[int] = 4
    words: Tensor  # int32 [tiles of 16 outputs, blocks of 64 inputs, 32 lanes, bits]
    scales: Tensor  # [out, 1] or [out, units]

    @property
    def bits(self) -> int:
        return self.words.shape[-1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.scales.shape[-2], self.words.shape[-3] * BLOCK

    @property
    def groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def group_size(self) -> int:
        return UNIT if self.groups > 1 else self.matrix_shape[1]

    def states(self) -> list[Tensor]:
        """Of whole units [tiles, units, 32, 16] and, where the row ends so, of a block [tiles, 1,
        32, 8].
        """
        blocks = self.words.shape[-3]
        whole = self.words[:, : blocks // 2 * 2].unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)
        parts = [whole, self.words[:, blocks // 2 * 2 :]]
        return [circle(part, self.bits) for part in parts if part.shape[1]]

    def values(self) -> Tensor:
        """The weights before they are scaled, int16 [out, in]."""
        parts = [to_matrix(hashed(states)) for states in self.states()]
        return torch.cat(parts, 1)[: self.scales.shape[-2]]

    def _dequantize(self) -> Tensor:
        return self.scaled(self.values(), self.scales)

    @staticmethod
    def scaled(values: Tensor, scales: Tensor) -> Tensor:
        """Values [out, in] by the scales of rows or of their units."""
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(UNIT, 1)[:, : values.shape[1]]
        return values * scales.float()

    def _metadata(self) -> dict[str, Any]:
        return super()._metadata() | {"bits": self.bits, "groups": self.groups}

    def _merge(self, others: Sequence[Any]) -> Self | None:
        """Only whole tiles can be followed by others."""
        parts = (self, *others)
        if any(type(o) is not type(self) or o._metadata() != self._metadata() for o in others):
            return None
        if any(part.matrix_shape[0] % TILE for part in parts[:-1]):
            return None
        words = torch.cat([part.words for part in parts], -4)
        return type(self)(words, torch.cat([part.scales for part in parts], -2))

    @classmethod
    def from_states(cls, states: Sequence[Tensor], scales: Tensor, bits: int) -> Trellis:
        """From what `states` returns."""
        parts = [stream(part, bits) for part in states]
        words = [
            part.unflatten(3, (-1, bits)).transpose(2, 3).flatten(1, 2) for part in parts
        ]  # [tiles, units, lanes, blocks · bits] → [tiles, blocks, lanes, bits]
        return cls(torch.cat(words, 1).contiguous(), scales)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        bits: int = 2,
        groups: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Trellis:
        """`groups`: a scale for each 128 inputs."""
        *lead, rows, columns = shape
        if columns % BLOCK:
            raise ValueError(f"a trellis takes inputs in blocks of {BLOCK}, not {columns}")
        generator = generator_on(seed, device)
        size = (*lead, -(-rows // TILE), columns // BLOCK, LANES, bits)
        words = torch.randint(-(1 << 31), 1 << 31, size, generator=generator, device=device)
        units = len(unit_columns(columns)) if groups else 1
        spread = 1 + 0.1 * torch.randn(*lead, rows, units, generator=generator, device=device)
        scales = (spread * columns**-0.5 / SPREAD).to(dtype)
        return cls(words.to(torch.int32), scales)


def to_matrix(values: Tensor) -> Tensor:
    """[tiles, units, 32 lanes, steps, 4] → [out, in]."""
    parts = values.unflatten(3, (-1, 2, 2, 2)).unflatten(2, (8, 4))
    # tile, unit, g, t, block, half, last four, row g + 8, weight
    return parts.permute(0, 7, 2, 1, 4, 5, 3, 6, 8).flatten(3).flatten(0, 2).contiguous()


def from_matrix(matrix: Tensor, blocks: int) -> Tensor:
    """[out, in] of whole tiles and units of `blocks` → [tiles, units, 32 lanes, steps, 4]."""
    parts = matrix.unflatten(1, (-1, blocks, 2, 4, 2, STEP)).unflatten(0, (-1, 2, 8))
    # tile, row g + 8, g, unit, block, half, t, last four, weight
    return parts.permute(0, 3, 2, 6, 4, 5, 7, 1, 8).flatten(4, 7).flatten(2, 3).contiguous()
