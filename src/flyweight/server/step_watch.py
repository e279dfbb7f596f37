"""A thread beside the engine's step loop that notices a step which does not come to an end.

A kernel that never ends leaves the loop waiting for the device, and nothing in it can say so. This
thread can: torch and the driver let other threads run while they wait. Within its patience it
tells the server that the engine is at work, so that a long step is no silence; after that it
reports where every thread stands and which kernels gave up, and ends the process. The server starts
another. Compiling a kernel is progress, however long the step takes.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

LOOKS = 4  # within the patience
SLOWEST = (
    10  # times the longest warm-up on a CPU: a step may take so long before it is called a hang
)
HUNG = 70  # exit code: an internal error, as sysexits.h has it


def patience_for(patience: float, warm_up_seconds: float) -> float:
    """Steps of a slow CPU are slow, and no hang."""
    return max(patience, SLOWEST * warm_up_seconds)


class StepWatch:
    """`progress` is any number that changes while a step gets on. `on_alive` is told at each look
    within the patience, `on_hang(seconds)` once after it.
    """

    def __init__(
        self,
        patience: float,
        *,
        progress: Callable[[], int],
        on_alive: Callable[[], None],
        on_hang: Callable[[float], None],
    ) -> None:
        self.patience = patience
        self.progress = progress
        self.on_alive = on_alive
        self.on_hang = on_hang
        self.begun: float | None = None  # None: between steps
        self.seen = 0
        self.over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="flyweight-watch").start()

    def stop(self) -> None:
        self.over.set()

    def begin(self) -> None:
        self.begun = time.monotonic()

    def end(self) -> None:
        self.begun = None

    def look(self, now: float) -> None:
        begun = self.begun
        if begun is None:
            return
        seen = self.progress()
        if seen != self.seen:
            self.seen = seen
            self.begun = now
        elif now - begun > self.patience:
            self.on_hang(now - begun)
            return
        self.on_alive()

    def _run(self) -> None:
        while not self.over.wait(self.patience / LOOKS):
            self.look(time.monotonic())


def describe(seconds: float) -> str:
    """The report of a step that hangs, in one line; where every thread stands goes to stderr."""
    from flyweight.kernels.stall import stalled

    names = stalled()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    cause = f"; gave up waiting: {', '.join(names)}" if names else ""
    return f"a step made no progress for {seconds:.0f} seconds{cause}"


def end_process() -> None:
    """At once: what would be cleaned up waits for the device, too."""
    sys.stderr.flush()
    os._exit(HUNG)
