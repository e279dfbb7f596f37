"""A linear whose groups are of scattered inputs (GPTQ's act-order): its columns are sorted by group
once, and x is brought into their order for each call, by one small kernel that norms it, too: host
side of cuda/gather.cu.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.fused import FusedLinear, Handover, KvPrefetch, Norm, PackedInput
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.packing import pack
from flyweight.tensors import IntGroup
from flyweight.values import known

THREADS = 512
MOST_INPUTS = 1 << 15  # that places of 16 bits, and shared memory, have room for
STEP_ROWS = 64  # that have a place of their own
ALONE_ROWS = 8  # up to so many the linears around it have half of an SM each


def sort_columns(tensor: IntGroup) -> tuple[IntGroup, Tensor] | None:
    """The same weight with whole groups one after the other, and which input comes at each place;
    None where groups are of different sizes.
    """
    if tensor.g_idx is None or tensor.experts is not None or tensor.in_features > MOST_INPUTS:
        return None
    order = tensor.g_idx.argsort(stable=True)
    places = torch.arange(tensor.in_features, device=order.device) // tensor.group_size
    if not known((tensor.g_idx.long()[order] == places).all(), otherwise=True):
        return None
    codes = pack(tensor.values()[:, order], tensor.bits)
    return dataclasses.replace(tensor, codes=codes, g_idx=None), order


def gather(x: Tensor, order: Tensor, norm: Norm | None) -> Tensor:
    """norm(x)[:, order] of x [rows, inputs], few of them in a place that the next call takes again;
    order in 16 bits.
    """
    rows, width = x.shape
    device = gpu.of(x.device)
    defines = {
        "FP16": int(x.dtype == torch.float16),
        "KDIM": width,
        "NORM": int(norm is not None),
    }
    kernel = jit.load("gather.cu", defines=defines).kernel("gather")
    norm = norm and norm.folded
    if rows <= STEP_ROWS:
        size = 2 * rows * width
        held = workspace.current(x.device).bytes(f"gathered {width}", size)
        out = held[:size].view(x.dtype).view(rows, width)
    else:
        out = torch.empty_like(x)
    args = (x, norm and norm.weight, order, out, rows, norm.epsilon if norm else 0.0)
    reserved = device.shared_least + 2 * KB if rows <= ALONE_ROWS else 0
    grid = max(rows, device.processors)
    kernel.launch(grid, THREADS, args, shared=max(2 * width, reserved), pdl=True)
    return out


class PermutedLinear(FusedLinear):
    """`inner` over inputs in another order."""

    adds_bias = True

    def __init__(self, inner: TiledLinear, order: Tensor, ops: ModuleType):
        self.inner = inner
        self.order = order.to(torch.int16)
        self.ops = ops
        self.shape = inner.shape
        self.kernel = f"{inner.kernel}, inputs sorted by group"
        self.why = inner.why

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.inner.nbytes + self.order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(self._sorted(x, None))

    def kernel_for(self, rows: int) -> str:
        return self.inner.kernel_for(rows)

    def narrow_prompts(self, kind: str) -> bool:
        return self.inner.narrow_prompts(kind)

    def project(
        self,
        x: Tensor | PackedInput,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        handover: Handover | None = None,
        prefetch: KvPrefetch | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        there = self._sorted(x, norm)
        return self.inner.project(there, out, activation=activation, residual=residual)

    def _sorted(self, x: Tensor, norm: Norm | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return gather(flat, self.order, norm).view(x.shape)
