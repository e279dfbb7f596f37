"""What the machine is called and how fast it copies memory: measured, since data sheets promise
more than programs get.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

from flyweight import gpu

COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # far beyond any cache


def device_name(device: torch.device) -> str:
    """An imitation (`gpu.imitate`) says so: its times are not those of the GPU that it imitates."""
    if device.type != "cuda":
        return cpu_name()
    name = torch.cuda.get_device_name(device)
    if gpu.imitated() is None:
        return name
    other = gpu.of(device)
    return f"{name} as {other.architecture} ({other.processors} SMs)"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def copy_bandwidth(device: torch.device, *, size: int | None = None, rounds: int = 5) -> float:
    """GB/s of a copy, bytes read and written both counted; the best of the rounds, after one to
    warm up.
    """
    size = size or COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [copy_seconds(source, target) for _ in range(rounds + 1)]
    return 2 * size / min(seconds[1:]) / 1e9


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """By events on a GPU: the host's wait would be a fifth of the time."""
    if source.device.type != "cuda":
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    target.copy_(source)
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3
