"""A linear over a tiled weight: every call goes to the kernel that choose.py names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear import (
    format,
    gemm,
    gemm_mma,
    gemm_small,
    gemv,
    gemv_cluster,
    gemv_splitk,
    prompts,
    tiles,
)
from flyweight.kernels.linear.choose import Choice, Fusion, choose, explain
from flyweight.kernels.linear.delta import AdaptedRow
from flyweight.kernels.linear.fused import FusedLinear, Handover, KvPrefetch, Norm, PackedInput
from flyweight.kernels.linear.untile import look_up, recode, untile, via_cublas
from flyweight.tensors import QuantTensor

MULTIPLY: dict[str, Callable[..., Tensor]] = {
    "gemv": gemv.multiply,
    "gemv_splitk": gemv_splitk.multiply,
    "gemm_small": gemm_small.multiply,
    "gemm": gemm.multiply,
    "gemm_mma": gemm_mma.multiply,
}


class TiledLinear(FusedLinear):
    """y = x Wᵀ (+ bias). `activation`: that of a merged gate/up, which the kernels apply at once
    (in `project`).
    """

    adds_bias = True

    def __init__(
        self,
        tensor: QuantTensor,
        *,
        dtype: torch.dtype,
        ops: ModuleType,
        bias: Tensor | None = None,
        activation: str | None = None,
        note: str = "",
    ) -> None:
        self.weight = tiles.prepare(tensor, dtype=dtype, bias=bias, activation=activation)
        self.ops = ops
        self.shape = tensor.shape
        self.note = note
        self.prompts: tiles.TiledWeight | None = None  # in 8 bits, where many rows go so

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return f"tiles.{self.weight.format.name}"

    @functools.cached_property
    def why(self) -> str:  # type: ignore[override]
        device = gpu.of(self.weight.weights.device)
        return f"{self.note}{explain(self.weight.matrix, device)}; what these do not take: cuBLAS"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.weight.nbytes

    def choose(
        self, rows: int, *, norm: bool = False, residual: bool = False, beside: bool = False
    ) -> Choice:
        device = gpu.of(self.weight.weights.device)
        if self.prompts is not None and rows > prompts.FEW_ROWS:
            matrix, gated = self.prompts.matrix, self.weight.interleaved
            if gemm.unsupported_reason(matrix, rows, device, interleaved=gated) is None:
                return Choice("gemm_recoded", "prompts in 8 bits were asked for")
        return choose(self.weight, rows, device, Fusion(norm, residual, beside))

    def goes_by_row(self, rows: int) -> bool:
        return self.kernel_for(rows) in ("gemv", "gemv_splitk")

    def narrow_prompts(self, kind: str) -> bool:
        weight = self.weight
        form = format.named(prompts.FORMATS[kind])
        device = gpu.of(weight.weights.device)
        if "recode" not in weight.format.kernels or not device.has_warpgroups:  # gemm.cu's alone
            return False
        largest = untile(weight).abs().amax(1)
        if weight.interleaved:
            largest = tiles.interleave_rows(largest)
        self.prompts = weight.in_eight_bits(form, largest)
        return True

    @property
    def prompt_bytes(self) -> int:
        if self.prompts is None:
            return 0
        return 1024 * self.prompts.matrix.tiles * self.prompts.matrix.blocks

    def keep_prompts(self) -> None:
        if self.prompts is not None:
            codes = recode(self.weight, self.prompts).clone()
            self.prompts = dataclasses.replace(self.prompts, weights=codes)

    def leaves_room(
        self,
        rows: int,
        *,
        norm: bool = False,
        activation: str | None = None,
        residual: bool = False,
    ) -> bool:
        numbers = tuned.of(gpu.of(self.weight.weights.device)).formats[self.weight.format.name]
        if numbers.cluster_layer_ring is None or activation != self.weight.activation:
            return False
        chosen = self.choose(rows, norm=norm, residual=residual, beside=True)
        return chosen.kernel == "gemv_cluster"

    def fetch_early(self) -> None:
        self.weight = dataclasses.replace(self.weight, early=True)

    def kernel_for(self, rows: int) -> str:
        return self.choose(rows).kernel

    @property
    def looks_up(self) -> bool:
        weight = self.weight
        whole = not weight.interleaved and weight.order is None and weight.in_features % 8 == 0
        return whole and "look_up" in weight.format.kernels

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        look_up(self.weight, rows, out)

    # -- handing x over --------------------------------------------------------------------

    def negotiate(self, before: FusedLinear, rows: int, activation: str) -> Handover:
        """gate/up writes x in the order that this product reads, where both go through gemm.cu and
        the first applies the activation, too.
        """
        if not isinstance(before, TiledLinear) or before.weight.activation != activation:
            return Handover()
        if before.choose(rows).kernel != "gemm":
            return Handover()
        return Handover(self.packed_input(rows, 0))

    def packed_input(self, rows: int, items: int) -> PackedInput | None:
        """None where x has to be packed after all: it is quantized by its row, or does not go
        through gemm.cu.
        """
        weight = self.weight
        device = weight.weights.device
        ahead = tuned.of(gpu.of(device)).steps.packed_ahead and not weight.format.quantizes_input
        if not ahead or weight.format.sparse or weight.in_features % 64:
            return None
        if self.choose(rows, residual=True).kernel != "gemm":
            return None
        return gemm.packed_input(weight, rows, device, residual=True)

    def arranged(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """x and the norm before it in the order of the columns, as far as kernels for one row do
        not see to it.
        """
        return x, norm

    # -- one row with an adapter -----------------------------------------------------------

    def adapts(self, rows: int, activation: str | None = None) -> bool:
        weight = self.weight
        if activation is not None and activation not in tiles.ACTIVATIONS:
            return False
        ready = rows == 1 and not weight.interleaved and weight.in_features % 8 == 0
        ready = ready and weight.order is None
        return ready and self.choose(rows, norm=True, residual=True).kernel == "gemv"

    def gates_apart(self, rows: int, activation: str) -> bool:
        weight = self.weight
        whole = weight.out_features % 32 == 0 and weight.bias is None
        balanced = gemv.is_balanced(weight.matrix, gpu.of(weight.weights.device))
        return self.adapts(rows, activation) and whole and not balanced

    def _ends_apart(self, rows: int, activation: str) -> bool:
        """Whether the kernel of so many rows, without an adapter, ends with act(gate) · up of the
        halves of its weight.
        """
        if activation not in tiles.ACTIVATIONS or self.kernel_for(rows) != "gemv":
            return False
        return gemv.ends_apart(self.weight.matrix, rows, gpu.of(self.weight.weights.device))

    def project_row(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        gated: str | None = None,
        apart: str | None = None,
        adapted: AdaptedRow | None = None,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        target = None if out is None else out.view(-1, out.shape[-1])
        added = target if residual is out and out is not None else residual
        added = None if added is None else added.reshape(-1, added.shape[-1])
        y = gemv.multiply(
            self.weight,
            flat,
            target,
            norm=norm and norm.folded,
            residual=added,
            one=gemv.OneRow(adapted, gated, apart),
        )
        return y.view(*x.shape[:-1], -1) if out is None else out

    # -- multiplying -----------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y = via_cublas(self.weight, flat) if self.weight.interleaved else self.multiply(flat)
        return y.view(*x.shape[:-1], -1)

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
        norm = norm and norm.folded
        if handover is not None and handover.to is not None and not isinstance(x, PackedInput):
            flat = x.reshape(-1, x.shape[-1])
            return gemm.multiply(self.weight, flat, norm=norm, to=handover.to)
        if isinstance(x, PackedInput):
            return gemm.multiply(self.weight, x, out, residual=residual)
        if activation is not None and activation != self.weight.activation:
            assert not self.weight.interleaved
            rows = x.numel() // x.shape[-1]
            if not self.weight.format.pairs_rows and self._ends_apart(rows, activation):
                return self.project_row(x, out, norm=norm, apart=activation)
            y = self.ops.gate(self.project(x, norm=norm), activation)
            return y if out is None else out.copy_(y)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        target = None if out is None else out.view(-1, out.shape[-1])
        added = (
            None
            if residual is None
            else target
            if residual is out
            else residual.reshape(-1, residual.shape[-1])
        )
        beside = handover is not None and handover.beside
        y = self.multiply(flat, target, norm=norm, residual=added, beside=beside)
        return y.view(*x.shape[:-1], -1) if out is None else out

    def multiply(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        kernel: str | None = None,
        beside: bool = False,
    ) -> Tensor:
        """x [rows, in] → [rows, out], through `kernel` or the one chosen; an interleaved weight
        gives act(gate) · up.
        """
        weight = self.weight
        if kernel is None:
            fused = dict(norm=norm is not None, residual=residual is not None)
            kernel = self.choose(x.shape[0], **fused, beside=beside).kernel
        if kernel == "gemm_dequantized":  # by a kernel that the product must not run ahead of
            written = dataclasses.replace(
                weight.in_sixteen_bits(), weights=untile(weight, tiles=True)
            )
            return gemm.multiply(written, x, out, norm=norm, residual=residual, pdl=False)
        if kernel == "gemm_recoded":
            assert self.prompts is not None
            if len(self.prompts.weights):
                return gemm.multiply(self.prompts, x, out, norm=norm, residual=residual)
            written = dataclasses.replace(self.prompts, weights=recode(weight, self.prompts))
            return gemm.multiply(written, x, out, norm=norm, residual=residual, pdl=False)
        if kernel == "cublas":
            return self._via_cublas(x, out, norm=norm, residual=residual)
        if kernel == "gemv_cluster":
            return gemv_cluster.multiply(
                weight, x, out, norm=norm, residual=residual, beside=beside
            )
        return MULTIPLY[kernel](weight, x, out, norm=norm, residual=residual)

    def _via_cublas(
        self, x: Tensor, out: Tensor | None, *, norm: Norm | None, residual: Tensor | None
    ) -> Tensor:
        y = via_cublas(
            self.weight, x if norm is None else self.ops.normalize(x, norm), out, residual=residual
        )
        if self.weight.activation is not None:
            y = self.ops.gate(y, self.weight.activation)
        return y if out is None or y is out else out.copy_(y)
