"""Whether what is launched is a step all of whose layers leave room: two of its kernels are on an
SM at a time, and take turns to fetch weights.

A kernel that needs an SM for itself among them would undo it: where an SM is free early, two CTAs
of the next kernel gather there and wait for each other. So it is asked of all layers at once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_running = contextvars.ContextVar("whole layers", default=False)


@contextlib.contextmanager
def run(whole: bool = True) -> Iterator[None]:
    before = _running.set(whole)
    try:
        yield
    finally:
        _running.reset(before)


def running() -> bool:
    return _running.get()
