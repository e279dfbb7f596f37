"""The rows of a step in which several are of one sequence: what a captured step with guesses reads.

    sequence 3, length 70, three guesses     →  rows of lengths 70, 71, 72, 73, rows before: 0, 1, 2, 3
    sequence 5, length 12, none              →  a row of length 12, rows before: 0

`Rows` has one row a sequence, and keeps it from step to step. These are made anew for each step from
what the host knows; block tables and adapters alone are copied from there, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

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
        self.adapters = None if rows.adapters is None else rows.adapters.new_empty(CAPACITY)
        # what one copy brings: tokens, places in `rows`, lengths and rows before, in this order
        self._staged = torch.zeros(24 * CAPACITY, dtype=torch.uint8, device=rows.device)
        words, halves = self._staged.view(torch.int64), self._staged.view(torch.int32)
        self.tokens = words[:CAPACITY]
        self.at = words[CAPACITY : 2 * CAPACITY]
        self.lengths = halves[4 * CAPACITY : 5 * CAPACITY]
        self.before = halves[5 * CAPACITY :]

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
        columns = (tokens, numpy.int64), (at, numpy.int64), (lengths, numpy.int32), (before, numpy.int32)
        upload(self.rows.device, *(padded(column, kind) for column, kind in columns), into=self._staged)
        torch.index_select(self.rows.tables, 0, self.at, out=self.tables)
        if self.adapters is not None and self.rows.adapters is not None:
            torch.index_select(self.rows.adapters, 0, self.at, out=self.adapters)
        return len(tokens)


def padded(column: list[int], kind: type) -> numpy.ndarray:
    """Filled up with zeros: rows of length 0 are nobody's."""
    filled: numpy.ndarray = numpy.zeros(CAPACITY, dtype=kind)
    filled[: len(column)] = column
    return filled
