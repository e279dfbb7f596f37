"""Which linears are left to vLLM, and why: asked before a weight is loaded, from its shape alone.

Ours are taken where they were measured to be the faster ones (docs/scale.md): on a GPU whose
numbers are known (`kernels/tuned/`), for shapes that a kernel takes at all rows of decode steps.
Where no kernel does, the weight would be written out in 16 bits for each call, and vLLM's own
kernel is better.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear.choose import choose
from flyweight.kernels.linear.format import named
from flyweight.kernels.linear.tiles import Matrix, TiledWeight

ANY_GPU = "FLYWEIGHT_VLLM_ANY_GPU"
OLDEST = (8, 0)
STEPS = (1, 2, 4, 8, 16, 32, 64)  # rows of decode steps
MIXED = {4: "int4", 8: "int8"}  # bits of integer groups → format


@dataclass(frozen=True)
class Wanted:
    """A linear of vLLM, as one rank has it."""

    format: str
    outputs: int
    inputs: int
    group: int = 64  # inputs that share a scale; −1: all
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.format} {self.outputs} x {self.inputs}"


def unsupported_reason(wanted: Wanted, device: Gpu | None) -> str | None:
    """None, or why vLLM's own kernel runs. `device` None: a CPU, where torch multiplies."""
    group = wanted.inputs if wanted.group in (-1, 0) else wanted.group
    if wanted.inputs % group:
        return f"{wanted.inputs} inputs are no whole groups of {group}"
    if device is None:
        return None
    if wanted.dtype not in (torch.float16, torch.bfloat16):
        return f"activations in {wanted.dtype} (float16 or bfloat16)"
    if not (group in (32, 64) or group % 128 == 0 or group == wanted.inputs):
        return f"groups of {group} inputs (32, 64, multiples of 128, or all)"
    if wanted.inputs % 64 or wanted.outputs % 16:
        return "outputs in sixteens and inputs in multiples of 64 are wanted"
    return _gpu_reason(device) or _kernel_reason(wanted, group, device)


def _gpu_reason(device: Gpu) -> str | None:
    if (device.major, device.minor) < OLDEST:
        return f"a GPU of {device.architecture}; {'.'.join(map(str, OLDEST))} or newer is needed"
    if not tuned.is_measured(device) and not os.environ.get(ANY_GPU):
        return (
            f"no measured numbers of this GPU ({device.architecture}, {device.processors} SMs): "
            f"flyweight doctor --tune measures them, {ANY_GPU}=1 goes without"
        )
    return None


def _kernel_reason(wanted: Wanted, group: int, device: Gpu) -> str | None:
    form = named(wanted.format)
    matrix = Matrix(form, wanted.outputs, wanted.inputs, group if form.grouped else 64)
    weight = TiledWeight(matrix, torch.empty(0, dtype=torch.uint8), wanted.dtype)
    for rows in STEPS:
        chosen = choose(weight, rows, device)
        if chosen.kernel == "cublas":
            return f"no kernel for {rows} rows ({chosen.why})"
    return None


def current_gpu() -> Gpu | None:
    return gpu.of(torch.cuda.current_device()) if torch.cuda.is_available() else None
