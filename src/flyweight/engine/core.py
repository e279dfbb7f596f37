"""The one step loop: requests in, scheduled, run, sampled. answers.py makes text of the tokens, for
whoever listens.

Offline generation, streaming, the server and the benchmarks all drive `Engine.step()`. Requests and
cancellations may come from any thread at any time; they wait in an inbox until the next step is
made.

With a `speculator` a request may get several tokens from one step (engine/speculation/).

With `overlap` a step is launched before the tokens of the one before are read: the device never
waits for the host, and the host has a whole step's time for text and listeners. A request that a
token has ended is then found one step late; what that step computed for it is thrown away. A
constraint needs every token before it can say what may follow: with one on board the step before is
read while the model runs, and tokens are chosen after that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from flyweight.batch import NOBODY
from flyweight.engine.answers import Answers, Decode
from flyweight.engine.contracts import Model
from flyweight.engine.flight import Flight, Result
from flyweight.engine.kv_cache import BlockPool, salt_of
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Chunk, Constraint, Request, SamplingParams
from flyweight.engine.runner import Runner, slots_of
from flyweight.engine.sampling import MOST_BIASES, seed_of
from flyweight.engine.scheduler import Scheduler
from flyweight.engine.speculation.speculator import Speculator
from flyweight.engine.states import StatePool
from flyweight.engine.work import Work
from flyweight.errors import RequestError, unknown
from flyweight.kernels.attention.decode import CHUNK
from flyweight.kernels.stall import explain


class Engine:
    def __init__(
        self,
        model: Model,
        shape: CacheShape,
        *,
        vocabulary: int,
        device: torch.device,
        max_model_len: int,
        blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        prefix_cache: bool = True,
        decode: Decode | None = None,
        end_ids: Iterable[int] = (),
        seed: int = 0,
        overlap: bool | None = None,
        prompt_tokens_beside: int | None = None,
        state_slots: int = 0,
    ):
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prompt_tokens_beside=prompt_tokens_beside,
        )
        if shape.states is not None:
            self.scheduler.states = StatePool(state_slots)
        self.runner = Runner(
            model,
            shape,
            blocks=blocks,
            block_size=block_size,
            vocabulary=vocabulary,
            device=device,
            context=min(max_model_len, blocks * block_size),
            sequences=max_num_seqs,
            state_slots=state_slots,
        )
        # On a CPU the launch is the work itself: reading late would only cost a step at the end of
        # each answer.
        self.overlap = device.type == "cuda" if overlap is None else overlap
        self.flight: Flight | None = None
        self.landing = (
            0.0  # seconds that the tokens of the latest guesses took, once they were read
        )
        self.scheduling = 0.0  # when the latest step was begun,
        self.begun = 0.0  # when the one in flight was,
        self.behind: Flight | None = None  # and which one the device was busy with then
        self.adapters = slots_of(model)
        self.speculator: Speculator | None = None  # who guesses tokens, if anybody does
        self.vocabulary = vocabulary
        self.max_model_len = min(max_model_len, blocks * block_size)
        self.prefix_cache = prefix_cache
        self.answers = Answers(decode, self._release)
        self.may_grow = True  # whether the model is made for a longer context than this one
        self.end_ids = frozenset(end_ids)
        self.seed = seed
        self.numbers = itertools.count()
        # (arrives rather than is cancelled, request)
        self.inbox: deque[tuple[bool, Request]] = deque()
        self.lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self.inbox) or self.scheduler.busy

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        listener: Callable[[Chunk], None] | None = None,
        constraint: Callable[[], Constraint] | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Request]:
        """One request per sample. Their tokens come with the steps; each chunk goes to the
        listener.

        Prefixes are shared only among requests of the same `cache_salt`: nobody else can find out
        what was sent with it. `adapter`: the name of one that was loaded with the model.
        """
        params = params.with_defaults({})  # whatever is still open: a step must not stumble over it
        self._check(prompt, params)
        if adapter is not None and adapter not in self.adapters:
            raise RequestError(unknown("adapter", adapter, self.adapters))
        first = next(self.numbers)
        seed = seed_of(self.seed, first) if params.seed is None else params.seed
        longest = (
            self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        )
        # Without a prefix cache only the samples of one prompt share blocks, and a lone one has
        # nobody to share with.
        salt = (
            salt_of(cache_salt, adapter)
            if self.prefix_cache
            else f"request {first}".encode()
            if params.n > 1
            else None
        )
        ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.end_ids
        )
        requests = [
            Request(
                number=first if index == 0 else next(self.numbers),
                prompt=list(prompt),
                params=params,
                index=index,
                seed=seed_of(seed, index),
                limit=min(longest, self.max_model_len),
                salt=salt,
                end_ids=ends,
                listener=listener,
                constraint=constraint() if constraint else None,
                adapter=NOBODY if adapter is None else self.adapters[adapter],
            )
            for index in range(params.n)
        ]
        self.inbox.extend((True, request) for request in requests)
        return requests

    def cancel(self, requests: Iterable[Request]) -> None:
        """Their blocks come back now, or as soon as the step in flight is over."""
        self.inbox.extend((False, request) for request in requests if not request.finished)
        if self.lock.acquire(blocking=False):
            try:
                self._empty_inbox()
            finally:
                self.lock.release()

    def step(self) -> int:
        """Launch one batch; returns how many tokens it computes. Tokens are read from it, or from
        the one before it.
        """
        with self.lock:
            self._empty_inbox()
            try:
                self._read_for_guesses()
                begin = self.scheduling = time.perf_counter()
                works = self.scheduler.schedule(self._draft())
                behind = self.flight
                flight = self.runner.launch(works, lambda: self._launched(works)) if works else None
                self._land()
                self.answers.tell_all()
                self.flight, self.begun, self.behind = flight, begin, behind
                if not self.overlap:
                    self._land()
                    self.answers.tell_all()
                elif flight is not None and flight.speculative:
                    self._prepare()
                    if not self._can_follow(flight):
                        self._land()  # the next step waits for its tokens, but not for their text
            except BaseException as error:
                cause = explain(error)
                self._abandon(cause)
                if cause is not error:
                    raise cause from error
                raise
            return sum(work.count for work in works)

    def rest(self) -> bool:
        """There is nothing to do: prepare a pass for the next time. Whether there was one to
        prepare.
        """
        with self.lock:
            return not self.busy and self.runner.rest()

    def _launched(self, works: Sequence[Work]) -> None:
        """The model runs, tokens are still to be chosen."""
        for work in works:
            work.request.pending += work.outputs
        if self.speculator is not None and any(work.drafts for work in works):
            self.speculator.prepared(time.perf_counter() - self.scheduling + self.landing)
        if any(work.samples and work.request.constraint for work in works):
            self._land()

    def _read_for_guesses(self) -> None:
        """Whoever guesses needs the tokens of the step in flight, unless it guesses them as well;
        where nobody will, the next step is launched before that one is read.
        """
        speculator, flight = self.speculator, self.flight
        if flight is None:
            return
        if flight.speculative:
            wanted = not self._can_follow(flight)
        elif speculator is None or speculator.drafter.guesses_ahead:
            wanted = False
        else:
            wanted = speculator.promising(self.scheduler.running)
        if wanted or not self.overlap:
            self._land()

    def _can_follow(self, flight: Flight) -> bool:
        """Whether a step can be launched behind this one with guesses before it is read, and should
        be. The device alone knows how many of the guesses were right, so nothing else may happen in
        that step: every row goes on, and finds its token and length there. Until then all guesses
        count as right (`Request.pending`): blocks are there for them.
        """
        speculator, scheduler, running = self.speculator, self.scheduler, self.scheduler.running
        if (
            speculator is None
            or not self.overlap
            or scheduler.waiting
            or scheduler.long_prompts is not None
            or len(flight.works) != len(running)
            or self.pool.available <= 2 * len(running)
            or any(request.complete or request.constraint for request in running)
        ):
            return False
        if speculator.drafter.guesses_ahead:  # a step without guesses
            return self.runner.can_follow(flight.works) and speculator.follows(flight.works)
        return self._can_guess_on(flight)

    def _can_guess_on(self, flight: Flight) -> bool:
        """Whether a step with as many guesses for the same answers can come behind this one: within
        the blocks that they have, none of them near its end.
        """
        size = self.pool.block_size
        fits = all(
            work.request.computed + work.count <= len(work.request.blocks) * size
            and work.request.length + work.count <= work.request.limit
            for work in flight.works
        )
        assert self.speculator is not None
        return (
            fits
            and self.runner.can_guess_on(flight.works)
            and self.speculator.drafter.guesses_unread(flight.works)
        )

    def _draft(self) -> dict[int, Sequence[int]]:
        """Guesses for the next step, by request."""
        speculator, flight = self.speculator, self.flight
        if speculator is None:
            return {}
        if flight is not None and speculator.drafter.guesses_ahead == flight.speculative:
            return {}  # one who guesses ahead waits for guesses, the others for single tokens
        return speculator.propose(self.scheduler.running)

    def _prepare(self) -> None:
        """While a step with guesses runs: what the one after it would need otherwise, with the
        device waiting.
        """
        self.scheduler.reserve(CHUNK)
        self.runner.prepare()

    def _land(self) -> None:
        """Read the step in flight."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        results = flight.results()
        now = time.perf_counter()
        self._learn(flight, results, now)
        if flight.speculative and not flight.counted and self.runner.rows.mode.penalized:
            self.runner.settle(flight.works, results)
        for work, result in zip(flight.works, results, strict=True):
            work.request.pending -= work.outputs
            if work.request.finished:
                continue
            if work.drafts:
                self._settle(work, len(result.tokens) - 1)
            self.answers.accept(work, result, now)
        if flight.speculative:
            self.landing = time.perf_counter() - now

    def _learn(self, flight: Flight, results: Sequence[Result], now: float) -> None:
        """What the step took, for whoever decides how much of prompts the next ones get, and how
        many guesses.
        """
        pace, works = self.scheduler.pace, flight.works
        if pace is None and self.speculator is None:
            return
        before = self.behind.download if self.behind is not None else None
        behind = None if before is None else flight.download.seconds_since(before)
        seconds = now - self.begun if behind is None else behind
        prompts = sum(work.known for work in works if work.known > 1)
        if pace is not None:
            pace.learn(
                seconds, prompt_tokens=prompts, answers=sum(work.known == 1 for work in works)
            )
        if self.speculator is not None and all(work.known == 1 and work.samples for work in works):
            tokens = sum(len(result.tokens) for result in results) / len(works)
            self.speculator.learn(works, seconds, tokens)

    def _settle(self, work: Work, accepted: int) -> None:
        self.scheduler.settle(work, accepted)
        work.request.drafted += len(work.drafts)
        work.request.accepted += accepted
        if self.speculator is not None:
            self.speculator.observe(work.request, work.drafts, accepted)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_model_len:
            more = " or raise max_model_len" if self.may_grow else ": the model is made for no more"
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.max_model_len} "
                f"and the answer needs room too; shorten the prompt{more}"
            )
        for kind, ids in (
            ("the prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if ids and (min(ids) < 0 or max(ids) >= self.vocabulary):
                bad = next(token for token in ids if not 0 <= token < self.vocabulary)
                raise RequestError(
                    f"token id {bad} in {kind} is outside the vocabulary of {self.vocabulary}"
                )
        if len(params.logit_bias) > MOST_BIASES - 20:
            raise RequestError(
                f"logit_bias has {len(params.logit_bias)} entries; at most "
                f"{MOST_BIASES - 20} can be given"
            )
        if params.stop and self.answers.decode is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model has none; use stop_token_ids"
            )

    def _empty_inbox(self) -> None:
        while self.inbox:
            arrives, request = self.inbox.popleft()
            if arrives:
                self.scheduler.add(request)
                self.answers.open(request)
            elif not request.finished:
                self.answers.tell_all()
                self.answers.finish(request, "cancelled")
                self.answers.tell_end(request)

    def _release(self, request: Request, reason: str, stop_reason: str | int | None) -> None:
        self.scheduler.finish(request, reason, stop_reason)
        if self.speculator is not None:
            self.speculator.forget(request)

    def _abandon(self, error: BaseException) -> None:
        """After a step that failed nothing in the cache can be trusted: all requests end, the
        prefixes are forgotten.
        """
        self.flight = None
        self.answers.forget_news()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.answers.finish(request, "failed", str(error) or type(error).__name__)
            self.answers.tell_end(request)
        self.pool.forget()
        if self.scheduler.states is not None:
            self.scheduler.states.forget()
