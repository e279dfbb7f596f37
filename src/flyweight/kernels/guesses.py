"""Tokens between the rows of a step with guesses and the rows of their sequences, on the device:
host side of cuda/guesses.cu, and the same by torch's ops.

A step with guesses is prepared while the device waits, and a launch takes a fraction of what
torch's ops take for the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.kernels.accept import last_rows

THREADS = 64  # the most rows of such a step


@dataclass(frozen=True, eq=False)
class GuessedRows:
    """The rows of a step with guesses, at fixed places (`SharedRows`)."""

    tokens: Tensor  # int64 [rows]
    lengths: Tensor  # int32 [rows]
    before: Tensor  # int32 [rows]: rows of the same sequence before each
    guesses: Tensor  # int64 [rows]: the token guessed after each; −1: none
    at: Tensor  # int64 [rows]: the row of its sequence
    first: Tensor  # int64 [sequences]: the first row of each
    unread: Tensor  # int64 [tokens]: rows whose token is still in flight,
    unread_at: Tensor  # int64 [tokens]: and the rows of their sequences


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """A row a sequence (`Rows`)."""

    tokens: Tensor  # int64: the last one
    lengths: Tensor  # int32, that one counted


class Handover(Protocol):
    """Between the rows of a step with guesses and those of their sequences."""

    def take(self, count: int) -> None:
        """The first `count` unread tokens come from their sequences."""

    def go_on(self, chosen: Tensor, count: int) -> None:
        """The first `count` sequences take the token `chosen` behind their last right guess, and
        the length that counts it.
        """

    def count(self, chosen: Tensor, times: Tensor, count: int) -> None:
        """What was `chosen` up to behind the last right guess of the first `count` sequences is
        counted in `times`, int32 [rows of sequences, vocabulary].
        """

    def guess_on(self, chosen: Tensor, found: Tensor, count: int) -> None:
        """The rows become those of the next step, with as many guesses of each of the first `count`
        sequences: the token `chosen` behind its last right guess, then its column of `found`
        [guesses, at least so many].
        """


class KernelHandover:
    """By kernels."""

    def __init__(self, rows: GuessedRows, sequences: SequenceRows):
        self.rows = rows
        self.sequences = sequences
        source = jit.load("guesses.cu", defines={"THREADS": THREADS})
        self._take = functools.partial(source.kernel("take").launch, 1, THREADS)
        self._guess_on = functools.partial(source.kernel("guess_on").launch, 1, THREADS)
        self._go_on = functools.partial(source.kernel("go_on").launch, 1, THREADS)
        self._count = functools.partial(source.kernel("count").launch, 1, THREADS)

    def take(self, count: int) -> None:
        rows = self.rows
        self._take((rows.tokens, self.sequences.tokens, rows.unread, rows.unread_at, count))

    def go_on(self, chosen: Tensor, count: int) -> None:
        rows, sequences = self.rows, self.sequences
        into = (sequences.tokens, sequences.lengths)
        self._go_on((chosen, rows.guesses, rows.first, rows.at, rows.lengths, *into, count))

    def count(self, chosen: Tensor, times: Tensor, count: int) -> None:
        rows = self.rows
        where = (rows.before, rows.first, rows.at)
        self._count((chosen, rows.tokens, *where, times, times.shape[1], len(chosen), count))

    def guess_on(self, chosen: Tensor, found: Tensor, count: int) -> None:
        rows = self.rows
        where = (rows.before, rows.first, rows.lengths)
        self._guess_on((chosen, rows.tokens, *where, found, found.stride(0), len(chosen), count))


class TorchHandover:
    """By torch's ops."""

    def __init__(self, rows: GuessedRows, sequences: SequenceRows):
        self.rows = rows
        self.sequences = sequences

    def take(self, count: int) -> None:
        rows = self.rows
        values = self.sequences.tokens.index_select(0, rows.unread_at[:count])
        rows.tokens.index_copy_(0, rows.unread[:count], values)

    def go_on(self, chosen: Tensor, count: int) -> None:
        rows, sequences = self.rows, self.sequences
        last = last_rows(chosen, rows.guesses[: len(chosen)], rows.first[:count])
        at = rows.at.index_select(0, last)
        sequences.tokens.index_copy_(0, at, chosen.index_select(0, last))
        sequences.lengths.index_copy_(0, at, rows.lengths.index_select(0, last) + 1)

    def count(self, chosen: Tensor, times: Tensor, count: int) -> None:
        rows = self.rows
        first = rows.first[:count]
        last = self._last(chosen, count)
        kept = torch.arange(len(chosen), device=chosen.device)
        sequence = (rows.before[: len(chosen)] == 0).cumsum(0) - 1
        kept = kept[(first[sequence] <= kept) & (kept <= last[sequence])]
        places = (rows.at.index_select(0, kept), chosen.index_select(0, kept))
        times.index_put_(places, torch.ones_like(kept, dtype=times.dtype), accumulate=True)

    def _last(self, chosen: Tensor, count: int) -> Tensor:
        """Of each sequence the row whose guesses before it were right, by the rows' own tokens."""
        rows = self.rows
        guessed = rows.tokens[: len(chosen)].roll(-1)
        guessed[rows.before[: len(chosen)].roll(-1) == 0] = -1
        return last_rows(chosen, guessed, rows.first[:count])

    def guess_on(self, chosen: Tensor, found: Tensor, count: int) -> None:
        rows = self.rows
        last = self._last(chosen, count)
        lengths = rows.lengths.index_select(0, last) + 1
        tokens = torch.cat([chosen.index_select(0, last)[None], found[:, :count]])
        before = rows.before[: len(chosen)].long()
        sequence = (before == 0).cumsum(0) - 1
        rows.tokens[: len(chosen)] = tokens[before, sequence]
        rows.lengths[: len(chosen)] = lengths[sequence] + before.int()


def handover(rows: GuessedRows, sequences: SequenceRows) -> Handover:
    if rows.tokens.device.type == "cuda":
        return KernelHandover(rows, sequences)
    return TorchHandover(rows, sequences)
