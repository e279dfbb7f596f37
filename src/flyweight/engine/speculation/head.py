"""Guesses of a drafting head (EAGLE-3, MTP): a layer that goes on from the model's hidden states.

The head follows every step of the model (`Runner.follower`): what the step leaves on the side
(models/taps.py), with the tokens chosen after it, goes through the head's layer, whose keys and
values lie in blocks of the same numbers as the model's. So prompts, the prefix cache, preemption
and cancellation need nothing of their own. Right behind it come the guesses for the next step, all
launched before the host has read what the step chose. The host does not read them before it
launches the step that checks them (late.py).

A guess is the head's likeliest token, also where the request samples: it is kept as often as the
model's own sampler chooses that token (verify.py).

Positions that no step was followed at (many sequences: plain captured steps) leave a hole in the
head's cache. Such a request gets no more guesses, unless it starts over.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from flyweight.batch import Batch
from flyweight.engine.packed import SIZES as PASS_SIZES
from flyweight.engine.packed import Packed
from flyweight.engine.request import Request
from flyweight.engine.runner import Runner
from flyweight.engine.speculation.head_graphs import HeadGraphs, unsupported_reason
from flyweight.engine.speculation.late import Arrival, LateDrafts
from flyweight.engine.speculation.shared_rows import CAPACITY, SharedRows
from flyweight.engine.work import Work
from flyweight.kernels.accept import last_rows
from flyweight.models.attention import Paged
from flyweight.models.decoder import Decoder
from flyweight.models.heads.head import DraftHead
from flyweight.models.taps import Taps
from flyweight.transfer import upload


def tap(target: Decoder, head: DraftHead) -> None:
    """From now on the model's steps leave what the head reads."""
    rows = max(PASS_SIZES[-1], 256) if target.device.type == "cuda" else 0
    target.taps = Taps(
        head.places,
        target.config.hidden_size,
        rows=rows,
        dtype=target.dtype,
        device=target.device,
    )


