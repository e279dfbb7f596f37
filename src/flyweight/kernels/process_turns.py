"""Turns of processes on one GPU under MPS.

MPS runs kernels of several processes at the same time. Two kernels that each wait for blocks of
their own launch could then hold a part of the SMs each, and wait for ever. So under MPS a process
holds a lock on the GPU from the launch of a step to its end. Kernels of other programs end by
themselves, and need no lock. Without MPS the GPU itself gives each process its time.

Two locks make the turns fair: who waits for the GPU holds the door, so that whoever comes out of it
queues behind.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO


class ProcessTurns:
    def __init__(self, name: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir())
        self._door = _open(folder / f"flyweight-{name}-door.lock")
        self._room = _open(folder / f"flyweight-{name}.lock")

    def begin(self) -> None:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        fcntl.flock(self._door, fcntl.LOCK_UN)

    def end(self) -> None:
        """The kernel lets go by itself of what a process held that died."""
        fcntl.flock(self._room, fcntl.LOCK_UN)


def _open(path: Path) -> IO[bytes]:
    """For all users: MPS may serve several."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "r+b")
