"""Layers whose weights lie in the host's memory and come to the GPU for each step.

    host      layer 3 ─┐   layer 7 ─┐   layer 11 ─┐        pinned, one piece for each layer
    slots            [ 0 ]        [ 1 ]         [ 0 ]      on the GPU, by turns
    compute   0 1 2    3   4 5 6    7   8 9 10    11  …

Two slots on the GPU hold one such layer each. A copy on a stream of its own fills a slot while the
layers before run; compute waits for the copy, and the next copy into a slot waits until the layer
that had it is done. All tensors of a layer lie in one piece, so that a copy is one transfer. They
keep their addresses (a layer always has the same slot), so that steps can be captured in graphs,
copies and all.

What it costs is the bytes of these layers over the bus for each step (`flyweight info --offload`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from flyweight.errors import ResourceError, UnsupportedError
from flyweight.kernels import jit

SLOTS = 2
SMALLEST = 1 << 16  # bytes of a tensor that is worth moving; norms stay
ALIGNMENT = 256  # bytes, as the allocator's
DEEPEST = 8  # attributes within attributes of a layer
Layer = TypeVar("Layer")


def spread(count: int, layers: int) -> list[int]:
    """Which of the layers: evenly, so that each copy has other layers to hide behind."""
    return [(2 * i + 1) * layers // (2 * count) for i in range(count)]


def tensors_of(thing: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Every tensor that a layer holds."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if depth == 0 or isinstance(thing, (FunctionType, ModuleType, type, str, bytes)):
        return
    parts: Iterable[Any] = ()
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        parts = thing
    elif isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        parts = [thing.__self__]
    elif hasattr(thing, "__dict__"):
        parts = vars(thing).values()
    for part in parts:
        yield from tensors_of(part, depth - 1)


@dataclass
class Moved:
    """The tensors of a layer, and where in its piece the storage of each begins."""

    places: dict[int, int]  # storage → offset
    tensors: list[
        tuple[Tensor, int, torch.Size, tuple[int, ...]]
    ]  # offset in bytes, shape, strides
    host: Tensor

    @classmethod
    def of(cls, layer: Any, device: torch.device) -> Moved:
        """Copy a layer's tensors into one pinned piece, and give their memory back."""
        found = {id(one): one for one in tensors_of(layer) if one.device.type == device.type}
        large = [one for one in found.values() if one.untyped_storage().nbytes() >= SMALLEST]
        places: dict[int, int] = {}
        storages = {}
        size = 0
        for one in large:
            storage = one.untyped_storage()
            if storage.data_ptr() not in places:
                places[storage.data_ptr()] = size
                storages[storage.data_ptr()] = storage
                size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        host = _pinned(size, device)
        for address, storage in storages.items():
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            host[places[address] : places[address] + storage.nbytes()].copy_(whole)
        tensors = []
        for one in large:
            start = places[one.untyped_storage().data_ptr()]
            offset = start + int(one.storage_offset()) * one.element_size()
            tensors.append((one, offset, one.shape, one.stride()))
        for one in large:
            one.data = torch.empty(0, dtype=one.dtype, device=device)
        return cls(places, tensors, host)

    def point_to(self, slot: Tensor) -> None:
        """From here on the layer's tensors are in the slot."""
        storage = slot.untyped_storage()
        for tensor, offset, shape, strides in self.tensors:
            view = torch.empty(0, dtype=tensor.dtype, device=slot.device)
            tensor.data = view.set_(storage, offset // tensor.element_size(), shape, strides)


def _pinned(size: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise ResourceError(
            f"{size / 1e9:.2f} GB more of the host's memory cannot be pinned for a layer; offload "
            "fewer layers, or raise the limit (`ulimit -l`)"
        ) from error


@dataclass
class Offload:
    """The layers of a model that lie in the host's memory, by their place among all."""

    device: torch.device
    moved: dict[int, Moved] = field(default_factory=dict)
    slots: list[Tensor] = field(default_factory=list)
    stream: Any = None

    def take(self, place: int, layer: Any, nbytes: int) -> None:
        """Move a layer that has just been loaded. `nbytes`: what its linears say they have."""
        moved = Moved.of(layer, self.device)
        if len(moved.host) < 0.9 * nbytes:
            raise UnsupportedError(
                f"layer {place}: its kernels keep {nbytes - len(moved.host):,} bytes of weights "
                "where they cannot be moved; run it without --offload"
            )
        self.moved[place] = moved

    def finish(self) -> None:
        """Make the slots, when all layers have been taken."""
        size = max(len(one.host) for one in self.moved.values())
        count = min(SLOTS, len(self.moved))
        self.slots = [
            torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)
        ]
        for i, place in enumerate(sorted(self.moved)):
            self.moved[place].point_to(self.slots[i % count])
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)

    @property
    def nbytes(self) -> int:
        """In the host's memory."""
        return sum(len(one.host) for one in self.moved.values())

    def in_turn(self, layers: Sequence[Layer]) -> Iterator[Layer]:
        """The layers one by one, each when its weights are on the device."""
        order = [place for place in range(len(layers)) if place in self.moved]
        copies = Copies(self, order)
        for place, layer in enumerate(layers):
            if place not in self.moved:
                yield layer
                continue
            copies.await_layer(place)
            # a kernel that begins early would read weights that are not there
            with jit.overlap(False):
                yield layer
            copies.release(place)


class Copies:
    """The transfers of one step: two layers ahead of compute."""

    def __init__(self, offload: Offload, order: list[int]) -> None:
        self.offload = offload
        self.order = order
        self.arrived: dict[int, Any] = {}
        if offload.stream is not None:  # compute of the step before may still read the slots
            offload.stream.wait_stream(torch.cuda.current_stream(offload.device))
        for place in order[: len(offload.slots)]:
            self._start(place)

    def _start(self, place: int) -> None:
        offload = self.offload
        slot = offload.slots[self.order.index(place) % len(offload.slots)]
        host = offload.moved[place].host
        with _on(offload.stream):
            slot[: len(host)].copy_(host, non_blocking=True)
            if offload.stream is not None:
                self.arrived[place] = torch.cuda.Event()
                self.arrived[place].record(offload.stream)

    def await_layer(self, place: int) -> None:
        if self.offload.stream is not None:
            torch.cuda.current_stream(self.offload.device).wait_event(self.arrived.pop(place))

    def release(self, place: int) -> None:
        """The layer is done with its slot: the next one's copy may begin."""
        following = self.order.index(place) + len(self.offload.slots)
        if following >= len(self.order):
            return
        if self.offload.stream is not None:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.offload.device))
            self.offload.stream.wait_event(done)
        self._start(self.order[following])


def _on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def host_bandwidth(device: torch.device, *, size: int = 1 << 28, rounds: int = 4) -> float:
    """GB/s of a transfer from pinned memory to the device; the best of the rounds."""
    host = _pinned(size, device)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return size / min(seconds) / 1e9
