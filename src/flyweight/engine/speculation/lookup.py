"""Guesses from earlier text where there are any, else those of another drafter.

What an answer quotes is copied better than it is guessed: a match of n-grams costs no step of a
model or a head, is right more often, and gives more guesses at once. Between matches the other one
guesses. A head follows every step whoever guessed in it, and a model catches up with what it has
not seen, so neither has to be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyweight.engine.request import Request
from flyweight.engine.scheduler import Work
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.ngram import NgramDrafter

LEAST = 3  # tokens that must agree: two are less sure than what others guess


class LookupFirst:
    guesses_ahead = False

    def __init__(self, other: Drafter, guesses: int):
        """`guesses`: of the other, in a step."""
        self.lookup = NgramDrafter(LEAST)
        self.other = other
        self.guesses = guesses
        self.found: set[int] = set()  # requests whose latest guesses were looked up

    def warm_up(self) -> None:
        self.other.warm_up()

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        """Where a text goes on quoting, its tokens are read: what comes next may be looked up."""
        quoting = any(
            work.request.number in self.found or self.lookup.quotes(work.request) for work in works
        )
        return not quoting and self.other.guesses_unread(works)

    def promising(self, request: Request) -> bool:
        return self.other.promising(request)

    def propose(
        self, requests: Sequence[Request], most: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        found: dict[int, Sequence[int]] = {}
        if not any(request.pending for request in requests):
            looked_up = self.lookup.propose(requests, most).items()
            found.update((number, some) for number, some in looked_up if some)
        self.found = set(found)
        rest = [request for request in requests if request.number not in found]
        if rest:
            fewer = {request.number: min(self.guesses, most[request.number]) for request in rest}
            found.update(self.other.propose(rest, fewer))
        return found

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        by_lookup = request.number in self.found
        drafter: Drafter = self.lookup if by_lookup else self.other
        drafter.observe(request, drafts, accepted)

    def forget(self, request: Request) -> None:
        self.found.discard(request.number)
        self.lookup.forget(request)
        self.other.forget(request)
