"""What a GPU can do, as far as plans depend on it, and a GPU that is not there.

Plans (shared memory, thread blocks, which kernel at all) are computed from a `Gpu`, never from
constants of one card. `of` asks the driver; a dry run (`pretend`) answers for a card that is not
there, so that the engine's own code finds out which kernels it would launch on it. A process that
has pretended is good for nothing else: much is kept by shape or device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

KB = 1024
# How an SM's memory can be divided between L1 and shared memory: the sizes of the latter, in KB.
CARVE_OUTS = (8, 16, 32, 64, 100, 132, 164, 196, 228)


@dataclass(frozen=True)
class Gpu:
    """Facts of one device. Shared memory is in bytes; the names are those of torch's device
    properties.
    """

    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int

    # -- instructions ----------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """The compiler's name; from Hopper on with instructions of this generation alone."""
        return f"sm_{self.major}{self.minor}" + ("a" if self.major >= 9 else "")

    @property
    def has_warpgroups(self) -> bool:
        """wgmma, and kernels that are written for it: Hopper alone."""
        return self.major == 9

    @property
    def has_dependent_launch(self) -> bool:
        """Programmatic dependent launch: a kernel may begin while the one before it ends."""
        return self.major >= 9

    @property
    def has_float8(self) -> bool:
        return (self.major, self.minor) >= (8, 9)

    # -- shared memory of a thread block ---------------------------------------------------

    @property
    def processors(self) -> int:
        return self.multi_processor_count

    @property
    def shared_most(self) -> int:
        return self.shared_memory_per_block_optin

    def shared_alone(self, reserve: int) -> int:
        """What a block may take that has an SM for itself, less `reserve` for its own variables and
        small neighbours.
        """
        return self.shared_memory_per_block_optin - reserve

    def shared_beside(self, reserve: int) -> int:
        """What a block may take so that another like it fits on the same SM."""
        return self.shared_memory_per_multiprocessor // 2 - reserve

    @property
    def shared_least(self) -> int:
        """The driver divides an SM's memory for two blocks of the kernel that comes first. A block
        of fewer bytes than this would leave it divided for less than all of it, where few pairs of
        kernels fit.
        """
        most = self.shared_memory_per_multiprocessor // KB
        return max((size for size in CARVE_OUTS if size < most), default=0) * KB // 2

    @property
    def shared_excluding(self) -> int:
        """So much that two such blocks never share an SM."""
        return min(
            self.shared_memory_per_multiprocessor // 2 + 2 * KB, self.shared_memory_per_block_optin
        )


# by architecture; the card that most people have, then others of it that differ in what plans
# depend on
GPUS = {
    "sm_80": Gpu(8, 0, 108, 166912, 167936),  # A100
    "sm_86": Gpu(8, 6, 84, 101376, 102400),  # A40, A6000, 3090
    "sm_89": Gpu(8, 9, 142, 101376, 102400),  # L40S, L4, 4090
    "sm_90a": Gpu(9, 0, 132, 232448, 233472),  # H100 SXM, H200
    "sm_90a:114": Gpu(9, 0, 114, 232448, 233472),  # H100 PCIe
    "sm_90a:78": Gpu(9, 0, 78, 232448, 233472),  # H20
    "sm_100a": Gpu(10, 0, 148, 232448, 233472),  # B200
    "sm_120a": Gpu(12, 0, 170, 101376, 102400),  # RTX 5090
}
_pretended: Gpu | None = None


def pretend(gpu: Gpu | None) -> None:
    """From here on this process is a dry run on `gpu` (None: no longer)."""
    global _pretended
    _pretended = gpu


def is_pretended() -> bool:
    return _pretended is not None


def of(device: torch.device | int) -> Gpu:
    if _pretended is not None:
        return _pretended
    index = device if isinstance(device, int) else device.index
    return _of(
        torch.cuda.current_device() if index is None and torch.cuda.is_available() else index or 0
    )


@functools.cache
def _of(index: int) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)  # PyTorch's types leave fields out
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(
        major,
        minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
