"""Decode steps of a table of rows in one native call: what the table holds becomes a step there,
and the likeliest tokens go back into it.

Python's part of a step is then the same for one sequence and for many, and short: at a few
milliseconds a token, packing a batch and choosing tokens by torch's operations is felt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels.native import library


class Table(Protocol):
    """The running sequences, one row each (engine/rows.py)."""

    capacity: int
    tokens: Tensor  # int64 [rows]: the last one of each, not yet in the cache
    lengths: Tensor  # int32 [rows]: that one counted
    tables: Tensor  # int32 [rows, pages]


class Executor(Protocol):
    """Of a `NativeDecoder`, what a step needs."""

    @property
    def decoder(self) -> ctypes.Structure: ...

    @property
    def vocabulary(self) -> int: ...

    def open_step(self, caches: Sequence[KVStorage], **fields: int) -> Any:
        """The C struct of a step over this cache."""

    def workspace(self, team: int, tokens: int) -> int:
        """The address of memory for so many tokens."""


class CRows(ctypes.Structure):
    """`Rows` of source/rows.c."""

    _fields_ = (
        ("pages", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("tokens", "lengths", "tables", "room")),
    )


class NativeSteps:
    """Steps of the first rows of a table, whose memory stays where it is."""

    def __init__(self, decoder: Executor, caches: Sequence[KVStorage], table: Table):
        self.decoder = decoder
        self.caches = caches
        self.kernels = library.load()
        self.largest = table.capacity
        self.room = torch.empty(self.kernels.rows_room(self.largest), dtype=torch.uint8)
        self.memory = torch.empty(0, decoder.vocabulary)
        self.rows = CRows(
            pages=table.tables.shape[1],
            tokens=table.tokens.data_ptr(),
            lengths=table.lengths.data_ptr(),
            tables=table.tables.data_ptr(),
            room=self.room.data_ptr(),
        )

    def logits(self, count: int) -> Tensor:
        """[count, vocabulary] of one step of the first `count` rows, which stay as they are."""
        return self._run(count, advances=False)

    def advance(self, count: int) -> Tensor:
        """The same, and the rows take their likeliest tokens."""
        return self._run(count, advances=True)

    def sample(self, count: int) -> Tensor:
        raise NotImplementedError("tokens are drawn behind the step on a CPU")

    def warm_up(self, *, advances: bool = True) -> None:
        """Nothing is compiled or captured."""

    def _run(self, count: int, *, advances: bool) -> Tensor:
        if self.memory.shape[0] < count:
            self.memory = torch.empty(count, self.decoder.vocabulary)
        team = library.team()
        step = self.decoder.open_step(self.caches, logits=self.memory.data_ptr())
        self.kernels.decoder_advance(
            team,
            ctypes.byref(self.decoder.decoder),
            ctypes.byref(step),
            ctypes.byref(self.rows),
            count,
            advances,
            self.decoder.workspace(team, count),
        )
        return self.memory[:count]
