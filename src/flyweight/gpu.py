"""What the package asks of a GPU besides running on it, and a GPU that is not there.

A dry run (`pretend`) runs the engine's own code on tensors with shapes and a device but no values, to find out which kernels
it asks for. Choices between kernels depend on few facts of the device, all of which are asked for here; where a choice depends
on values, `values.known` says what is taken for granted. A process that has pretended is good for nothing else: much is kept by
shape or device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """Names of fields are those of torch's device properties; shared memory in bytes."""

    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int


GPUS = {  # by architecture: the model that most have
    "sm_80": Gpu(8, 0, 108, 166912, 167936),  # A100
    "sm_86": Gpu(8, 6, 84, 101376, 102400),  # A40, A6000
    "sm_89": Gpu(8, 9, 142, 101376, 102400),  # L40S
    "sm_90a": Gpu(9, 0, 132, 232448, 233472),  # H100 SXM, H200
    "sm_100a": Gpu(10, 0, 148, 232448, 233472),  # B200
}
_pretended: Gpu | None = None


def pretend(gpu: Gpu) -> None:
    """From here on this process is a dry run."""
    global _pretended
    _pretended = gpu


def is_pretended() -> bool:
    return _pretended is not None


def capability(device: torch.device | int) -> tuple[int, int]:
    return (_pretended.major, _pretended.minor) if _pretended else torch.cuda.get_device_capability(device)


def properties(device: torch.device | int) -> Any:
    return _pretended or torch.cuda.get_device_properties(device)
