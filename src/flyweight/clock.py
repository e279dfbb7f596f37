"""The one clock, and what is written down by it: when the tokens of an answer came, and when a
batch began and ended.

Backends fill these in; what is made of the times is decided in `bench/timing.py` alone.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

Chunk = tuple[float, int]  # (seconds of the clock, tokens)
clock = time.perf_counter


@dataclass(frozen=True)
class Answer:
    """One request: when it was due and sent, every chunk with tokens, and the tokens where they are
    known.
    """

    arrival: float  # scheduled
    chunks: tuple[Chunk, ...]
    token_ids: tuple[int, ...] = ()
    sent: float | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def first(self) -> float:
        return self.chunks[0][0]

    @property
    def last(self) -> float:
        return self.chunks[-1][0]

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def ttft_sent(self) -> float:
        return self.first - (self.arrival if self.sent is None else self.sent)

    @property
    def tpot(self) -> float | None:
        later = self.tokens - self.chunks[0][1]
        return (self.last - self.first) / later if later > 0 else None

    @property
    def gaps(self) -> list[float]:
        times = [when for when, _ in self.chunks]
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True)
class Run:
    """A batch handed over at `begin` and complete at `end`."""

    begin: float
    end: float
    answers: tuple[Answer, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def window(self) -> tuple[float, int] | None:
        """(seconds, tokens) in which the whole batch is decoding: last first token → first finish;
        None where there is none.
        """
        begin = max(answer.first for answer in self.answers)
        end = min(answer.last for answer in self.answers)
        tokens = sum(
            count for answer in self.answers for when, count in answer.chunks if begin < when <= end
        )
        return (end - begin, tokens) if end > begin and tokens else None
