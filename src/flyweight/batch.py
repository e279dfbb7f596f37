"""What the model sees of one step: the tokens of all sequences packed one after the other, and
where their KV lives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from flyweight.kv_format import KVFormat

NOBODY = -1  # the slot of rows without an adapter
READ_AT_ONCE = 8192  # tokens of a cache of codes, which are float32 in between


@dataclass(frozen=True)
class Batch:
    """Sequence i owns tokens query_starts[i] to query_starts[i + 1]; a decoding sequence owns one.

    The lists are for the host (loops over sequences on the CPU), the tensors for the device.
    """

    tokens: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    slots: Tensor  # int64 [tokens]: where this token's K and V go: block · block_size + offset
    block_tables: Tensor  # int32 [sequences, most blocks]
    query_starts: list[int]  # [sequences + 1]
    kv_lengths: list[int]  # [sequences]: tokens in the cache once this step's are written
    output_rows: Tensor  # int64 [outputs]: the tokens whose logits are wanted
    adapters: Tensor | None = None  # int32 [tokens]: slots of their adapters; None: nobody has one
    # int32 [sequences, 7] of `SequenceState`, where layers keep a state; None: none do
    states: Tensor | None = None

    @property
    def begins_alone(self) -> bool:
        """A prompt from its first token, and nothing else."""
        return self.kv_lengths == [len(self.tokens)]


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because masked slots are multiplied by 0, which only a finite number survives.

    On a CPU they come from calloc: a page of a large, mostly unused pool costs no memory until it
    is written.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(count, dtype=numpy.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class EightBits:
    """What a cache of 8-bit codes (kv_format.py) has beside them."""

    format: KVFormat
    scales: Tensor  # bfloat16 [2, blocks, kv_heads, block_size]: of keys, of values
    wide: torch.dtype  # of queries, and of what the codes stand for
    # scales that a checkpoint gives for keys and for values; None: found for each token
    fixed: tuple[float, float] | None = None

    def write(self, side: int, pages: Tensor, x: Tensor, slots: Tensor) -> None:
        """x [tokens, kv_heads, head_dim] to its slots of the keys (side 0) or values (1)."""
        scales = self.format.scales(x)
        if self.fixed is not None:
            scales = torch.full_like(scales, self.fixed[side])
        size = pages.shape[1]
        codes = self.format.encode(x, scales)
        # torch copies no float8 by an index
        pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, codes.view(torch.uint8))
        self.scales[side].transpose(1, 2)[slots // size, slots % size] = scales

    def read(self, side: int, pages: Tensor, slots: slice | Tensor) -> Tensor:
        """[tokens, kv_heads, head_dim] of the slots."""
        size = pages.shape[1]
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=pages.device)
        codes = pages.view(torch.uint8).flatten(0, 1).index_select(0, slots).view(pages.dtype)
        scales = self.scales[side].transpose(1, 2)[slots // size, slots % size]
        return self.format.decode(codes, scales, self.wide)


class SequenceState(NamedTuple):
    """A sequence's share of a step as layers with a state see it.

    `mark`: once so many of its tokens are in, the state goes to `mark_slot` as well (0: never).
    """

    begin: int  # of its tokens among those of the step
    tokens: int
    start: int  # tokens before them
    source: int  # the slot where the state is found; −1: it is zero
    slot: int  # and the one where it goes
    mark: int = 0
    mark_slot: int = -1


def sequence_states(states: Tensor) -> list[SequenceState]:
    return [SequenceState(*row) for row in states.tolist()]


def fresh_states(lengths: Sequence[int], device: torch.device) -> Tensor:
    """`Batch.states` of whole sequences, one after the other, in the first slots."""
    begins = itertools.accumulate(lengths, initial=0)
    rows = [
        SequenceState(begin, count, 0, -1, slot)
        for slot, (begin, count) in enumerate(zip(begins, lengths, strict=False))
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class StateShape:
    """What a layer remembers of a sequence in place of keys and values."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int  # of its convolution
    width: int  # tokens that the convolution sees

    def nbytes(self, dtype: torch.dtype) -> int:
        recurrent = 4 * self.heads * self.key_dim * self.value_dim
        return recurrent + self.width * self.channels * dtype.itemsize


