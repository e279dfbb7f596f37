"""The rows of a step in which several are of one sequence: what a captured step with guesses reads.

    sequence 3, length 70, three guesses     →  rows of lengths 70, 71, 72, 73, rows before: 0, 1,
        2, 3
    sequence 5, length 12, none              →  a row of length 12, rows before: 0

`Rows` has one row a sequence, and keeps it from step to step. These are made anew for each step
from what the host knows; block tables and adapters alone are copied from there, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from flyweight.engine.rows import Rows
from flyweight.engine.scheduler import Work
from flyweight.engine.speculation.late import LateDrafts
from flyweight.kernels.attention.decode import CHUNK

CAPACITY = 64
# Rows that steps are captured for; the first where qkv and attention are one kernel. Where they are
# two, those are faster for eight rows than for two or four (`rows_N` of
# benchmarks/workshop/speculation-h200.jsonl).
FUSED_SIZES = (1, 2, 4)
SIZES = (*FUSED_SIZES, 8, 16, 24, 32, 48, 64)


class SharedRows:
    states: Tensor | None = None  # models whose layers keep states take no guesses
    spare_state: int | None = None

    def __init__(self, rows: Rows):
        self.rows = rows
        self.capacity = CAPACITY
        self.tables = torch.zeros(CAPACITY, rows.pages, dtype=torch.int32, device=rows.device)
        self.adapters = None if rows.adapters is None else rows.adapters.new_empty(CAPACITY)
        # the likeliest after each row
        self.chosen = torch.zeros(CAPACITY, dtype=torch.int64, device=rows.device)
        self._uncounted = torch.zeros(CAPACITY, dtype=torch.int32, device=rows.device)
        # what one copy brings: tokens, places in `rows`, sampled rows, first rows, lengths and rows
        # before
        self._staged = torch.zeros(40 * CAPACITY, dtype=torch.uint8, device=rows.device)
        words, halves = self._staged.view(torch.int64), self._staged.view(torch.int32)
        self.tokens = words[:CAPACITY]
        self.at = words[CAPACITY : 2 * CAPACITY]
        self.sampled = words[2 * CAPACITY : 3 * CAPACITY]
        self.first = words[3 * CAPACITY : 4 * CAPACITY]  # of each sequence
        self.lengths = halves[8 * CAPACITY : 9 * CAPACITY]
        self.before = halves[9 * CAPACITY :]

    @property
    def taken(self) -> tuple[Tensor, Tensor]:
        """As of `Rows`. How many of these tokens count is known later."""
        return self.chosen, self._uncounted

    def advance(self, tokens: Tensor) -> None:
        """As a captured step does."""
        self.chosen[: len(tokens)].copy_(tokens)

    @property
    def adapted(self) -> bool:
        return self.rows.adapted

    def takes(self, works: Sequence[Work]) -> bool:
        """Whether such a step fits: answers alone, each with no more new tokens than a kernel
        takes, which the host knows.
        """
        return sum(work.count for work in works) <= CAPACITY and all(
            work.samples
            and work.count <= CHUNK
            and work.start + work.known <= len(work.request.tokens)
            and work.request.number in self.rows.row_of
            for work in works
        )

    def fill(self, works: Sequence[Work]) -> int:
        """Make the rows of this step, and the list of those that are sampled from; returns how many
        rows.
        """
        sampled: list[int] = []
        first: list[int] = []
        late: list[tuple[int, LateDrafts]] = []
        tokens: list[int] = []
        at: list[int] = []
        lengths: list[int] = []
        before: list[int] = []
        for work in works:
            first.append(len(tokens))
            tokens += work.request.tokens[work.start : work.start + work.known]
            if isinstance(work.drafts, LateDrafts):
                late.append((len(tokens), work.drafts))
                tokens += [0] * len(work.drafts)
            else:
                tokens += work.drafts
            sampled += range(len(tokens) - work.outputs, len(tokens))
            at += [self.rows.row_of[work.request.number]] * work.count
            lengths += range(work.start + 1, work.start + 1 + work.count)
            before += range(work.count)
        self._stage((tokens, at, sampled, first), (lengths, before))
        for begin, drafts in late:
            drafts.put(self.tokens[begin : begin + len(drafts)])
        torch.index_select(self.rows.tables, 0, self.at, out=self.tables)
        if self.adapters is not None and self.rows.adapters is not None:
            torch.index_select(self.rows.adapters, 0, self.at, out=self.adapters)
        return len(tokens)

    def _stage(self, wide: Sequence[list[int]], narrow: Sequence[list[int]]) -> None:
        """All columns in one copy, filled up with zeros: rows of length 0 are nobody's."""
        pinned = self.rows.device.type == "cuda"
        staged = torch.empty(self._staged.shape, dtype=torch.uint8, pin_memory=pinned)
        found = staged.numpy()
        found.fill(0)
        split = 8 * CAPACITY * len(wide)
        words = found[:split].view(numpy.int64).reshape(-1, CAPACITY)
        halves = found[split:].view(numpy.int32).reshape(-1, CAPACITY)
        for row, column in zip((*words, *halves), (*wide, *narrow), strict=True):
            row[: len(column)] = column
        self._staged.copy_(staged, non_blocking=True)
