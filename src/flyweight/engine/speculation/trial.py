"""Whether guesses of a model or a head pay: measured for each request, and given up where they do
not.

A step with such guesses takes longer than one without, by what guessing and checking cost, and
gives more tokens, by how many are right:

    gain = tokens of a step with guesses · seconds of a step without / seconds of one with

Both times are those of steps of as many sequences. Without guesses none was measured at first, so
the first request goes without. A request that loses after a few steps is given up for good, since a
head that did not follow some steps cannot go on. Where requests lost of late, few are tried.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from flyweight.engine.request import Request
from flyweight.engine.speculation.lengths import size_of

LEAST_STEPS = 6  # of a request, before it is judged
FADE = 0.95  # of what an older step says
RETRY = 4  # where guesses did not pay of late, one request in so many is tried
RECENT = 0.3  # what a request says about the next ones
LATEST = 16  # steps whose times are remembered


@dataclass
class Tried:
    """What steps with guesses gave a request, the latest counting most."""

    steps: float = 0.0
    tokens: float = 0.0
    times: int = 0

    def observe(self, tokens: int) -> None:
        self.steps = FADE * self.steps + 1
        self.tokens = FADE * self.tokens + tokens
        self.times += 1


class Times:
    """Seconds of steps by their sequences: the middle of the latest."""

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}

    def learn(self, seconds: float, sequences: int) -> None:
        self.samples.setdefault(size_of(sequences), deque(maxlen=LATEST)).append(seconds)

    def of(self, sequences: int) -> float | None:
        """As of the next smaller number where that one was not seen; None: nothing is known."""
        known = [size for size in self.samples if size <= size_of(sequences)]
        return statistics.median(self.samples[max(known)]) if known else None


class Trial:
    def __init__(self) -> None:
        self.without = Times()
        self.guessed = Times()
        self.tried: dict[int, Tried] = {}
        self.recent = 1.0  # gain of requests of late
        self.passed_over = 0

    def begins(self, request: Request, sequences: int) -> bool:
        """Whether this request is tried: asked once, when its answer begins."""
        if self.without.of(sequences) is None:
            return False
        if self.recent < 1:
            self.passed_over += 1
            if self.passed_over % RETRY:
                return False
        self.tried[request.number] = Tried()
        return True

    def learn(self, seconds: float, sequences: int, *, guessed: bool) -> None:
        """A step of so many sequences, all of them with guesses or all without."""
        (self.guessed if guessed else self.without).learn(seconds, sequences)

    def observe(self, request: Request, accepted: int) -> None:
        if (tried := self.tried.get(request.number)) is not None:
            tried.observe(1 + accepted)

    def gain(self, request: Request, sequences: int) -> float | None:
        """None: too little is known."""
        tried = self.tried.get(request.number)
        without = self.without.of(sequences)
        guessed = self.guessed.of(sequences)
        if tried is None or tried.times < LEAST_STEPS or without is None or guessed is None:
            return None
        return tried.tokens / tried.steps * without / guessed

    def pays(self, request: Request, sequences: int) -> bool:
        gain = self.gain(request, sequences)
        return gain is None or gain >= 1

    def forget(self, request: Request, sequences: int) -> None:
        """It is over, or given up."""
        gain = self.gain(request, sequences)
        self.tried.pop(request.number, None)
        if gain is not None:
            self.recent += RECENT * (gain - self.recent)