@dataclass(frozen=True)
class StateStorage:
    """The states of one layer by slot.

    A token at position p lies in row p mod width of `conv`: a step writes the one row that it does
    not read, so no two of its workers can meet. Nothing needs to be cleared.
    """

    conv: Tensor  # [slots, width, channels]: the last inputs of the convolution
    recurrent: Tensor  # float32 [slots, heads, key_dim, value_dim]

    @classmethod
    def zeros(
        cls, shape: StateShape, slots: int, dtype: torch.dtype, device: torch.device
    ) -> StateStorage:
        size = (slots, shape.heads, shape.key_dim, shape.value_dim)
        return cls(
            empty_pages((slots, shape.width, shape.channels), dtype, device),
            empty_pages(size, torch.float32, device),
        )

    def initial(self, slot: int) -> Tensor:
        """[heads, key_dim, value_dim] where a sequence goes on; −1: where it begins."""
        return self.recurrent[slot] if slot >= 0 else torch.zeros_like(self.recurrent[0])

    def history(self, slot: int, position: int) -> Tensor:
        """[width − 1, channels]: the inputs just before `position`, zeros before the first."""
        width = self.conv.shape[1]
        before = torch.arange(position - width + 1, position, device=self.conv.device)
        if slot < 0:
            return torch.zeros_like(self.conv[0, 1:])
        return self.conv[slot, before % width] * (before >= 0)[:, None]

    def keep(self, slot: int, state: Tensor, inputs: Tensor, position: int) -> None:
        """The state before `position`, and the last inputs, whose last is just before it."""
        width = self.conv.shape[1]
        self.recurrent[slot] = state
        before = torch.arange(position - width + 1, position, device=self.conv.device)
        self.conv[slot, before % width] = inputs[1 - width :]


@dataclass(frozen=True)
class KVStorage:
    """The paged cache of one layer, as the attention op sees it. Where values are the first numbers
    of their keys (latent attention), they are a view of them.
    """

    keys: Tensor  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor
    eight: EightBits | None = None  # keys and values are codes
    # of a layer that has a state in place of keys and values, which then have no heads
    state: StateStorage | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, and of keys and values once they are read."""
        return self.keys.dtype if self.eight is None else self.eight.wide

    @classmethod
    def zeros(
        cls,
        size: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        format: KVFormat | None = None,
        fixed: tuple[float, float] | None = None,
        *,
        latent: int | None = None,
    ) -> KVStorage:
        """[blocks, block_size, kv_heads, head_dim] of nothing; `dtype` is that of queries.
        `latent`: so many numbers of a key are its value.
        """
        if latent is not None:
            assert format is None
            pages = empty_pages(size, dtype, device)
            return cls(pages, pages[..., :latent])
        stored = dtype if format is None else format.dtype
        keys, values = (empty_pages(size, stored, device) for _ in range(2))
        if format is None:
            return cls(keys, values)
        blocks, page, kv_heads, _ = size
        scales = torch.zeros(2, blocks, kv_heads, page, dtype=torch.bfloat16, device=device)
        return cls(keys, values, EightBits(format, scales, dtype, fixed))

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """[tokens, kv_heads, head_dim] each; in 8 bits where the cache is."""
        for side, (pages, new) in enumerate(((self.keys, keys), (self.values, values))):
            if self.eight is not None:
                self.eight.write(side, pages, new, slots)
            else:
                pages.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What the codes of these slots stand for, [tokens, kv_heads, head_dim] each."""
        assert self.eight is not None
        size = len(slots), *self.keys.shape[2:]
        wide = [torch.empty(size, dtype=self.dtype, device=slots.device) for _ in range(2)]
        for begin in range(0, len(slots), READ_AT_ONCE):
            part = slice(begin, begin + READ_AT_ONCE)
            for side, pages in enumerate((self.keys, self.values)):
                wide[side][part] = self.eight.read(side, pages, slots[part])
        return wide[0], wide[1]

    def write_rows(self, rows: Tensor, slots: Tensor) -> None:
        """[tokens, head_dim] of a cache whose values are a part of its keys."""
        self.keys.flatten(0, 2).index_copy_(0, slots, rows)
