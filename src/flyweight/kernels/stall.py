"""Which kernel waited in vain for its own thread blocks.

Some kernels wait for other blocks of their launch (cuda/patience.cuh). Such a wait ends after ten
seconds in a trap, which the driver reports as a failed launch of nothing in particular, and after
which nothing on the device can be read. So each module that has such waits gets the address of a
word in the host's memory, and writes to it before the trap.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from flyweight.errors import FlyweightError

SYMBOL = b"stalled"
SLOTS = 8192  # modules of a process; further ones trap without a name
WORD = 4


class KernelStalled(FlyweightError):
    """A kernel gave up waiting; the device is of no further use to this process."""


class Slots:
    """Words in pinned memory that the device writes to, one for each module."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._lock = threading.Lock()
        self.names: list[str] = []
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        # the last two words hold an address on its way to the device
        _, self.address = driver.cuMemHostAlloc(WORD * (SLOTS + 2), flags)
        ctypes.memset(self.address, 0, WORD * (SLOTS + 2))
        none_of_torchs = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        _, self._stream = driver.cuStreamCreate(none_of_torchs)

    def give(self, variable: Any, name: str) -> None:
        """Make a module's variable point to a word of its own."""
        with self._lock:
            if len(self.names) == SLOTS:
                return
            place = self.address + WORD * SLOTS
            ctypes.c_uint64.from_address(place).value = self.address + WORD * len(self.names)
            self.names.append(name)
            self._copy(variable, place)

    def _copy(self, variable: Any, place: int) -> None:
        """Also while torch captures a graph, which forbids most calls to the thread that does."""
        driver = self._driver
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        driver.cuMemcpyHtoDAsync(variable, place, 8, self._stream)
        driver.cuStreamSynchronize(self._stream)
        driver.cuThreadExchangeStreamCaptureMode(before)

    def found(self) -> list[str]:
        """The modules whose words were written."""
        words = (ctypes.c_uint32 * len(self.names)).from_address(self.address)
        return [
            f"{name} (thread block {word - 1})"
            for name, word in zip(self.names, words, strict=True)
            if word
        ]


_slots: Slots | None = None


@functools.cache
def _make() -> Slots:
    global _slots
    _slots = Slots()
    return _slots


def watch(library: Any, name: str) -> bool:
    """Let the kernels of a loaded library tell where they wait in vain; whether they may wait at
    all.
    """
    from cuda.bindings import driver

    status, variable, _ = driver.cuLibraryGetGlobal(library, SYMBOL)
    if status != driver.CUresult.CUDA_SUCCESS:
        return False
    _make().give(variable, name)
    return True


def stalled() -> list[str]:
    """The kernels of this process that gave up; needs no working device."""
    return [] if _slots is None else _slots.found()


def explain(error: BaseException) -> BaseException:
    """`error`, or what lies behind it where a kernel gave up."""
    names = stalled()
    if not names:
        return error
    return KernelStalled(
        f"{', '.join(names)} waited ten seconds for other thread blocks of its launch: something "
        "else holds a part of the GPU (another process under MPS?); `flyweight doctor` says what"
    )
