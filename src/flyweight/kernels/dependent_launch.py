"""Programmatic dependent launch inside captured graphs, for GPUs that have none (before Hopper).

A kernel that begins when the one before it has ended finds memory idle: nothing has been fetched
yet. So edges of the graph skip one kernel, and neighbours are ordered by counters in memory
(cuda/dependent_launch.cuh):

    edges       n ─────────► n+2 ─────────► n+4
                     n+1 ─────────► n+3
    counters    n ─► n+1 ─► n+2 ─► n+3 ─► n+4

Kernel n+1 is on the GPU while n runs, fills its rings with weights, and waits for n's counter
before it reads what n has written.

Why nothing waits for ever: by the edges at most two neighbours are on the GPU at once, and a kernel
joins only if there is room for all blocks of both, in whatever order the hardware takes them
(`room`). Either an SM has room for two of its thread blocks and it has at most one for each SM, or
it has at most one for every second SM, however large; neighbours are of the same kind. What follows
outside of this (another kernel, torch) depends on both, as if they were one.

Outside of captured graphs launches follow each other as always, and counters are null.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyweight.gpu import Gpu
from flyweight.kernels import imitation

# Sources whose kernels can wait for counters.
SOURCES = {
    "experts.cu",
    "experts_sum.cu",
    "gemm_mma.cu",
    "gemv.cu",
    "gemv_split.cu",
    "qkv_attention.cu",
    "route.cu",
    "token.cu",
    "vptq.cu",
}
DEFINE = {"BY_COUNTERS": 1}
WORDS = 1 << 16  # of a block of counters
WORD = 4
CAPTURING = 1  # of CUstreamCaptureStatus
REPLACE = 1  # of CUstreamUpdateCaptureDependencies_flags
# Only where it is asked for: no GPU that needs it was at hand to test it on.
enabled = os.environ.get("FLYWEIGHT_OVERLAP", "0") == "1"


def defines(file: str, device: Gpu) -> dict[str, int]:
    """What a source is compiled with besides."""
    return DEFINE if file in SOURCES and not device.has_dependent_launch else {}


class Room(enum.Enum):
    """What a launch leaves to a neighbour of its kind."""

    SHARED_PROCESSORS = "a place on every SM"
    OTHER_PROCESSORS = "every second SM"


def room(launched: imitation.Launched, device: Gpu) -> Room | None:
    """None: such a launch may not share the GPU with its neighbour."""
    blocks, processors = launched.blocks, device.processors
    if blocks <= processors and launched.resident(device) >= 2 * processors:
        return Room.SHARED_PROCESSORS
    if 2 * blocks <= processors and launched.resident(device) >= processors:
        return Room.OTHER_PROCESSORS
    return None


# -- what the driver knows of a capture ------------------------------------------------------------


@dataclass(frozen=True)
class Capture:
    """A graph in the making: what the next node would depend on."""

    number: int
    nodes: tuple[int, ...]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def capture_of(stream: int) -> Capture | None:
    """None where nothing is captured."""
    status = ctypes.c_int()
    number = ctypes.c_uint64()
    graph = ctypes.c_void_p()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    count = ctypes.c_size_t()
    places = (ctypes.byref(one) for one in (status, number, graph, nodes, count))
    failed = _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *places)
    if failed or status.value != CAPTURING:
        return None
    return Capture(number.value, tuple(int(nodes[i] or 0) for i in range(count.value)))


def depend_on(stream: int, nodes: Sequence[int]) -> None:
    """The next node of a capture depends on these alone."""
    array = (ctypes.c_void_p * len(nodes))(*nodes)
    stream_pointer = ctypes.c_void_p(stream)
    failed = _driver().cuStreamUpdateCaptureDependencies(
        stream_pointer, array, ctypes.c_size_t(len(nodes)), ctypes.c_uint(REPLACE)
    )
    if failed:
        raise RuntimeError(f"the driver's error {failed} at the edges of a graph")


# -- counters --------------------------------------------------------------------------------------


class Counters:
    """Words on a device, zero at first. Graphs hold their addresses, so none is ever given back."""

    def __init__(self) -> None:
        self._next = 0
        self._end = 0

    def take(self) -> int:
        if self._next == self._end:
            self._next = _zeroed(WORDS * WORD)
            self._end = self._next + WORDS * WORD
        self._next += WORD
        return self._next - WORD


def _zeroed(size: int) -> int:
    """Memory of the current device, also while a graph is captured, which forbids most calls."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    _, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    status, address = driver.cuMemAlloc(size)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise MemoryError(f"{size} bytes for counters of launches: {status}")
    driver.cuMemsetD32Async(address, 0, size // WORD, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuStreamDestroy(stream)
    driver.cuThreadExchangeStreamCaptureMode(before)
    return int(address)


@functools.cache
def _counters(device: int) -> Counters:
    return Counters()


# -- launches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Last:
    """The launch that a stream has captured last."""

    number: int  # of the capture
    node: int
    beside: tuple[int, ...]  # what a launch depends on that runs beside it
    left: frozenset[int]  # what was left for others to depend on
    counter: int
    room: Room


class _Streams(threading.local):
    def __init__(self) -> None:
        self.last: dict[int, Last] = {}


_streams = _Streams()


class Link:
    """Of one launch into a capture: `arguments` before it, `close` after it."""

    def __init__(self, stream: int, device: int, capture: Capture, room: Room) -> None:
        self.stream = stream
        self.room = room
        self.capture = capture
        self.own = _counters(device).take()
        before = _streams.last.pop(stream, None)
        follows = (
            before is not None
            and before.room is room
            and before.number == capture.number
            and before.left == frozenset(capture.nodes)
        )
        self.before = before if follows else None
        if self.before is not None:
            depend_on(stream, self.before.beside)

    @property
    def arguments(self) -> tuple[int, int]:
        return (0 if self.before is None else self.before.counter), self.own

    def close(self) -> None:
        now = capture_of(self.stream)
        assert now is not None and len(now.nodes) == 1
        node = now.nodes[0]
        beside = self.capture.nodes
        left: tuple[int, ...] = (node,)
        if self.before is not None:
            beside = (self.before.node,)
            left = (self.before.node, node)
            depend_on(self.stream, left)
        _streams.last[self.stream] = Last(
            self.capture.number, node, beside, frozenset(left), self.own, self.room
        )


def link(stream: int, device: int, launched: imitation.Launched, facts: Gpu) -> Link | None:
    """None where a launch follows the one before it as always."""
    left = room(launched, facts) if enabled else None
    capture = None if left is None else capture_of(stream)
    return None if left is None or capture is None else Link(stream, device, capture, left)


def launched(
    name: str, kernel: int, device: int, grid: Sequence[int], block: int, shared: int
) -> imitation.Launched:
    """What a launch asks for."""
    declared, registers = imitation.facts(kernel, device)
    return imitation.Launched(name, math.prod(grid), block, shared + declared, 1, registers)
