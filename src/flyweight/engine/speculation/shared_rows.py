"""The rows of a step in which several are of one sequence: what a captured step with guesses reads.

    sequence 3, length 70, three guesses     →  rows of lengths 70, 71, 72, 73, rows before: 0, 1,
        2, 3
    sequence 5, length 12, none              →  a row of length 12, rows before: 0

`Rows` has one row a sequence, and keeps it from step to step. These are made anew for each step
from what the host knows. What comes from `Rows`, on the device, is block tables, adapters, and last
tokens that the host has not read yet.

The device waits while a step with guesses is prepared, so that is made short: all integers go in
one copy, and tables are copied only when a sequence got blocks or another place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.engine.rows import Rows
from flyweight.engine.speculation.late import LateDrafts
from flyweight.engine.work import Work
from flyweight.kernels.attention.decode import CHUNK
from flyweight.kernels.guesses import GuessedRows, SequenceRows, handover
from flyweight.kernels.sample import Guessed
from flyweight.models.decode_step import DecodeStep
from flyweight.models.layer import Block
from flyweight.transfer import Stage, StagedColumns

CAPACITY = 64
# Rows that steps are captured for; those of FUSED_SIZES not where `runs_as_eight`.
FUSED_SIZES = (1, 2, 4)
SIZES = (*FUSED_SIZES, 8, 16, 24, 32, 48, 64)
KINDS = "qqqqqqqii"  # of the columns that one copy brings
TOKENS, AT, SAMPLED, FIRST, UNREAD, UNREAD_AT, GUESSES, LENGTHS, BEFORE = range(len(KINDS))


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
        self._columns = StagedColumns(rows.device, CAPACITY, KINDS)
        views = self._columns.views
        self.tokens, self.lengths, self.before = views[TOKENS], views[LENGTHS], views[BEFORE]
        self.at, self.sampled, self.first = views[AT], views[SAMPLED], views[FIRST]
        unread = (views[UNREAD], views[UNREAD_AT])
        guessed = GuessedRows(
            self.tokens,
            self.lengths,
            self.before,
            views[GUESSES],
            self.at,
            self.first,
            *unread,
        )
        self._handover = handover(guessed, SequenceRows(rows.tokens, rows.lengths))
        # of the latest step, where each had one known token and guesses that the host knows; else 0
        self._sequences = 0
        self._layout: list[tuple[int, int, int]] = []  # of the latest step
        # the rows whose tables were copied, and how many times each,
        self._of: list[tuple[int, int]] = []
        self._version = -1  # and `Rows.version` then

    @property
    def taken(self) -> tuple[Tensor, Tensor]:
        """As of `Rows`. How many of these tokens count is known later."""
        return self.chosen, self._uncounted

    def advance(self, tokens: Tensor) -> None:
        """As a captured step does."""
        self.chosen[: len(tokens)].copy_(tokens)

    def hold(self, tokens: Tensor) -> None:
        """Tokens chosen after all rows of a step: there already, where the step chose them."""
        if tokens.data_ptr() != self.chosen.data_ptr():
            self.advance(tokens)

    @property
    def adapted(self) -> bool:
        return self.rows.adapted

    def takes(self, works: Sequence[Work]) -> bool:
        """Whether such a step fits: answers alone, each with no more new tokens than a kernel
        takes. A last token that the host does not know must be on the device.
        """
        if is_unread(works):
            return self.repeats(works)
        rows = self.rows
        return sum(work.count for work in works) <= CAPACITY and all(
            work.samples
            and work.count <= CHUNK
            and work.request.number in rows.row_of
            and (
                work.start + work.known <= len(work.request.tokens)
                or work.request.number not in rows.behind
            )
            for work in works
        )

    def fill(self, works: Sequence[Work]) -> int:
        """Make the rows of this step, and the list of those that are sampled from; returns how many
        rows.
        """
        late: list[tuple[int, LateDrafts]] = []
        unread: list[int] = []
        unread_at: list[int] = []
        tokens: list[int] = []
        lengths: list[int] = []
        layout: list[tuple[int, int, int]] = []
        guesses: list[int] = []  # after each row; −1: none
        for work in works:
            request, start, count = work.request, work.start, work.count
            known = count - len(work.drafts)
            row = self.rows.row_of[request.number]
            layout.append((row, count, work.outputs))
            tokens += request.tokens[start : start + known]
            if start + known > len(request.tokens):
                unread.append(len(tokens))
                unread_at.append(row)
                tokens.append(0)
            if isinstance(work.drafts, LateDrafts):
                late.append((len(tokens), work.drafts))
                tokens += [0] * len(work.drafts)
            else:
                tokens += work.drafts
            guesses += work.drafts if not late else ()
            guesses.append(-1)
            lengths += range(start + 1, start + 1 + count)
        self._layout = layout
        stage = self._columns.begin()
        if stage.layout != layout:
            write_layout(stage, layout)
        stage.write(TOKENS, tokens)
        stage.write(LENGTHS, lengths)
        stage.write(GUESSES, guesses)
        if unread:
            stage.write(UNREAD, unread)
            stage.write(UNREAD_AT, unread_at)
        self._columns.send(stage)
        self._sequences = 0 if late or any(work.known > 1 for work in works) else len(works)
        if unread:
            self._handover.take(len(unread))
        for begin, drafts in late:
            drafts.put(self.tokens[begin : begin + len(drafts)])
        at = [(row, count) for row, count, _ in layout]
        if self._of[: len(at)] != at:
            self._of = at
            self._version = -1
        self.copy_tables()
        return len(tokens)

    def repeats(self, works: Sequence[Work]) -> bool:
        """Whether these have the rows of the latest step, which its guesses were in."""
        row_of = self.rows.row_of
        return self._layout == [
            (row_of.get(work.request.number, -1), work.count, work.outputs) for work in works
        ]

    def guess_on(self, works: Sequence[Work]) -> int:
        """Make the rows of this step out of those of the latest one, which has as many guesses of
        the same sequences and was not read: what the device knows of them goes from row to row.
        """
        assert self.repeats(works), "rows behind guesses that nobody has read are others"
        drafts = [work.drafts for work in works]
        late = [one for one in drafts if isinstance(one, LateDrafts)]
        assert len(late) == len(works) and [one.column for one in late] == [*range(len(works))]
        count = sum(work.count for work in works)
        self._handover.guess_on(self.chosen[:count], late[0].arrival.found, len(works))
        self._sequences = 0
        self.copy_tables()
        return count

    @property
    def guessed(self) -> Guessed:
        """Of the latest step."""
        return Guessed(self.tokens, self.before)

    def count(self, chosen: Tensor) -> None:
        """Penalties of the next steps count what the latest one, in which every row was sampled
        from, ends with.
        """
        self._handover.count(chosen, self.rows.sampling.seen[1], len(self._layout))

    def go_on(self, chosen: Tensor) -> None:
        """The rows of `Rows` take what the step ends with: the token chosen behind the last right
        guess, and the length that counts it. Then they are not behind any more. Where the step had
        other rows than a token and its guesses each, the host sees to it (`Rows.catch_up`).
        """
        if not self._sequences:
            return
        rows = self.rows
        self._handover.go_on(chosen, self._sequences)
        settled = self._of[: self._sequences]
        rows.behind.difference_update(rows.requests[row].number for row, _ in settled)

    def copy_tables(self) -> None:
        """And adapters, of the sequences in the latest step; rows behind those may have any."""
        rows = self.rows
        if self._version == rows.version:
            return
        self._version = rows.version
        torch.index_select(rows.tables, 0, self.at, out=self.tables)
        if self.adapters is not None and rows.adapters is not None:
            torch.index_select(rows.adapters, 0, self.at, out=self.adapters)


def runs_as_eight(step: DecodeStep) -> bool:
    """Whether a step of fewer rows is no faster than one of eight: where qkv and attention are two
    kernels, and eight rows have kernels for linears that fewer have not (`rows_N_apart` of
    benchmarks/workshop/speculation-h200.jsonl).
    """
    return step.separate is not None and any(
        eight_rows_differ(block) for block in step.decoder.blocks if block.delta is None
    )


def eight_rows_differ(block: Block) -> bool:
    return not block.o.fused.goes_by_row(8)


def is_unread(works: Sequence[Work]) -> bool:
    """Whether more than one token of a sequence is in flight: how many of them count nobody has
    read.
    """
    return any(work.request.pending > 1 for work in works)


def write_layout(stage: Stage, layout: list[tuple[int, int, int]]) -> None:
    """What stays as it is while the same sequences have as many rows: of each the place in `Rows`,
    rows, and rows that are sampled from. All else becomes 0: rows of length 0 are nobody's.
    """
    sampled: list[int] = []
    first: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for row, count, outputs in layout:
        first.append(len(at))
        at += [row] * count
        before += range(count)
        sampled += range(len(at) - outputs, len(at))
    stage.clear()
    stage.layout = layout
    for column, values in ((AT, at), (SAMPLED, sampled), (FIRST, first), (BEFORE, before)):
        stage.write(column, values)
