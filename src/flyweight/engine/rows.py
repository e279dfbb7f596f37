"""The running sequences as the device sees them: one row each of last token, length, block table
and sampling parameters.

Sampled tokens are written here and read as the next step's input, so a decode step needs nothing
from the host but the blocks that sequences have just been given. Rows 0 to n − 1 are in use: when a
sequence goes, the last one takes its place, so that a step captured for n rows, or the next larger
number of them, serves all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy
import torch
from torch import Tensor

from flyweight.batch import NOBODY
from flyweight.engine.request import Request, State
from flyweight.engine.sampling import GREEDY, Mode, SamplingTable, likeliest, sample
from flyweight.kernels.sample import Masks, Sampler, When, unsupported_reason
from flyweight.transfer import StagedColumns, upload, upload_beside

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows that steps are captured for


class Rows:
    before: Tensor | None = None  # every row is a sequence of its own
    # what tables hold where a sequence has no block, if anybody reads that far
    blank: int | None = None

    def __init__(
        self,
        sequences: int,
        *,
        pages: int,
        vocabulary: int,
        device: torch.device,
        adapted: bool = False,
        states: int | None = None,
    ):
        """`states`: slots of the state pool, the spare one aside, where layers keep states."""
        self.device, self.pages = device, pages
        self.capacity = rows = next((size for size in SIZES if size >= sequences), sequences)
        self._columns = StagedColumns(device, rows, "qi")
        # tokens: the last sampled, not yet in the cache; lengths count it, 0: nobody is here
        self.tokens, self.lengths = self._columns.views
        self.tables = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        # their slots
        self.adapters = (
            torch.full((rows,), NOBODY, dtype=torch.int32, device=device) if adapted else None
        )
        self.spare_state = states
        # the slots of their states; rows of nobody have the spare one
        self.states = (
            None
            if states is None
            else torch.full((rows,), states, dtype=torch.int32, device=device)
        )
        self.sampling = SamplingTable(rows, vocabulary, device)
        # None: by torch's ops
        self.sampler = Sampler(vocabulary, device) if unsupported_reason(device) is None else None
        self.mode = GREEDY  # joined over all rows
        self.requests: list[Request] = []  # by row
        self.row_of: dict[int, int] = {}  # by request number
        self.written: list[int] = []  # entries of each row's block table
        # preemptions of each request when it came: a later one makes its row stale
        self.stamps: list[int] = []
        self.behind: set[int] = set()  # numbers of requests whose last token only the host knows
        self.version = 0  # of block tables and adapters: another one after every change

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def adapted(self) -> bool:
        """Whether some row has an adapter."""
        return any(request.adapter != NOBODY for request in self.requests)

    def retain(self) -> None:
        """Drop the rows of requests that will sample nothing more, or start over."""
        kept = [
            not request.complete and request.state is State.RUNNING and request.preemptions == stamp
            for request, stamp in zip(self.requests, self.stamps, strict=True)
        ]
        if all(kept):
            return
        before, count = len(kept), sum(kept)
        holes = (row for row in range(count) if not kept[row])
        pairs = [(row, next(holes)) for row in range(count, before) if kept[row]]
        for source, target in pairs:
            self.requests[target] = self.requests[source]
            self.written[target], self.stamps[target] = self.written[source], self.stamps[source]
        if pairs:
            self._move(pairs)
        del self.requests[count:], self.written[count:], self.stamps[count:]
        self.row_of = {request.number: row for row, request in enumerate(self.requests)}
        self.lengths[count:before].zero_()
        self._join_modes()

    def _move(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = upload(self.device, *numpy.array(pairs, dtype=numpy.int64).T)
        self.version += 1
        for tensor in (self.tokens, self.lengths, self.tables, self.adapters, self.states):
            if tensor is not None:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        self.sampling.move(sources, targets, pairs)

    def enter(self, requests: Sequence[Request]) -> None:
        """Rows for requests about to sample for the first time since they were (re)started."""
        first = len(self.requests)
        rows = range(first, first + len(requests))
        self.version += 1
        self.requests += requests
        self.row_of |= {request.number: row for row, request in zip(rows, requests, strict=True)}
        self.written += [0] * len(requests)
        self.stamps += [request.preemptions for request in requests]
        self.sampling.enter(rows, requests)
        if self.blank is not None:
            self.tables[first : first + len(requests)].fill_(self.blank)
        if self.adapters is not None:
            (slots,) = upload(
                self.device,
                numpy.array([request.adapter for request in requests], dtype=numpy.int32),
            )
            self.adapters[first : first + len(requests)].copy_(slots)
        if self.states is not None:
            (held,) = upload(
                self.device,
                numpy.array([request.state_slot for request in requests], dtype=numpy.int32),
            )
            self.states[first : first + len(requests)].copy_(held)
        self._join_modes()

    def extend(self) -> None:
        """Write the blocks that sequences have been given since the last time into the tables."""
        places: list[int] = []
        blocks: list[int] = []
        for row, (request, written) in enumerate(zip(self.requests, self.written, strict=True)):
            if (count := len(request.blocks)) > written:
                places += range(row * self.pages + written, row * self.pages + count)
                blocks += request.blocks[written:]
                self.written[row] = count
        if places:
            self.version += 1
            at, values = upload(
                self.device,
                numpy.array(places, dtype=numpy.int64),
                numpy.array(blocks, dtype=numpy.int32),
            )
            self.tables.view(-1).index_copy_(0, at, values)

    def leave_behind(self, requests: Sequence[Request]) -> None:
        """Their tokens were chosen on the host: what the rows hold is old until `catch_up`, or
        until they are put anew.
        """
        self.behind.update(request.number for request in requests)

    def catch_up(self) -> None:
        """Write the last tokens and lengths of requests that were left behind, all of whose tokens
        the host has.
        """
        requests = [request for request in self.requests if request.number in self.behind]
        self.behind.clear()
        if not requests:
            return
        if len(requests) == len(self):
            stage = self._columns.begin()
            stage.clear()
            stage.write(0, [request.tokens[-1] for request in requests])
            stage.write(1, [len(request.tokens) for request in requests])
            self._columns.send(stage)
            return
        rows, tokens, lengths = upload(
            self.device,
            numpy.array([self.row_of[request.number] for request in requests], dtype=numpy.int64),
            numpy.array([request.tokens[-1] for request in requests], dtype=numpy.int64),
            numpy.array([len(request.tokens) for request in requests], dtype=numpy.int32),
        )
        self.tokens.index_copy_(0, rows, tokens)
        self.lengths.index_copy_(0, rows, lengths)

    def advance(self, tokens: Tensor) -> None:
        """The first rows take their likeliest tokens, as a captured step does; those that nobody
        uses stay at length 0.
        """
        count = len(tokens)
        self.tokens[:count].copy_(tokens)
        self.lengths[:count].add_(self.lengths[:count] > 0)

    @property
    def taken(self) -> tuple[Tensor, Tensor]:
        """Where a captured step writes likeliest tokens, and the lengths that count them."""
        return self.tokens, self.lengths

    @property
    def samples_in_step(self) -> bool:
        """Whether a captured step chooses all tokens itself: some are drawn, and none waits for a
        mask from the host or needs a table that the step was captured without.
        """
        return (
            self.sampler is not None
            and self.mode.random
            and not self.mode.penalized
            and not any(request.constraint for request in self.requests)
        )

    def choose(
        self,
        logits: Tensor,
        rows: Tensor | None = None,
        allowed: Mapping[int, numpy.ndarray] | None = None,
    ) -> Tensor:
        """Tokens as the requests want them chosen, into these rows, whose lengths count them
        already. `rows` None: the first ones, which have their likeliest tokens. `allowed`: of rows
        of the logits a bit a token, where not all are.
        """
        if self.mode == GREEDY and not allowed:
            return (
                self.tokens[: logits.shape[0]]
                if rows is None
                else self._put(likeliest(logits), rows)
            )
        if self.sampler is None:
            return self._sample(logits, slice(0, len(logits)) if rows is None else rows, allowed)
        chosen = (
            None
            if rows is None
            else torch.empty(len(logits), dtype=torch.int64, device=self.device)
        )
        self.sampler(
            logits,
            self.sampling.for_kernel(self.tokens, self.lengths),
            rows=rows,
            chosen=chosen,
            masks=masks_of(allowed, len(logits), self.device) if allowed else None,
            when=When.AFTER_GREEDY if rows is None else When.ALONE,
        )
        return self.tokens[: len(logits)] if chosen is None else chosen

    def _sample(
        self, logits: Tensor, rows: slice | Tensor, allowed: Mapping[int, numpy.ndarray] | None
    ) -> Tensor:
        """By torch's ops."""
        if allowed:
            logits = masked(logits, allowed)
        if self.mode == GREEDY:
            return self._put(likeliest(logits), rows)
        positions = self.lengths[rows].long() - 1
        tokens = sample(logits.float(), self.sampling.batch(self.mode, positions, rows))
        self.sampling.count(self.mode, tokens, rows)
        return self._put(tokens, rows)

    def _put(self, tokens: Tensor, rows: slice | Tensor) -> Tensor:
        self.tokens[rows] = tokens
        return tokens

    def _join_modes(self) -> None:
        mode, vocabulary = GREEDY, self.sampling.vocabulary
        for request in self.requests:
            mode = mode.join(Mode.of(request, vocabulary), vocabulary)
        self.mode = mode


