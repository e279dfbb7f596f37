"""How many guesses a request gets in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flyweight.engine.request import Request

MOST_ROWS = 64  # of a step, guesses counted: beyond, a step costs about what its rows cost


class Lengths(Protocol):
    def most(self, requests: Sequence[Request]) -> Mapping[int, int]:
        """By request number, the most guesses that pay in the next step; 0: none."""

    def observe(self, request: Request, drafted: int, accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


class Fixed:
    """As many as was asked for, as long as the step stays small."""

    def __init__(self, count: int):
        self.count = count

    def most(self, requests: Sequence[Request]) -> Mapping[int, int]:
        room = MOST_ROWS // max(1, len(requests)) - 1
        return dict.fromkeys((request.number for request in requests), max(0, min(self.count, room)))

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
