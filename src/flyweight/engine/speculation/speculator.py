"""Between the engine and a drafter: which requests get guesses, how many, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flyweight.engine.request import Request, State
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.lengths import (
    MOST_GUESSES,
    Fixed,
    Lengths,
    Measured,
    StepTimes,
)
from flyweight.engine.speculation.lookup import LookupFirst
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.trial import Trial
from flyweight.engine.work import Work


class Speculator:
    def __init__(self, drafter: Drafter, lengths: Lengths):
        self.drafter = drafter
        self.lengths = lengths
        self.drafted = 0  # guesses that were checked
        self.accepted = 0  # of those, the right ones
        self.steps = 0  # sequences that had guesses in a step, over all steps
        self.seconds = 0.0  # spent on guessing
        self.times = StepTimes()
        self.gap = 0.0  # seconds of the host between a step's tokens and the next launch
        self.token_seconds = 0.0  # of a sequence's token, over all steps of late
        self.goes_on = 0.5  # how often guesses were followed by more of them, of late
        self._was_checked = False

    def figures(self) -> dict[str, float]:
        """Since the start, for those who measure: means over the steps in which a sequence had
        guesses.
        """
        steps = max(1, self.steps)
        return {
            "acceptance_length": 1 + self.accepted / steps,
            "acceptance_rate": self.accepted / max(1, self.drafted),
            "speculated_steps": self.steps,
            "draft_ms": 1000 * self.seconds / steps,
        }

    def restart(self) -> None:
        """Count from here on."""
        self.drafted = self.accepted = self.steps = 0
        self.seconds = 0.0

    def promising(self, running: Sequence[Request]) -> bool:
        """Whether anybody may have a guess once the step in flight is read."""
        begin = time.perf_counter()
        requests = [request for request in running if may_guess(request)]
        rooms = self.lengths.most(requests)
        found = any(
            rooms[request.number] and self.drafter.promising(request) for request in requests
        )
        self.seconds += time.perf_counter() - begin
        return found

    def propose(self, running: Sequence[Request]) -> dict[int, Sequence[int]]:
        """Guesses by request number; requests without any are left out."""
        if len(running) > self.lengths.most_sequences:
            for request in running:
                self.drafter.release(request)
            return {}
        begin = time.perf_counter()
        requests = [request for request in running if may_guess(request)]
        rooms = self.lengths.most(requests)
        most = {}
        wanting = []
        for request in requests:
            room = min(rooms[request.number], request.limit - request.length - 1)
            if room > 0:
                most[request.number] = room
                wanting.append(request)
        drafts = self.drafter.propose(wanting, most) if wanting else {}
        found = {number: guesses for number, guesses in drafts.items() if guesses}
        if self._was_checked:
            self._was_checked = False
            self.goes_on += 0.1 * (bool(found) - self.goes_on)
        self.seconds += time.perf_counter() - begin
        return found

    def learn(self, works: Sequence[Work], seconds: float, tokens: float) -> None:
        """A step of these answers, and nothing else, took so long, and gave so many tokens a
        sequence.
        """
        rows = sum(work.count for work in works)
        self.drafter.learn(works, seconds)
        self.times.learn(seconds, rows)
        self.lengths.learn(seconds, rows)
        if tokens:
            self.token_seconds = lately(self.token_seconds, seconds / tokens, weight=tokens / 50)

    def prepared(self, seconds: float) -> None:
        """The host took so long to read a step, make guesses and launch one that checks them."""
        self.gap = lately(self.gap, seconds, weight=0.1)

    def follows(self, works: Sequence[Work]) -> bool:
        """Whether a step without guesses is launched behind this one before it is read.

        That hides what the host does then. Where more guesses would have come at once it costs a
        step for a token that they might have brought in less.
        """
        if not self.token_seconds:
            return False
        plain = self.times.of(len(works))
        return self.gap > self.goes_on * (plain - self.token_seconds)

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        self.steps += 1
        self.drafted += len(drafts)
        self.accepted += accepted
        self._was_checked = True
        self.lengths.observe(request, len(drafts), accepted)
        self.drafter.observe(request, drafts, accepted)

    def forget(self, request: Request) -> None:
        self.lengths.forget(request)
        self.drafter.forget(request)


def speculator_of(
    drafter: Drafter,
    guesses: int | None,
    *,
    while_it_pays: bool = False,
    try_out: Callable[[int], float | None] = lambda _: None,
) -> Speculator:
    """With so many guesses in a step; None: as many as pay. Guesses of a model or a head are made
    where earlier text has none; `while_it_pays`: and where they bring more than they cost, beside
    what steps without take (`try_out`: of so many sequences, where nobody knows yet).
    """
    if guesses is None:
        return Speculator(drafter, Measured())
    if isinstance(drafter, NgramDrafter):
        return Speculator(drafter, Fixed(guesses))
    trial = Trial(guesses, try_out) if while_it_pays else None
    return Speculator(LookupFirst(drafter, guesses, trial), Fixed(max(guesses, MOST_GUESSES)))


def may_guess(request: Request) -> bool:
    """Answers whose next token is free. Under a grammar every token changes what may follow, so
    those go one by one.
    """
    length = request.length
    return (
        length - request.computed == 1
        and length + 1 < request.limit
        and request.constraint is None
        and request.state is State.RUNNING
    )


def lately(mean: float, value: float, *, weight: float) -> float:
    """The mean with one more value, which counts `weight`; one that took absurdly long (steps are
    captured now and then) counts as twice the mean.
    """
    return mean + weight * (min(value, 2 * mean) - mean) if mean else value
