"""Kernels of a whole model compiled before an engine's first pass, by all cores.

An engine runs one size after the other before it captures it, and each would wait for its own
compilation: minutes. So weights are noted as they are laid out (`note`), and the first product of
them all (`compile_noted`) has a second process find out which kernels they ask for at every number
of rows, in a dry run, and compile these side by side. It is asked once for each set of weights:
a file in the cache of kernels tells the next start that nothing is missing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import compiler, dispatch, jit, tuned
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.precompile import precompile
from flyweight.tensors import QuantTensor, Sparse24

SETTING = "FLYWEIGHT_AHEAD"  # off: each kernel is compiled when it is first used
MOST_ROWS = 16384
MOST_SECONDS = 900
STEPS = (1, 2, 4, *range(8, 65, 8))  # rows of decode steps that engines capture
logger = logging.getLogger("vllm.flyweight")


class Noted(Protocol):
    """Something without values whose kernels are to be compiled. It is sent to the second
    process.
    """

    @property
    def name(self) -> str:
        """What asks for other kernels has another one."""

    def run(self, rows: Sequence[int]) -> None:
        """Everything that it launches for so many rows each, in a dry run."""


_noted: dict[str, Noted] = {}


def lay_out(
    segments: Sequence[QuantTensor], *, dtype: torch.dtype, bias: Tensor | None
) -> FusedLinear:
    """One linear of parts that differ in their scheme, or of one."""
    if len(segments) == 1:
        return dispatch.prepare(segments[0], dtype=dtype, bias=bias)
    return dispatch.prepare_all(segments, dtype=dtype, bias=bias)


@dataclass(frozen=True, eq=False)
class NotedLinear:
    """Of one layer: its parts, and whether it has a bias."""

    segments: list[QuantTensor]
    dtype: torch.dtype
    bias: bool

    @property
    def name(self) -> str:
        return " | ".join(f"{name_of(one)} {self.dtype} {self.bias}" for one in self.segments)

    def run(self, rows: Sequence[int]) -> None:
        outputs = sum(one.matrix_shape[0] for one in self.segments)
        inputs = self.segments[0].matrix_shape[1]
        bias = torch.empty(outputs, dtype=self.dtype, device=DEVICE) if self.bias else None
        segments = [one.map(on_gpu) for one in self.segments]
        linear = lay_out(segments, dtype=self.dtype, bias=bias)
        for count in rows:
            linear(torch.empty(count, inputs, dtype=self.dtype, device=DEVICE))


def compiles(weight: QuantTensor) -> bool:
    """Whether kernels are compiled for it: on a GPU that is there."""
    return weight.device.type == "cuda" and not gpu.is_pretended()


def note(one: Noted) -> None:
    _noted.setdefault(one.name, one)


def outline_of(weight: QuantTensor) -> QuantTensor:
    """The same without values, as it will be laid out."""
    return Sparse24.find(weight).map(_without_values)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def name_of(outline: QuantTensor) -> str:
    fields: list[str] = [outline.kind, str(outline.matrix_shape)]
    for name, value in sorted(outline.fields().items()):
        told = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        inner = isinstance(value, QuantTensor)
        fields.append(f"{name}={name_of(value) if inner else told}")
    return " ".join(fields)


def has_noted() -> bool:
    return bool(_noted)


def compile_noted() -> None:
    """Everything that was noted since the last time. A fault costs time only: kernels are then
    compiled when they are first used.
    """
    noted = dict(_noted)
    _noted.clear()
    if not noted or os.environ.get(SETTING) == "off":
        return
    done = _marker(sorted(noted))
    if done.exists():
        return
    begin = time.perf_counter()
    device = gpu.of(torch.cuda.current_device())
    finished, told = _run((list(noted.values()), device, jit.current_architecture()))
    logger.info("Flyweight: %s; %.1f s", told, time.perf_counter() - begin)
    if finished:
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def _run(order: Any) -> tuple[bool, str]:
    """Whether the second process has compiled all, and its last line. The order goes through a pipe
    that nobody else can reach.
    """
    command = [sys.executable, "-m", "flyweight.plugins.ahead"]
    try:
        found = subprocess.run(
            command,
            input=pickle.dumps(order),
            env=_environment(),
            capture_output=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"kernels were not compiled in {MOST_SECONDS} s"
    told = found.stdout if found.returncode == 0 else found.stderr
    lines = told.decode(errors="replace").strip().splitlines()
    return found.returncode == 0, (lines or ["nothing was said"])[-1]


def _environment() -> dict[str, str]:
    """This package may be on the path of this process alone."""
    source = str(Path(__file__).parents[2])
    return dict(os.environ, PYTHONPATH=os.pathsep.join([source, *filter(None, sys.path)]))


def _marker(names: Sequence[str]) -> Path:
    from cuda.bindings import nvrtc

    parts = [*names, _sources(), str(nvrtc.nvrtcVersion()[1:]), jit.current_architecture()]
    parts.append(str(gpu.of(torch.cuda.current_device())))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return compiler.cache_folder() / f"ahead-{key}"


@functools.cache
def _sources() -> str:
    """A hash of this package's kernels and of what chooses them."""
    found = hashlib.sha256()
    for path in sorted(compiler.SOURCES.parent.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".toml"):
            found.update(path.read_bytes())
    return found.hexdigest()


# -- the second process ------------------------------------------------------------------------


def row_counts(device: Gpu, most: int = MOST_ROWS) -> list[int]:
    """Steps, and both sides of every border between two kernels."""
    borders = {
        route.rows for numbers in tuned.of(device).formats.values() for route in numbers.routes
    }
    prompts = [*range(64, 1024, 64), *range(1024, 4096, 256), *range(4096, most + 1, 4096)]
    near = (border - back for border in borders for back in (0, 1))
    return sorted({rows for rows in (*STEPS, *prompts, *near) if 0 < rows <= most})


def on_gpu(outline: Tensor) -> Tensor:
    return torch.empty(outline.shape, dtype=outline.dtype, device=DEVICE)


def wanted_by(noted: Sequence[Noted], device: Gpu, rows: Sequence[int]) -> set[jit.Wanted]:
    """The kernels that these weights ask for, found in a dry run; of this process and for good."""
    with dry_run(device):
        for one in noted:
            one.run(rows)
    return jit.wanted


def main() -> None:
    noted, device, architecture = pickle.load(sys.stdin.buffer)  # from the process that asks
    rows = row_counts(device)
    runs = [functools.partial(wanted_by, [one], device, rows) for one in noted]
    done = precompile(runs, architecture, listen=lambda *_: None)
    print(
        f"{done.kernels} kernels for {len(noted)} shapes, {done.fresh} of them compiled "
        f"in {done.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
