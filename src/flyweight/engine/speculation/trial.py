"""Whether guesses of a model or a head pay, and how many: measured as they are made, and given up
for a request where they do not.

A step with guesses takes longer than one without, by what guessing and checking cost, and gives
more tokens, by how many are right. With a the chance of a request's guess, k guesses bring

    gain = (1 + a + … + aᵏ) · seconds of a step without / seconds of one with k

Times are those of steps of as many sequences, whichever requests they were for; every k is tried at
first. The chance is a request's own. Without guesses no time was measured at first: a step is tried
out where that can be done on the side, else the first request goes without. A request that loses
with every k is given up for good, since a head that did not follow some steps cannot go on. What
one loses says little of the next, which may be about something else: only where several lost one
after the other some go without a trial.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from flyweight.engine.request import Request
from flyweight.engine.speculation.lengths import Chance, expected, size_of

LEAST_STEPS = 8  # of a request, before it is given up
SEEN = 6  # steps with so many guesses, before their time is known
FADE = 0.97  # of what an older step says about the chance
BETTER = 1.03  # so much faster another number of guesses must be: the change costs a wait
RETRY = 4  # where guesses never pay, one request in so many is tried
LATEST = 16  # steps whose times are remembered


class Times:
    """Seconds of steps by their sequences: the middle of the latest."""

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}

    def learn(self, seconds: float, sequences: int) -> None:
        self.samples.setdefault(size_of(sequences), deque(maxlen=LATEST)).append(seconds)

    def seen(self, sequences: int) -> int:
        return len(self.samples.get(size_of(sequences), ()))

    def of(self, sequences: int) -> float | None:
        """As of the next smaller number where that one was not seen; None: nothing is known."""
        known = [size for size in self.samples if size <= size_of(sequences)]
        return statistics.median(self.samples[max(known)]) if known else None


class Trial:
    def __init__(self, most: int, try_out: Callable[[int], float | None] = lambda _: None) -> None:
        """`most`: guesses in a step; `try_out`: seconds of a step without any of so many sequences,
        or None.
        """
        self.try_out = try_out
        self.without = Times()
        self.guessed = {count: Times() for count in range(1, most + 1)}
        self.chances: dict[int, Chance] = {}
        self.latest = most  # guesses in a step
        self.losses = 0  # requests that lost, one after the other
        self.passed_over = 0

    def begins(self, request: Request, sequences: int) -> bool:
        """Whether this request is tried: asked once, when its answer begins."""
        if self.without.of(sequences) is None:
            if (seconds := self.try_out(sequences)) is None:
                return False
            self.without.learn(seconds, sequences)
        if self.losses:
            self.passed_over += 1
            if self.passed_over % min(self.losses, RETRY):
                return False
        self.chances[request.number] = Chance()
        return True

    def learn(self, seconds: float, sequences: int, guesses: int) -> None:
        """A step of so many sequences, all of them with as many guesses; 0: without."""
        times = self.guessed.get(guesses) if guesses else self.without
        if times is not None:
            times.learn(seconds, sequences)

    def observe(self, request: Request, guesses: int, accepted: int) -> None:
        if (chance := self.chances.get(request.number)) is not None:
            chance.observe(guesses, accepted, fade=FADE)

    def count(self, requests: Sequence[Request], sequences: int) -> int:
        """Guesses for each of these in their next step, which has so many sequences: as many as
        bring the most tokens a second, or as are not known yet.
        """
        alone = len(requests) == sequences  # nobody beside them goes without
        chances = [self.chances.get(request.number, Chance()).value for request in requests]
        rates: dict[int, float] = {}
        for count, times in reversed(self.guessed.items()):
            seconds = times.of(sequences)
            if seconds is None or (alone and times.seen(sequences) < SEEN):
                self.latest = count
                return count
            rates[count] = sum(expected(chance, count) for chance in chances) / seconds
        best = max(rates, key=lambda count: rates[count])
        if rates[best] > BETTER * rates[self.latest]:
            self.latest = best
        return self.latest

    def gain(self, request: Request, sequences: int) -> float | None:
        """With the best number of guesses; None: too little is known."""
        chance = self.chances.get(request.number)
        without = self.without.of(sequences)
        if chance is None or not chance.steps or without is None:
            return None
        gains = []
        for count, times in self.guessed.items():
            if (seconds := times.of(sequences)) is None:
                return None
            gains.append(expected(chance.value, count) * without / seconds)
        return max(gains)

    def pays(self, request: Request, sequences: int) -> bool:
        chance = self.chances.get(request.number)
        if chance is None or chance.steps < LEAST_STEPS:
            return True
        gain = self.gain(request, sequences)
        return gain is None or gain >= 1

    def forget(self, request: Request, sequences: int) -> None:
        """It is over, or given up."""
        gain = self.gain(request, sequences)
        self.chances.pop(request.number, None)
        if gain is not None:
            self.losses = self.losses + 1 if gain < 1 else 0