def masks_of(allowed: Mapping[int, numpy.ndarray], count: int, device: torch.device) -> Masks:
    """For the kernel, in one upload, while the model runs."""
    of_row = numpy.full(count, -1, dtype=numpy.int32)
    of_row[[*allowed]] = numpy.arange(len(allowed), dtype=numpy.int32)
    return Masks(*upload_beside(device, stacked(allowed.values()), of_row))


def stacked(masks: Collection[numpy.ndarray]) -> numpy.ndarray:
    """[masks, bytes]: some may come in whole words and others not."""
    width = max(map(len, masks))
    bits = numpy.zeros((len(masks), width), dtype=numpy.uint8)
    for row, mask in zip(bits, masks, strict=True):
        row[: len(mask)] = mask
    return bits


def masked(logits: Tensor, allowed: Mapping[int, numpy.ndarray]) -> Tensor:
    """Less what is forbidden; the logits themselves are left for the logprobs."""
    vocabulary = logits.shape[-1]
    bits = numpy.unpackbits(stacked(allowed.values()), axis=1, count=vocabulary, bitorder="little")
    at, masks = upload(logits.device, numpy.array([*allowed]), bits.astype(bool))
    return logits.index_copy(0, at, logits.index_select(0, at).masked_fill(~masks, -torch.inf))
