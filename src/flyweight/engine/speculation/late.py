"""Guesses that the device has and the host has not read yet.

A step that checks them can be launched all the same: how many there are is known, and their values
go from place to place on the device (`put`). The host reads them when it has to compare them with
what the step chose, by when they have long arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from flyweight.transfer import Download


class Arrival:
    """Guesses of several sequences on their way: [guesses, sequences]."""

    def __init__(self, found: Tensor):
        self.found = found  # overwritten by the next ones, on the device
        self.download = Download(found)
        self._columns: list[list[int]] | None = None

    @property
    def columns(self) -> list[list[int]]:
        """By sequence; waits for them."""
        if self._columns is None:
            self._columns = [list(column) for column in zip(*self.download.lists()[0], strict=True)]
        return self._columns


class LateDrafts(Sequence[int]):
    """The first guesses of one sequence. Whoever looks at one waits for all."""

    def __init__(self, arrival: Arrival, column: int, length: int):
        self.arrival = arrival
        self.column = column
        self.length = length

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            begin, end, step = index.indices(self.length)
            if begin == 0 and step == 1:  # fewer of them: nobody has to know them for that
                return LateDrafts(self.arrival, self.column, max(0, end))
        return self.arrival.columns[self.column][: self.length][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.arrival.columns[self.column][: self.length])

    def put(self, tokens: Tensor) -> None:
        """Into as many places on the device."""
        tokens.copy_(self.arrival.found[: self.length, self.column])
