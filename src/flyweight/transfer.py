"""Between host and device without waiting: one copy for any number of small arrays, out of and into
pinned memory.

Torch's host allocator keeps a pinned buffer until the copies that use it are done, so nothing has
to be held here.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; views of any type begin at a multiple of their size
# Pinned buffers that take turns: at most two steps are on the device at once, so whatever was
# copied out of the one before last has arrived.
TURNS = 4
INTEGERS = {"q": torch.int64, "i": torch.int32}


def upload(
    device: torch.device, *arrays: numpy.ndarray, into: Tensor | None = None
) -> list[Tensor]:
    """The arrays as tensors of the device, all in one copy; within `into` (bytes) where a captured
    graph reads them there.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(numpy.ascontiguousarray(array)) for array in arrays]
    starts = []
    total = 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        view[start : start + array.nbytes] = (
            numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        )
    moved = (
        staged.to(device, non_blocking=True)
        if into is None
        else into[:total].copy_(staged, non_blocking=True)
    )
    found = []
    for start, array in zip(starts, arrays, strict=True):
        part = moved[start : start + array.nbytes].view(torch_type(array.dtype))
        found.append(part if array.ndim == 1 else part.view(array.shape))
    return found


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def upload_beside(device: torch.device, *arrays: numpy.ndarray) -> list[Tensor]:
    """As `upload`, while the device goes on with what was launched before: only what is launched
    after this waits for the copy.
    """
    if device.type == "cpu":
        return upload(device, *arrays)
    now = torch.cuda.current_stream(device)
    side = side_stream(device)
    with torch.cuda.stream(side):
        moved = upload(device, *arrays)
    now.wait_stream(side)
    for tensor in moved:
        tensor.record_stream(now)  # its memory is the side stream's
    return moved


@functools.cache
def torch_type(dtype: numpy.dtype) -> torch.dtype:
    return torch.from_numpy(numpy.empty(0, dtype)).dtype


@functools.cache
def packer(kind: str, count: int) -> Callable[..., None]:
    """Writes so many integers into a buffer from a byte on."""
    return struct.Struct(f"={count}{kind}").pack_into


class Stage:
    """Pinned memory that a copy to the device starts from."""

    def __init__(self, memory: Tensor, kinds: str, begins: Sequence[int]):
        self.memory = memory
        self.kinds = kinds
        self.begins = begins
        self.layout: object = None  # for the caller: what the columns hold that change seldom
        self._bytes = memory.numpy()

    def clear(self) -> None:
        self._bytes.fill(0)

    def write(self, column: int, values: Sequence[int]) -> None:
        pack = packer(self.kinds[column], len(values))
        pack(self._bytes, self.begins[column], *values)


class StagedColumns:
    """Columns of integers at fixed places of the device, all written anew by one copy.

    For what the device waits for: numbers are packed straight into pinned memory that is kept,
    which takes a fraction of the time of `upload`.
    """

    def __init__(self, device: torch.device, rows: int, kinds: str):
        """`kinds`: a letter a column, as `struct` has them: q for 8 bytes, then i for 4."""
        self.kinds = kinds
        sizes = [INTEGERS[kind].itemsize * rows for kind in kinds]
        self.begins = [0, *itertools.accumulate(sizes)][:-1]
        self.place = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.views = [
            self.place[begin : begin + size].view(INTEGERS[kind])
            for kind, begin, size in zip(kinds, self.begins, sizes, strict=True)
        ]

    @functools.cached_property
    def _stages(self) -> Iterator[Stage]:
        shape, pinned = self.place.shape, self.place.device.type == "cuda"
        memories = [torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned) for _ in range(TURNS)]
        return itertools.cycle([Stage(memory, self.kinds, self.begins) for memory in memories])

    def begin(self) -> Stage:
        """Memory to be written: as it was `TURNS` times ago."""
        return next(self._stages)

    def send(self, stage: Stage) -> None:
        self.place.copy_(stage.memory, non_blocking=True)


class Download:
    """Tensors on their way to the host; `lists` waits for them, and for nothing launched later."""

    def __init__(self, *tensors: Tensor):
        self.event: torch.cuda.Event | None = None
        self.found: list[list] = []
        self.tensors: list[Tensor] = []
        if tensors[0].device.type == "cpu":
            # read now: the originals are buffers of the next step
            self.found = [tensor.tolist() for tensor in tensors]
            return
        self.tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_since(self, before: Download) -> float | None:
        """On the device, from one download to this one, both of which are there; None on a CPU."""
        if self.event is None or before.event is None:
            return None
        return before.event.elapsed_time(self.event) / 1e3

    def lists(self) -> list[list]:
        if self.event is not None:
            self.event.synchronize()
        return self.found or [tensor.tolist() for tensor in self.tensors]
