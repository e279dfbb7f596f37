"""Buffers that kernels share from launch to launch: packed inputs, partial sums, flags, tickets,
dequantized weights.

They belong to an engine, because its launches follow each other on one stream: `with workspace:`
makes one current for the thread, and kernels take their buffers from `current()`. Two engines
therefore never share one. Code without an engine (tests, benchmarks of single kernels) has a
workspace for each device and thread. Buffers are never freed or moved while the workspace lives:
captured graphs hold their addresses.

Some kernels wait for other thread blocks of their own launch, and rely on all of them being on the
GPU at once. A second engine's blocks could take their places, and each would wait for ever. So
workspaces of engines take turns on a device: the launches inside one `with` begin when those of the
one before have ended on the device. Nothing waits on the host, and an engine alone notices nothing.
Engines of several processes under MPS take turns, too, and there the host does wait
(`process_turns.py`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flyweight import gpu, gpu_share

if TYPE_CHECKING:
    from flyweight.kernels.process_turns import ProcessTurns

MOST_PROCESSORS = 1024


class Turns:
    """Of the engines on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.members: weakref.WeakSet[Workspace] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._processes = _process_turns(device)
        self._last: weakref.ref[Workspace] | None = None
        self._ended: torch.cuda.Event | None = None

    def begin(self, workspace: Workspace) -> None:
        self._lock.acquire()
        if self._processes is not None:
            self._processes.begin()
        before = self._last and self._last()
        if before is not None and before is not workspace:
            if self._ended is None:  # it was alone until now
                torch.cuda.synchronize(self.device)
            else:
                torch.cuda.current_stream(self.device).wait_event(self._ended)

    def end(self, workspace: Workspace) -> None:
        self._last = weakref.ref(workspace)
        self._ended = None
        if len(self.members) > 1:
            self._ended = torch.cuda.Event()
            self._ended.record(torch.cuda.current_stream(self.device))
        if self._processes is not None:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self.device).synchronize()
            self._processes.end()
        self._lock.release()


def _process_turns(device: torch.device) -> ProcessTurns | None:
    """Under MPS, which runs kernels of several processes at the same time."""
    if device.type != "cuda" or not gpu_share.of(device.index or 0).mps:
        return None
    from flyweight.kernels.process_turns import ProcessTurns  # not on Windows

    return ProcessTurns(str(torch.cuda.get_device_properties(device).uuid))


@functools.cache
def _turns(device: torch.device) -> Turns:
    return Turns(device)


class Workspace:
    """`shared_device`: an engine's, which takes turns with those of other engines."""

    def __init__(self, device: torch.device, *, shared_device: bool = False) -> None:
        self.device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._dequantized: list[list[Tensor]] = [[], []]
        self._turn = 0
        self._turns: Turns | None = None
        if shared_device and device.type == "cuda" and not gpu.is_pretended():
            index = torch.cuda.current_device() if device.index is None else device.index
            self._turns = _turns(torch.device("cuda", index))
            self._turns.members.add(self)

    def __enter__(self) -> Workspace:
        if self._turns is not None and self not in _stack():
            self._turns.begin(self)
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()
        if self._turns is not None and self not in _stack():
            self._turns.end(self)

    def bytes(self, name: str, size: int) -> Tensor:
        """Zeroed bytes; sizes are rounded up to powers of two, each of which has a buffer of its
        own.
        """
        rounded = 1 << (max(size, 1024) - 1).bit_length()
        return self._held(
            name, rounded, lambda: torch.zeros(rounded, dtype=torch.uint8, device=self.device)
        )

    def mailbox(self, words: int) -> Tensor:
        """Where CTAs hand partial sums to each other. All ones (empty) before each launch and after
        it.
        """
        rounded = 1 << max(16, (words - 1).bit_length())
        return self._held(
            "mailbox",
            rounded,
            lambda: torch.full((rounded,), -1, dtype=torch.int32, device=self.device),
        )

    def tickets(self) -> Tensor:
        """Two numbers for each SM: which linear's turn it is to fetch weights ahead (`await_turn`
        in cuda/turns.cuh).
        """
        words = 2 * MOST_PROCESSORS
        return self._held(
            "tickets", words, lambda: torch.zeros(words, dtype=torch.int32, device=self.device)
        )

    def counter(self, name: str, words: int = 1) -> Tensor:
        """Zero between launches."""
        return self._held(
            name, words, lambda: torch.zeros(words, dtype=torch.int32, device=self.device)
        )

    def dequantized(self, count: int, dtype: torch.dtype, *, ahead: bool = False) -> Tensor:
        """The one place for weights that are written out in 16 bits; what it held before is gone.
        It grows as needed, and what it was before stays. `ahead`: written while the product before
        may still read what was written for it; so there are two such places, used by turns.
        """
        size = count * dtype.itemsize
        if ahead:
            self._turn ^= 1
        held = self._dequantized[self._turn if ahead else 0]
        if not held or held[-1].nbytes < size:
            held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return held[-1][:size].view(dtype)

    def _held(self, name: str, size: int, make: Callable[[], Tensor]) -> Tensor:
        found = self._buffers.get((name, size))
        if found is None:
            found = self._buffers[name, size] = make()
        return found


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Workspace] = []
        self.own: dict[torch.device, Workspace] = {}


_thread = _Thread()


def _stack() -> list[Workspace]:
    return _thread.stack


def current(device: torch.device) -> Workspace:
    """The engine's whose launches these are, or else the thread's own for the device."""
    for workspace in reversed(_thread.stack):
        if workspace.device == device:
            return workspace
    found = _thread.own.get(device)
    if found is None:
        found = _thread.own[device] = Workspace(device)
    return found
