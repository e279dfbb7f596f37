"""What a GPU can do, as far as plans depend on it, and GPUs that are not there.

Plans (shared memory, thread blocks, which kernel at all) are computed from a `Gpu`, never from
constants of one card. `of` asks the driver, unless the process pretends, in one of two ways:

- a dry run (`pretend`) answers for a card that is not there, so that the engine's own code finds
  out which kernels it would launch on it; nothing runs.
- an imitation (`imitate`, or the environment variable FLYWEIGHT_PRETEND=sm_80) runs another card's
  code on the card that is here: its capability, its shared memory, its SMs or the fewer that are
  here, and kernels compiled to PTX of its virtual architecture (`kernels/imitation.py`).

A process that has pretended is good for nothing else: much is kept by shape or device.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from flyweight import gpu_share
from flyweight.errors import OptionError, unknown

PRETEND = "FLYWEIGHT_PRETEND"

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

    @property
    def virtual_architecture(self) -> str:
        """The compiler's name of the instructions that every later GPU runs, too."""
        return f"compute_{self.major}{self.minor}"

    # -- what an SM holds at once ----------------------------------------------------------

    @property
    def resident_threads(self) -> int:
        """Of all blocks on one SM: 1,024 on Turing, 1,536 on cards for desktops, else 2,048."""
        capability = (self.major, self.minor)
        if capability < (8, 0):
            return 1024
        return 2048 if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 1536

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
_imitated: Gpu | None = None


def pretend(gpu: Gpu | None) -> None:
    """From here on this process is a dry run on `gpu` (None: no longer)."""
    global _pretended
    _pretended = gpu


def is_pretended() -> bool:
    """Whether this is a dry run. An imitation runs what it plans."""
    return _pretended is not None


def imitate(gpu: Gpu | None) -> None:
    """From here on the GPU that is here runs the code of `gpu` (None: no longer)."""
    global _imitated
    _imitated = gpu
    _of.cache_clear()
    if gpu is not None:
        # Triton's passes then use no instruction of a later GPU; read at each compilation.
        os.environ["TRITON_OVERRIDE_ARCH"] = f"sm{gpu.major}{gpu.minor}"


def imitated() -> Gpu | None:
    """The GPU of `imitate`, or of FLYWEIGHT_PRETEND."""
    name = os.environ.get(PRETEND)
    if _imitated is None and name:
        try:
            imitate(by_name(name))
        except OptionError as error:
            raise OptionError(f"{PRETEND}: {error}") from None
    return _imitated


def by_name(name: str) -> Gpu:
    """Of the table; `sm_80:40` is an sm_80 with 40 SMs."""
    if name in GPUS:
        return GPUS[name]
    architecture, _, processors = name.partition(":")
    if architecture not in GPUS or not processors.isdigit() or int(processors) < 1:
        known = [*GPUS, *(f"{one}:N" for one in ("sm_80", "sm_89"))]
        number = re.match(r"sm_(\d\d)", name)
        if number and int(number[1]) < 80:
            raise OptionError(
                f"{name} is older than Ampere (sm_80), the first GPUs that the kernels are for; "
                "`--device cpu` works without one"
            )
        if architecture in GPUS:
            raise OptionError(
                f"{name}: behind the colon stands how many SMs the GPU has, such as "
                f"{architecture}:24"
            )
        raise OptionError(unknown("architecture", name, known))
    return dataclasses.replace(GPUS[architecture], multi_processor_count=int(processors))


def of(device: torch.device | int) -> Gpu:
    if _pretended is not None:
        return _pretended
    index = device if isinstance(device, int) else device.index
    return _of(
        torch.cuda.current_device() if index is None and torch.cuda.is_available() else index or 0
    )


@functools.cache
def _of(index: int) -> Gpu:
    found = real(index)
    other = imitated()
    return found if other is None else imitation(other, found)


def imitation(other: Gpu, found: Gpu) -> Gpu:
    """`other`, with no more than the GPU that is there has."""
    if (other.major, other.minor) > (found.major, found.minor):
        raise OptionError(
            f"{PRETEND}: this GPU is an {found.architecture} and cannot run the code of an "
            f"{other.architecture}; name an older one, or unset it"
        )
    return Gpu(
        other.major,
        other.minor,
        min(other.processors, found.processors),
        min(other.shared_memory_per_block_optin, found.shared_memory_per_block_optin),
        min(other.shared_memory_per_multiprocessor, found.shared_memory_per_multiprocessor),
    )


@functools.cache
def real(index: int) -> Gpu:
    """The device that is there, with the SMs that this process has of it, whatever the process
    pretends.
    """
    properties: Any = torch.cuda.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    processors = properties.multi_processor_count
    return Gpu(
        major,
        minor,
        min(processors, gpu_share.of(index).processors or processors),
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
