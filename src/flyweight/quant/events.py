"""What a run of `quantize` tells whoever listens, a live view for example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A layer solved, a block finished or run again after resuming, a step of tuning done."""

    kind: str
    block: int
    blocks: int
    layer: str = ""
    error: float = 0.0
    seconds: float = 0.0


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener for runs that nobody watches."""
