"""Answers and prompts take turns: how many tokens of prompts run between two steps of answers.

Where decode steps are captured, a step of answers is one launch of kernels made for it, and a step
of prompts is a captured pass of a size that comes again. A pass of both would be slower than the
two, and of a new kind with every number of answers.

A reader sees a pass as a longer gap between two tokens. One long gap among many short ones is what
is noticed, so prompts come in small passes, and in most steps, rather than in few large ones: as
large as it takes to read all that waits within `SECONDS`, up to `MOST` tokens. Where even that is
too little and first tokens would be later than `SECONDS_AT_MOST`, passes grow beyond it.

The numbers were chosen by playing recorded arrivals against measured times of steps;
docs/serve.md has what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

SECONDS = 0.25
SECONDS_AT_MOST = 0.8
FEWEST = 64  # tokens: a smaller pass takes hardly less time
MOST = 512  # a larger one takes hardly less for a token
NEW = 0.1  # the weight of the latest gap in the moving average
LONGEST = 0.1  # seconds: longer gaps are of steps that were prepared for the first time


class Turns:
    def __init__(self, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter):
        self.sizes = sizes  # of passes, in rising order: smaller ones are padded
        self.clock = clock
        self.prompts_next = False  # whose turn it is
        self.gap_seconds = 0.01  # between two steps of answers
        self.answered: float | None = None  # when the last one was scheduled

    def answer(self) -> None:
        """A step of answers is scheduled."""
        now = self.clock()
        if self.answered is not None:
            gap = min(LONGEST, now - self.answered)
            self.gap_seconds += NEW * (gap - self.gap_seconds)
        self.answered = now

    def rest(self) -> None:
        """Nobody answers, so that the next gap is none."""
        self.answered = None

    def tokens(self, waiting: int) -> int:
        """Of the next pass of prompts, if so many are not computed yet."""
        wanted = min(max(FEWEST, waiting * self.gap_seconds / SECONDS), MOST)
        wanted = max(wanted, waiting * self.gap_seconds / SECONDS_AT_MOST)
        return next((size for size in self.sizes if size >= wanted), int(wanted))
