"""Memory of one engine among others in one process.

Several variants stay loaded while they take turns, so the allocator's own peak is of all of them.
What belongs to one is counted by differences: what its start and its runs left allocated, and how
far a run rose above where it began. Reserved and device memory cannot be divided; they are told
only where one engine is alone.
"""

from __future__ import annotations

import torch

ENGINES: list[Meter] = []  # those that hold memory now


class Meter:
    """Peaks in GB of what happens between `begin` and `end`; on a CPU there is no
    allocator to ask.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.own = 0  # bytes that stay
        self.peak = 0
        self.alone = False

    def begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)

    def end(self) -> None:
        if self.device.type == "cuda":
            self.peak = self.own + torch.cuda.max_memory_allocated(self.device) - self.before
            self.own += torch.cuda.memory_allocated(self.device) - self.before
        if self not in ENGINES:
            ENGINES.append(self)
        self.alone = len(ENGINES) == 1

    def forget(self) -> None:
        """After the engine was dropped."""
        if self in ENGINES:
            ENGINES.remove(self)
        self.own = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fields(self) -> dict[str, float | None]:
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "allocated_gb": self.peak / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved(self.device) / 1e9
            if self.alone
            else None,
            "device_gb": (total - free) / 1e9 if self.alone else None,
        }
