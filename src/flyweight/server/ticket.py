"""One HTTP request's way through the engine: its prompts submitted, their deltas collected until
somebody reads them.

The engine never waits for a reader. A slow one finds more deltas in its ticket the next time it
looks, and what it can leave there is bounded by the length of its own answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyweight.server.messages import FAILED, REFUSED, Delta
from flyweight.server.refusals import BadRequest, EngineFailed, Refusal


@dataclass(eq=False)
class Sample:
    """One answer among those of a ticket, and when its tokens came."""

    prompt_tokens: int
    started: float | None = None
    cached: int = 0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    finish_reason: str | None = None
    drafted: int = 0  # guesses of its tokens (engine/speculation/)
    accepted: int = 0  # of those, the right ones


@dataclass(eq=False)
class Ticket:
    prompts: Sequence[Sequence[int]]
    n: int
    arrival: float = field(default_factory=time.perf_counter)
    samples: list[Sample] = field(init=False)  # prompt by prompt, n for each
    keys: list[int] = field(default_factory=list)  # the engine's, one a prompt
    ready: deque[tuple[int, Delta]] = field(default_factory=deque)  # (number of the sample, delta)
    shows_cached: bool = True  # whether its reader may know how much came from the prefix cache
    failure: Refusal | None = None
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.samples = [Sample(len(prompt)) for prompt in self.prompts for _ in range(self.n)]
        self.unfinished = len(self.samples)
        self.changed = asyncio.Event()

    @property
    def cached(self) -> int:
        """Prompt tokens from the prefix cache, as far as its reader may know."""
        return sum(sample.cached for sample in self.samples[:: self.n]) if self.shows_cached else 0

    async def next(self) -> list[tuple[int, Delta]]:
        """What has come since the last call, at least one delta; empty when all is over."""
        while not self.ready:
            if self.failure:
                raise self.failure
            if not self.unfinished:
                return []
            self.changed.clear()
            await self.changed.wait()
        deltas = list(self.ready)
        self.ready.clear()
        return deltas

    def put(self, prompt: int, delta: Delta, now: float) -> None:
        if delta.finish_reason in (REFUSED, FAILED):
            kind = BadRequest if delta.finish_reason == REFUSED else EngineFailed
            self.fail(kind(str(delta.stop_reason)))
            return
        number = prompt * self.n + delta.sample
        sample = self.samples[number]
        if sample.first is None:
            sample.first, sample.started, sample.cached = now, delta.started, delta.cached
        sample.last, sample.tokens = now, sample.tokens + len(delta.token_ids)
        sample.finish_reason = delta.finish_reason
        sample.drafted, sample.accepted = delta.drafted, delta.accepted
        self.unfinished -= delta.finish_reason is not None
        self.ready.append((number, delta))
        self.changed.set()

    def fail(self, failure: Refusal) -> None:
        """End it: the reader gets what has come, then this. The first failure is the one that
        counts.
        """
        if self.failure is None and self.unfinished:
            self.failure = failure
            self.changed.set()
