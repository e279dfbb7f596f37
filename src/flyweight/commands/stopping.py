"""Signals that stop an answer and not the program: what has been made is kept."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible(*signals: int) -> Iterator[list[int]]:
    """A signal (Ctrl-C unless others are named) fills the list instead of raising.

    So a step is never torn in the middle. The second signal of a kind acts as it did before:
    whoever cannot wait for the end of a step presses Ctrl-C twice.
    """
    stopped: list[int] = []
    numbers = signals or (signal.SIGINT,)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, _: object) -> None:
        stopped.append(number)
        signal.signal(number, before[number])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
