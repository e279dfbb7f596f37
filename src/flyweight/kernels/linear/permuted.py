"""A linear whose groups are of scattered inputs (GPTQ's act-order): its columns are sorted by group
once, and x comes in their order. One row is brought into it by gemv.cu itself, on its way through
shared memory; several by a small kernel in front (cuda/gather.cu). The norm before it has weights
in that order, too.
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


def gather(x: Tensor, order: Tensor) -> Tensor:
    """x[:, order] of x [rows, inputs], few of them in a place that the next call takes again; order
    in 16 bits.
    """
    rows, width = x.shape
    device = gpu.of(x.device)
    kernel = jit.load("gather.cu", defines={"FP16": 0, "KDIM": width}).kernel("gather")
    if rows <= STEP_ROWS:
        size = 2 * rows * width
        held = workspace.current(x.device).bytes(f"gathered {width}", size)
        out = held[:size].view(x.dtype).view(rows, width)
    else:
        out = torch.empty_like(x)
    reserved = device.shared_least + 2 * KB if rows <= ALONE_ROWS else 0
    grid = max(rows, device.processors)
    shared = max(2 * width, reserved)
    kernel.launch(grid, THREADS, (x, order, out, rows), shared=shared, pdl=True)
    return out


class PermutedLinear(TiledLinear):
    """Over inputs in the order `order`, which `tensor` has already."""

    def __init__(
        self,
        tensor: IntGroup,
        order: Tensor,
        *,
        dtype: torch.dtype,
        ops: ModuleType,
        bias: Tensor | None = None,
        activation: str | None = None,
    ):
        note = "inputs sorted by group: "
        super().__init__(tensor, dtype=dtype, ops=ops, bias=bias, activation=activation, note=note)
        self.weight = dataclasses.replace(self.weight, order=order.to(torch.int16))
        self._norms: dict[int, tuple[Norm, Norm]] = {}  # as they come, and in the order

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if not self._takes_row(flat) or self.weight.interleaved:
            flat = self._gathered(flat)
        return super().__call__(flat).view(*x.shape[:-1], -1)

    def negotiate(self, before: FusedLinear, rows: int, activation: str) -> Handover:
        return Handover()

    def packed_input(self, rows: int, items: int) -> PackedInput | None:
        return None

    def arranged(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        if not self._takes_row(x, norm=norm is not None):
            x = self._gathered(x)
        return x, None if norm is None else self._ordered(norm)

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
        if activation is not None and activation != self.weight.activation:
            y = self.ops.gate(self.project(x, norm=norm), activation)
            return y if out is None else out.copy_(y)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        flat, norm = self.arranged(flat, norm)
        return super().project(
            flat.view(x.shape),
            out,
            norm=norm,
            activation=activation,
            residual=residual,
            handover=handover,
        )

    def _takes_row(self, x: Tensor, *, norm: bool = False) -> bool:
        """Whether the kernel brings x into the order itself."""
        return len(x) == 1 and self.choose(1, norm=norm).kernel == "gemv"

    def _gathered(self, x: Tensor) -> Tensor:
        assert self.weight.order is not None
        return gather(x, self.weight.order)

    def _ordered(self, norm: Norm) -> Norm:
        found = self._norms.get(id(norm.weight))
        if found is None:
            assert self.weight.order is not None
            weight = norm.folded.weight[self.weight.order.long()].contiguous()
            found = self._norms[id(norm.weight)] = norm, Norm(weight, norm.epsilon)
        return found[1]
