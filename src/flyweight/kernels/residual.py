"""hidden + scale · norm(y) of few rows: host side of cuda/add_normed.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB
from flyweight.kernels import jit
from flyweight.kernels.linear.fused import Norm

THREADS = 256
MOST_ROWS = 64  # of a captured step; more are a pass over memory, which Triton does as well
ALONE_ROWS = 8  # up to so many the linears around it have half of an SM each


def takes(*tensors: Tensor) -> bool:
    """Whether these rows are few, whole, and in 16 bits."""
    return all(
        x.is_contiguous()
        and x.shape[-1] % 8 == 0
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and x.dtype in (torch.float16, torch.bfloat16)
        for x in tensors
    )


def add_normed(
    hidden: Tensor, y: Tensor, norm: Norm | None, *, scale: float, out: Tensor
) -> Tensor:
    device = gpu.of(hidden.device)
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    defines = {
        "FP16": int(hidden.dtype == torch.float16),
        "KDIM": width,
        "NORM": int(norm is not None),
    }
    kernel = jit.load("add_normed.cu", defines=defines).kernel("add_normed")
    norm = norm and norm.folded
    args = (
        hidden,
        y,
        norm and norm.weight,
        out,
        rows,
        norm.epsilon if norm else 0.0,
        float(scale),
    )
    reserved = device.shared_least + 2 * KB if rows <= ALONE_ROWS else 0
    kernel.launch(max(rows, device.processors), THREADS, args, shared=reserved, pdl=True)
    return out
