"""How many guesses a request gets in a step: as many as was asked for, or as many as pay.

What pays is measured. With a the chance that a guess is right, k guesses bring 1 + a + a² + … + aᵏ
tokens, and a step of so many rows takes what such steps took lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flyweight.engine.request import Request

MOST_ROWS = 64  # of a step, guesses counted: beyond, a step costs about what its rows cost
MOST_GUESSES = 7  # rows of one sequence are eight in a captured step
SAMPLES = 8  # steps of one size that are remembered
# times the shortest step: one that was compiled or captured first, which says nothing of the next
ABSURD = 20
WORTH = 1.02  # so much faster must speculation be than none
FADE = 0.9  # of what an older step says about the chance
PRIOR = (2.0, 3.0)  # right guesses of so many, of a request that nothing is known of


class Lengths(Protocol):
    most_sequences: int  # beside more than so many nobody gets a guess

    def most(self, requests: Sequence[Request]) -> Mapping[int, int]:
        """By request number, the most guesses that pay in the next step; 0: none."""

    def learn(self, seconds: float, rows: int) -> None:
        """A step of so many rows, and nothing else, took so long."""

    def observe(self, request: Request, drafted: int, accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


class Fixed:
    """As many as was asked for, as long as the step stays small."""

    most_sequences = MOST_ROWS // 2

    def __init__(self, count: int):
        self.count = count

    def most(self, requests: Sequence[Request]) -> Mapping[int, int]:
        room = MOST_ROWS // max(1, len(requests)) - 1
        return dict.fromkeys(
            (request.number for request in requests), max(0, min(self.count, room))
        )

    def learn(self, seconds: float, rows: int) -> None:
        pass

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


@dataclass
class Chance:
    """That a guess for one request is right, from the latest ones."""

    right: float = 0.0
    tried: float = 0.0
    steps: int = 0

    @property
    def value(self) -> float:
        return (self.right + PRIOR[0]) / (self.tried + PRIOR[1])

    def fade(self, by: float) -> None:
        self.right *= by
        self.tried *= by

    def observe(self, drafted: int, accepted: int, *, fade: float = FADE) -> None:
        self.fade(fade)
        self.right += accepted
        self.tried += min(drafted, accepted + 1)  # those behind a wrong one say nothing
        self.steps += 1


class StepTimes:
    """Seconds of steps by their rows. The shortest of the latest counts: what makes one longer is
    seldom its rows.
    """

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}

    def learn(self, seconds: float, rows: int) -> None:
        known = [min(samples) for samples in self.samples.values()]
        if not known or seconds < ABSURD * min(known):
            self.samples.setdefault(size_of(rows), deque(maxlen=SAMPLES)).append(seconds)

    def of(self, rows: int) -> float:
        """Of a size that was never run: as of the next smaller one, so that it is tried; 1 where
        nothing is known.
        """
        known = [size for size in self.samples if size <= size_of(rows)]
        return min(self.samples[max(known)]) if known else 1.0


def size_of(rows: int) -> int:
    """Steps of 1 to 8 rows each for themselves, larger ones by powers of two."""
    return rows if rows <= 8 else 1 << (rows - 1).bit_length()


class Measured:
    """As many guesses as make the most tokens a second."""

    most_sequences = MOST_ROWS // 2

    def __init__(self) -> None:
        self.times = StepTimes()
        self.chances: dict[int, Chance] = {}

    def most(self, requests: Sequence[Request]) -> Mapping[int, int]:
        chances = [self.chances.setdefault(request.number, Chance()) for request in requests]
        best, best_rate = 0, WORTH * len(requests) / self.times.of(len(requests))
        for count in range(1, min(MOST_GUESSES, MOST_ROWS // max(1, len(requests)) - 1) + 1):
            rate = sum(expected(chance.value, count) for chance in chances) / self.times.of(
                len(requests) * (1 + count)
            )
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0:  # what is known grows old, so that guessing is tried again
            for chance in chances:
                chance.fade(0.99)
        return dict.fromkeys((request.number for request in requests), best)

    def learn(self, seconds: float, rows: int) -> None:
        self.times.learn(seconds, rows)

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        self.chances.setdefault(request.number, Chance()).observe(drafted, accepted)

    def forget(self, request: Request) -> None:
        self.chances.pop(request.number, None)


def expected(chance: float, count: int) -> float:
    """Tokens of a step with so many guesses."""
    return sum(chance**i for i in range(count + 1))
