"""Activations between two blocks: on the device while they fit a budget, then in host memory, then
on disk.

A slot keeps its place for life, so each pass reads and writes the same buffers and nothing is
allocated twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from flyweight.errors import ResourceError
from flyweight.saving import reason


@dataclass(frozen=True)
class Budget:
    device_bytes: int = 0
    host_bytes: int = 4 << 30


class ActivationCache:
    """A list of equally long batches [sequences, tokens, hidden]; `cache[i] = x` overwrites in
    place.
    """

    def __init__(self, device: torch.device, budget: Budget, folder: Path, name: str) -> None:
        self.device = device
        self.folder = folder
        self.name = name
        self.left = {
            "device": budget.device_bytes if device.type != "cpu" else 0,
            "host": budget.host_bytes,
        }
        self.slots: list[Tensor | tuple[Path, torch.Size, torch.dtype]] = []

    def append(self, x: Tensor) -> None:
        size = x.nbytes
        if size <= self.left["device"]:
            self.left["device"] -= size
            self.slots.append(x.to(self.device, copy=True))
        elif size <= self.left["host"]:
            self.left["host"] -= size
            slot = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.device.type == "cuda")
            self.slots.append(slot.copy_(x))
        else:
            self.slots.append(
                (self.folder / f"{self.name}-{len(self.slots)}.bin", x.shape, x.dtype)
            )
            self[len(self.slots) - 1] = x

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, i: int) -> Tensor:
        slot = self.slots[i]
        if isinstance(slot, Tensor):
            return slot.to(self.device)
        path, shape, dtype = slot
        raw = torch.from_numpy(numpy.fromfile(path, dtype=numpy.uint8))
        return raw.view(dtype).view(shape).to(self.device)

    @property
    def samples(self) -> list[tuple[int, int]]:
        """(batch, row) of every sequence, for `sample`."""
        shapes = [slot.shape if isinstance(slot, Tensor) else slot[1] for slot in self.slots]
        return [(i, row) for i, shape in enumerate(shapes) for row in range(shape[0])]

    def sample(self, place: tuple[int, int]) -> Tensor:
        """One sequence [tokens, hidden], without moving its whole batch to the device."""
        slot = self.slots[place[0]]
        return (
            slot[place[1]].to(self.device) if isinstance(slot, Tensor) else self[place[0]][place[1]]
        )

    def __setitem__(self, i: int, x: Tensor) -> None:
        slot = self.slots[i]
        if isinstance(slot, Tensor):
            slot.copy_(x)
            return
        path = slot[0]
        try:
            x.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(path)
        except OSError as error:
            told = reason(error, path, x.nbytes)
            raise ResourceError(
                f"{path.parent}: cannot spill activations ({told}); free some disk, raise "
                "--cache-gb or use fewer samples, then --resume"
            ) from error

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @property
    def on_disk(self) -> int:
        return sum(not isinstance(slot, Tensor) for slot in self.slots)

    def close(self) -> None:
        for slot in self.slots:
            if not isinstance(slot, Tensor):
                slot[0].unlink(missing_ok=True)
        self.slots.clear()
