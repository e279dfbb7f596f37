"""Result rows: what every number carries with it, so that it can be compared with others and believed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
PACKAGES = ("flyweight", "transformers", "tokenizers", "safetensors", "triton", "cuda-core", "vllm")


def make_row(bench: str, environment: str | None = None, *, status: str = "ok", **fields: Any) -> dict[str, Any]:
    """One row; `environment` is the id of the environment row in the same file."""
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"schema": SCHEMA, "bench": bench, "run_id": uuid.uuid4().hex[:12], "time": stamp, "environment": environment,
            "status": status, **fields}


def environment_row(device: torch.device | str = "cpu", *, measure_bandwidth: bool = True) -> dict[str, Any]:
    device = torch.device(device)
    identity = uuid.uuid4().hex[:12]
    facts: dict[str, Any] = {
        "id": identity, "device": device_name(device), "count": torch.cuda.device_count() if device.type == "cuda" else 1,
        "driver": nvidia("driver_version"), "clocks": nvidia("clocks.sm,clocks.mem"),
        "copy_gb_s": round(copy_bandwidth(device), 1) if measure_bandwidth else None, "cpu": cpu_name(),
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "platform": platform.platform(), "packages": versions(), "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    return make_row("environment", identity, **facts)


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


def copy_bandwidth(device: torch.device, *, size: int = 1 << 27) -> float:
    """GB/s of a copy, bytes read and written both counted; the best of five."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size / (time.perf_counter() - begin) / 1e9)
    return best


def nvidia(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return _first_line(command) if torch.cuda.is_available() else None


def commit() -> str | None:
    """Of the source this package runs from; None where it is installed without its repository."""
    return _first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"])


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 and done.stdout.strip() else None
