"""One token of each sequence through a gated DeltaNet layer: host side of cuda/gated_delta.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import StateStorage
from flyweight.kernels import jit
from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights

MOST_THREADS = 512
IN_REGISTERS = 32  # numbers of a state in a thread


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """What the kernel reads of the running sequences."""

    lengths: Tensor  # int32 [rows]: the new token counted; 0 is padding
    slots: Tensor  # int32 [rows]


def threads_of(shape: DeltaShape) -> int:
    return min(MOST_THREADS, shape.key_dim * shape.value_dim // 4)


def unsupported_reason(shape: DeltaShape) -> str | None:
    """None, or why the kernel cannot take such heads."""
    sizes = f"states of {shape.key_dim} x {shape.value_dim}"
    threads = threads_of(shape)
    if shape.value_dim % 32 or shape.value_dim > threads or threads < 96:
        return f"{sizes}: a head's values are no multiple of 32, or its keys too few"
    if threads % 32 or threads % (shape.value_dim // 4):
        return f"{sizes} are not shared out evenly among {threads} threads"
    if shape.key_dim % (threads // (shape.value_dim // 4)):
        return f"{sizes} are not shared out evenly among {threads} threads"
    if shape.key_dim * shape.value_dim > IN_REGISTERS * threads:
        return f"{sizes} do not fit into the registers of a thread block"
    return None


def delta_step(
    projected: Tensor, out: Tensor, cache: StateStorage, rows: DeltaRows, weights: DeltaWeights
) -> Tensor:
    """[rows, projected] → out [rows, outputs]; the states move on."""
    shape = weights.shape
    count = len(projected)
    threads = threads_of(shape)
    defines = {
        "FP16": int(projected.dtype == torch.float16),
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "WIDTH": shape.width,
        "THREADS": threads,
    }
    kernel = jit.load("gated_delta.cu", defines=defines).kernel("gated_delta")
    args = (
        projected,
        cache.conv,
        cache.recurrent,
        rows.slots,
        rows.lengths,
        weights.conv,
        weights.decay,
        weights.step_bias,
        weights.norm,
        out,
        count,
        float(weights.epsilon),
    )
    # the linear that follows finds all processors alike where each has a CTA (residual.py)
    grid = max(count * shape.value_heads, gpu.of(projected.device).processors)
    kernel.launch(grid, threads, args, pdl=True)
    return out
