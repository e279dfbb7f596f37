"""What a drafter is: whoever guesses the next tokens of running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flyweight.engine.request import Request
from flyweight.engine.work import Work


class Drafter(Protocol):
    """Guesses are free to be wrong: an answer never depends on them (verify.py)."""

    @property
    def guesses_ahead(self) -> bool:
        """Whether it goes on from a token in flight (`Request.pending`)."""

    def warm_up(self) -> None:
        """Prepare what takes long ahead of the first request."""

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        """Whether it has guesses, on the device, for a step like this one with guesses right behind
        it, before anybody knows which of these were right.
        """

    def expect(self, count: int) -> None:
        """No more than so many guesses will be asked for in the next step."""

    def promising(self, request: Request) -> bool:
        """Whether it may have a guess once the tokens in flight are known. Cheap: asked every step,
        before they are.
        """

    def propose(
        self, requests: Sequence[Request], most: Mapping[int, int]
    ) -> Mapping[int, Sequence[int]]:
        """By request number, what comes after its last token: at most `most[number]` guesses, which
        is at least one. Where it `guesses_ahead`, that token may still be in flight.
        """

    def release(self, request: Request) -> None:
        """Nobody wants guesses for it any more."""

    def learn(self, works: Sequence[Work], seconds: float) -> None:
        """A step of these answers, and nothing else, took so long."""

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        """So many of its guesses were right."""

    def forget(self, request: Request) -> None:
        """The request is over; its tokens are all there."""