class HeadDrafter:
    guesses_ahead = False

    def __init__(self, head: DraftHead, runner: Runner, *, guesses: int, varied: bool = False):
        """`varied`: it may be asked to `expect` fewer guesses."""
        assert isinstance(runner.model, Decoder) and runner.model.taps is not None
        self.head = head
        self.target = runner.model
        self.runner = runner
        self.guesses = guesses
        self.varied = varied
        self.count = guesses  # of guesses that are made behind a step
        self.cache = head.cache(runner.spare + 1, runner.block_size)
        self.guessed: dict[int, Sequence[int]] = {}
        self.lost: set[int] = set()  # requests with a hole in the head's cache
        self.released: set[int] = set()  # those that nobody wants guesses for
        runner.follower = self
        runner.rows.blank = runner.spare

    @functools.cached_property
    def graphs(self) -> HeadGraphs | None:
        """Captured, where the model's steps with guesses are."""
        runner = self.runner
        captured = runner.shared_steps is not None
        if not captured or unsupported_reason(self.head, runner.block_size) is not None:
            return None
        return HeadGraphs(
            self.head, self.target, self.cache, runner.shared_rows, guesses=self.guesses
        )

    # -- as a drafter ----------------------------------------------------------------------

    def warm_up(self) -> None:
        if self.graphs is not None:
            self.graphs.warm_up(least=1 if self.varied else self.guesses)

    def expect(self, count: int) -> None:
        if self.varied:
            self.count = min(count, self.guesses)

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        """Its guesses lie on the device anyhow."""
        return all(
            work.drafts and len(self.guessed.get(work.request.number, ())) == len(work.drafts)
            for work in works
        )

    def promising(self, request: Request) -> bool:
        return request.number in self.guessed

    def propose(
        self, requests: Sequence[Request], most: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        return {
            request.number: self.guessed[request.number][: most[request.number]]
            for request in requests
            if request.number in self.guessed
        }

    def release(self, request: Request) -> None:
        """Its steps go by from now on."""
        self.released.add(request.number)
        self.lost.add(request.number)
        self.guessed.pop(request.number, None)

    def learn(self, works: Sequence[Work], seconds: float) -> None:
        pass

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        self.guessed.pop(request.number, None)
        self.lost.discard(request.number)
        self.released.discard(request.number)

    # -- as a follower ---------------------------------------------------------------------

    def wants(self, works: Sequence[Work]) -> bool:
        """Whether it can guess for some of them once this step is over."""
        return any(
            work.request.number not in self.lost and work.request.constraint is None
            for work in works
        )

    def skipped(self, works: Sequence[Work]) -> None:
        """A step of theirs went by."""
        self.lost.update(work.request.number for work in works)
        self._over(works)

    def after_rows(self, works: Sequence[Work], rows: SharedRows, tokens: Tensor) -> None:
        """A captured step of rows, and the tokens chosen after each of them."""
        if self.graphs is None or len(tokens) != sum(work.count for work in works):
            self.skipped(works)
            return
        self._over(works)
        rows.hold(tokens)
        self.graphs.follow(len(tokens))
        self._expect(works, self.graphs.chain(len(works), self.count))

    def after_pass(self, works: Sequence[Work], packed: Packed, tokens: Tensor) -> None:
        """A step of any mix; `tokens`: chosen after the rows that sample."""
        self._over(works)
        for work in works:
            if work.start == 0 and work.request.number not in self.released:
                self.lost.discard(work.request.number)
        taps, batch = self.target.taps, packed.batch
        assert taps is not None
        sampled = batch.output_rows.index_select(0, packed.last)
        following = self._following(works, batch, sampled, tokens)
        hidden = self.head.begin(taps.states)
        stage = self._paged(replace(batch, tokens=following, adapters=None))
        hidden = self.head.step(self.head.embedding(following), hidden, stage)
        sampling = [work for work in works if work.samples]
        if not sampling:
            return
        first = [0, *itertools.accumulate(work.outputs for work in sampling)][:-1]
        guesses = [token for work in sampling for token in (*work.drafts, -1)]
        begin, after = upload(
            self.head.device,
            numpy.array(first, dtype=numpy.int64),
            numpy.array(guesses, dtype=numpy.int64),
        )
        last = last_rows(tokens, after, begin)
        self.runner.rows.extend()
        places = packed.rows.index_select(0, begin)
        rows = sampled.index_select(0, last)
        found = self._chain(
            hidden.index_select(0, rows),
            batch.positions.index_select(0, rows).int() + 1,
            self.runner.rows.tables.index_select(0, places),
        )
        self._expect(sampling, found)

    def _expect(self, works: Sequence[Work], found: Tensor) -> None:
        """Guesses [guesses, sequences] for the next step of these, which the host has not read.
        They lie where those before them lay, so none of those may be checked any more.
        """
        self.guessed.clear()
        arrival = Arrival(found)
        for column, work in enumerate(works):
            number = work.request.number
            if number not in self.lost:
                self.guessed[number] = LateDrafts(arrival, column, len(found))

    def _over(self, works: Sequence[Work]) -> None:
        """Guesses for these have had their step."""
        for work in works:
            self.guessed.pop(work.request.number, None)

    def _following(
        self, works: Sequence[Work], batch: Batch, sampled: Tensor, tokens: Tensor
    ) -> Tensor:
        """The token after each of the batch: the next one, where the sequence goes on in it."""
        following = batch.tokens.roll(-1)
        ends: list[int] = []
        values: list[int] = []
        counts = itertools.accumulate(work.count for work in works)  # what pads a step lies behind
        for work, end in zip(works, counts, strict=True):
            if not work.samples:
                ends.append(end - 1)
                values.append(work.request.tokens[work.start + work.count])
        if ends:
            at, known = upload(self.head.device, numpy.array(ends), numpy.array(values))
            following.index_copy_(0, at, known)
        return following.index_copy_(0, sampled, tokens) if len(tokens) else following

    def _paged(self, batch: Batch) -> Paged:
        return Paged(batch, [self.cache], self.head.ropes, self.head.ops)

    def _chain(self, hidden: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """Guesses [guesses, sequences] after these states."""
        count = len(hidden)
        graphs = self.graphs
        if graphs is None or count > CAPACITY:
            return self._chain_step_by_step(hidden, lengths, tables)
        state = graphs.state
        state.hidden[:count].copy_(hidden)
        state.lengths.zero_()
        state.lengths[:count].copy_(lengths)
        state.tables[:count, :-1].copy_(tables)
        return graphs.chain(count, self.count)

    def _chain_step_by_step(self, hidden: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        head = self.head
        page = self.runner.block_size
        blank = tables.new_full((len(tables), 1), self.runner.spare)
        tables = torch.cat([tables, blank], 1)
        found = []
        for guess in range(self.count):
            tokens = head.guess(hidden)
            found.append(tokens)
            if guess + 1 == self.count:
                break
            at = lengths.long()
            slots = tables.long().gather(1, at[:, None] // page)[:, 0] * page + at % page
            lengths = lengths + 1
            batch = Batch(
                tokens=tokens,
                positions=at,
                slots=slots,
                block_tables=tables,
                query_starts=list(range(len(tokens) + 1)),
                kv_lengths=lengths.tolist(),
                output_rows=at[:0],
            )
            hidden = head.step(head.embedding(tokens), hidden, self._paged(batch))
        return torch.stack(found)
