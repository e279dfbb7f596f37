"""The rows of a step in which several are of one sequence: what a captured step with guesses reads.

    sequence 3, length 70, three guesses     →  rows of lengths 70, 71, 72, 73, rows before: 0, 1, 2, 3
    sequence 5, length 12, none              →  a row of length 12, rows before: 0

`Rows` has one row a sequence, and keeps it from step to step. These are made anew for each step from
what the host knows; block tables alone are copied from there, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from flyweight.engine.rows import Rows
from flyweight.engine.scheduler import Work
from flyweight.kernels.attention.decode import CHUNK
from flyweight.transfer import upload

CAPACITY = 64


class SharedRows:
    def __init__(self, rows: Rows):
        self.rows = rows
        self.capacity = CAPACITY
        self.tables = torch.zeros(CAPACITY, rows.pages, dtype=torch.int32, device=rows.device)
        self._staged = torch.zeros(32 * CAPACITY, dtype=torch.uint8, device=rows.device)
        self.tokens, self.at, self.lengths, self.before = self._place([], [], [], [])

    def takes(self, works: Sequence[Work]) -> bool:
        """Whether such a step fits: answers alone, with no more guesses than a kernel takes."""
        return sum(work.count for work in works) <= CAPACITY and all(
            work.samples and work.known == 1 and work.count <= CHUNK and work.request.number in self.rows.row_of
            for work in works
        )

    def fill(self, works: Sequence[Work]) -> int:
        """Make the rows of this step; returns how many."""
        tokens: list[int] = []
        at: list[int] = []
        lengths: list[int] = []
        before: list[int] = []
        for work in works:
            tokens += [*work.request.tokens[work.start :], *work.drafts]
            at += [self.rows.row_of[work.request.number]] * work.count
            lengths += range(work.start + 1, work.start + 1 + work.count)
            before += range(work.count)
        self._place(tokens, at, lengths, before)
        torch.index_select(self.rows.tables, 0, self.at, out=self.tables)
        return len(tokens)

    def _place(self, *columns: list[int]) -> list[Tensor]:
        """The columns, filled up with zeros, always in the same places."""
        types = (numpy.int64, numpy.int64, numpy.int32, numpy.int32)
        padded = [numpy.zeros(CAPACITY, dtype=kind) for kind in types]
        for column, place in zip(columns, padded, strict=True):
            place[: len(column)] = column
        return upload(self.rows.device, *padded, into=self._staged)
