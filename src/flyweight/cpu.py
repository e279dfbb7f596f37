"""What this process may use of the CPU: how many cores, and which types of numbers.

Torch is imported late: the number of threads must be known before it starts its own.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # what a container may use: "200000 100000" is two cores
VARIABLE = (
    "OMP_NUM_THREADS"  # read by torch when it starts, and by every process that this one starts
)
PROBE = 768  # width of the product that is timed
TOO_SLOW = 4.0  # times the time of float32: done by conversion, not by arithmetic


def usable_cores() -> int:
    """That this process may run on, by its affinity and by the quota of its container."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = QUOTA.read_text(encoding="utf-8").split()[:2]
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def use_threads(count: int | None) -> int | None:
    """So many threads for torch, here and in child processes; None: no more than usable cores.

    Torch counts the cores of the machine and knows nothing of quotas: sixty-four threads on two
    cores wait for each other.
    """
    if count is None and (VARIABLE in os.environ or usable_cores() >= (os.cpu_count() or 1)):
        return None  # as the user has set it, or as torch chooses
    chosen = count or usable_cores()
    if chosen > usable_cores():
        warnings.warn(
            f"--threads {chosen}: this process has {usable_cores()} cores, so threads will wait "
            "for each other"
        )
    os.environ[VARIABLE] = str(chosen)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(chosen)
    return count


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """How many times as long as in float32 a product takes on this CPU; measured in 0.1 s."""
    import torch

    def seconds(kind: torch.dtype) -> float:
        x = torch.ones(1, PROBE, dtype=kind)
        weight = torch.ones(PROBE, PROBE, dtype=kind)
        best = math.inf
        for _ in range(4):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - begin)
        return best

    return seconds(dtype) / seconds(torch.float32)


def computable(dtype: torch.dtype) -> torch.dtype:
    """The type itself where this CPU has arithmetic for it, else float32 and a warning."""
    import torch

    if dtype == torch.float32 or slowdown(dtype) < TOO_SLOW:
        return dtype
    name = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"this CPU has no {name} arithmetic (a product takes {slowdown(dtype):.0f} times as long "
        "as in float32): computing in float32"
    )
    return torch.float32
