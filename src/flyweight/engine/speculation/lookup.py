"""Guesses from earlier text where there are any, else those of another drafter.

What an answer quotes is copied better than it is guessed: a match of n-grams costs no step of a
model or a head, is right more often, and gives more guesses at once. Between matches the other one
guesses. A head follows every step whoever guessed in it, and a model catches up with what it has
not seen, so neither has to be told. With a trial the other one guesses for as long as that pays,
and as much as pays; what is left then is n-grams as they are alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flyweight.engine.request import Request
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.trial import Trial
from flyweight.engine.work import Work

LEAST = 3  # tokens that must agree: two are less sure than what others guess


class LookupFirst:
    def __init__(self, other: Drafter, guesses: int, trial: Trial | None = None):
        """`guesses`: of the other, in a step, or at most. `trial`: the other guesses where and as
        much as that pays; None: everywhere.
        """
        self.lookup = NgramDrafter(LEAST)
        self.other = other
        self.guesses = guesses
        self.trial = trial
        self.met: set[int] = set()  # requests that were asked about,
        self.given_up: set[int] = set()  # and of these, those that the other does not guess for
        self.found: set[int] = set()  # requests whose latest guesses were looked up
        self.sequences = 1  # of the latest step

    @property
    def guesses_ahead(self) -> bool:
        """As n-grams do, while nobody is left for the other."""
        return self.trial is not None and self.met == self.given_up

    def warm_up(self) -> None:
        self.other.warm_up()

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        """Where a text goes on quoting, its tokens are read: what comes next may be looked up."""
        quoting = any(
            work.request.number in self.found or self.lookup.quotes(work.request) for work in works
        )
        return not quoting and self.other.guesses_unread(works)

    def expect(self, count: int) -> None:
        """That is for the other."""

    def promising(self, request: Request) -> bool:
        return self.other.promising(request)

    def propose(
        self, requests: Sequence[Request], most: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        self.sequences = len(requests)
        for request in requests:
            self._meet(request)
        found: dict[int, Sequence[int]] = {}
        if self.guesses_ahead or not any(request.pending for request in requests):
            looked_up = self.lookup.propose(requests, most).items()
            found.update((number, some) for number, some in looked_up if some)
        self.found = set(found)
        # a single token in flight is one that the other must know first
        rest = [
            request
            for request in requests
            if request.pending != 1 and request.number not in self.found | self.given_up
        ]
        if rest:
            fewer = {number: min(count, most[number]) for number, count in self._counts(rest)}
            found.update(self.other.propose(rest, fewer))
        return found

    def _counts(self, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
        """Guesses of the other, by request number. Behind guesses that nobody has read there are as
        many as of those.
        """
        count = self.guesses
        if self.trial is not None:
            count = self.trial.count(requests, self.sequences)
            self.other.expect(count)
        for request in requests:
            yield request.number, request.pending - 1 if request.pending else count

    def _meet(self, request: Request) -> None:
        if request.number in self.met:
            return
        self.met.add(request.number)
        if self.trial is not None and not self.trial.begins(request, self.sequences):
            self.release(request)

    def release(self, request: Request) -> None:
        if request.number in self.given_up:
            return
        self.met.add(request.number)
        self.given_up.add(request.number)
        self.other.release(request)
        if self.trial is not None:
            self.trial.forget(request, self.sequences)

    def learn(self, works: Sequence[Work], seconds: float) -> None:
        if self.trial is None:
            return
        numbers = {work.request.number for work in works}
        counts = {len(work.drafts) for work in works}
        if counts == {0} and numbers <= self.given_up:
            self.trial.learn(seconds, len(works), 0)
        elif len(counts) == 1 and not numbers & (self.found | self.given_up):
            self.trial.learn(seconds, len(works), counts.pop())

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        number = request.number
        if number in self.found:
            self.lookup.observe(request, drafts, accepted)
            return
        self.other.observe(request, drafts, accepted)
        if self.trial is None or number in self.given_up:
            return
        self.trial.observe(request, len(drafts), accepted)
        if not self.trial.pays(request, self.sequences):
            self.release(request)

    def forget(self, request: Request) -> None:
        self.found.discard(request.number)
        self.met.discard(request.number)
        self.given_up.discard(request.number)
        self.lookup.forget(request)
        self.other.forget(request)
        if self.trial is not None:
            self.trial.forget(request, self.sequences)
