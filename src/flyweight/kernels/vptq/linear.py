"""VPTQ weights on the GPU as a fused linear: which kernel multiplies with one.

`prepare` lays a weight out once (layout.py) and keeps nothing else of it; `join` makes one linear
of several that share x, each of which then has some of a launch's thread blocks. One or two rows
multiply straight from the codebook (gather.py), up to 128 through warpgroup products (rows.py); for
more the weight is decoded into a place that torch multiplies with, or gemm.cu, where silu·mul
follows (decode.py). A weight no kernel takes (very long vectors, large residual books) is decoded
once: `why` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import tuned, workspace
from flyweight.kernels.linear import gemm
from flyweight.kernels.linear.format import PLAIN
from flyweight.kernels.linear.fused import (
    FusedLinear,
    Handover,
    KvPrefetch,
    Norm,
    PackedInput,
    TorchLinear,
)
from flyweight.kernels.linear.tiles import ACTIVATIONS, Matrix, TiledWeight
from flyweight.kernels.vptq import decode, gather, gather_plan, rows
from flyweight.kernels.vptq.choose_layout import lay_out, unsupported_reason
from flyweight.kernels.vptq.layout import Layout
from flyweight.kernels.vptq.parts import Ends, Parts
from flyweight.tensors import VectorQuant

FEWEST_PRODUCTS = 3  # rows from which on warpgroup products are faster
GATHERED_ROWS = 16  # most rows of vptq.cu, where there are no warpgroup products
# most rows gathered one by one past a codebook that shared memory has no room for
DIRECT_ROWS = 4
# from so many on gate/up is written out in tiles, for a product that is followed by silu·mul
SILU_ROWS = 4096
MOST_PARTS = 3
WHY = (
    "up to 128 rows straight from the codebook; more are written out in 16 bits for cuBLAS, or "
    "gemm.cu and silu·mul"
)


class VptqLinear(FusedLinear):
    """Weights with one input in the kernels' layout, their outputs side by side."""

    kernel = "vptq"
    adds_bias = True

    def __init__(self, parts: Parts, *, ops: ModuleType, bias: Tensor | None = None) -> None:
        self.parts = parts
        self.ops = ops
        self.bias = bias
        self.why = WHY
        self.shape = (self.out_features, self.layout.in_features)

    @property
    def layout(self) -> Layout:
        return self.parts[0]

    @property
    def device(self) -> torch.device:
        return self.layout.affine.device

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(part.nbytes for part in self.parts)

    @functools.cached_property
    def tiles(self) -> TiledWeight:
        """Gate and up in 16-bit tiles, which are written for each call."""
        matrix = Matrix(PLAIN, self.out_features, self.layout.in_features, 64)
        return TiledWeight(
            matrix, self.layout.stream[:0], self.layout.dtype, activation="silu", by_rows=True
        )

    # -- which kernel ----------------------------------------------------------------------

    def takes_silu(self, count: int) -> bool:
        """Whether so many rows' products of gate and up are better followed by silu·mul at once."""
        if count < SILU_ROWS or self.bias is not None or not decode.takes_silu(self.parts):
            return False
        return (
            gemm.unsupported_reason(self.tiles.matrix, count, gpu.of(self.device), interleaved=True)
            is None
        )

    @functools.cached_property
    def gathers(self) -> bool:
        """Whether vptq.cu's tables fit into this device's shared memory."""
        return gather_plan.fits(self.parts, gpu.of(self.device))

    def gathered(self, count: int) -> bool:
        return count <= GATHERED_ROWS and self.gathers

    def direct(self, count: int) -> bool:
        """Whether rows are gathered one by one, since writing the weight out takes longer."""
        fits = gather_plan.takes_direct(self.parts, gpu.of(self.device))
        return count <= DIRECT_ROWS and not self.gathers and fits

    def by_products(self, count: int) -> bool:
        return FEWEST_PRODUCTS <= count <= rows.MOST and rows.takes(
            self.parts, count, gpu.of(self.device)
        )

    def kernel_for(self, count: int) -> str:
        if self.by_products(count):
            return "vptq_rows"
        if self.gathered(count) or self.direct(count):
            return "vptq"
        return "vptq_decode + cublas"

    # -- the contract ----------------------------------------------------------------------

    def negotiate(self, before: FusedLinear, rows: int, activation: str) -> Handover:
        """Gate and up have codebooks of their own, so no thread block has both: the activation is
        left to this linear.
        """
        if not isinstance(before, VptqLinear) or activation not in ACTIVATIONS:
            return Handover()
        if activation == "silu" and before.takes_silu(rows):
            return Handover()
        return Handover(late=activation)

    def packed_input(self, rows_: int, items: int) -> PackedInput | None:
        if not self.by_products(rows_) or not tuned.of(gpu.of(self.device)).steps.packed_ahead:
            return None
        return rows.packed_results(self.parts, rows_, items, self.device)

    def __call__(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        launch: gather_plan.Launch | None = None,
        pdl: bool = True,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        result = None if out is None else out.view(-1, self.out_features)
        return self.multiply(flat, result, Ends(bias=self.bias), launch=launch, pdl=pdl).view(
            *x.shape[:-1], -1
        )

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
        late = None if handover is None else handover.late
        norm = norm and norm.folded
        if (
            isinstance(x, Tensor)
            and activation == "silu"
            and late is None
            and self.takes_silu(x.numel() // x.shape[-1])
        ):
            return self.silu(x, out, norm=norm)
        # gate/up that hands over late gives gate and up as they are; down is the one whose x they
        # are
        gated = late if activation is None else None
        flat = x if isinstance(x, PackedInput) else x.reshape(-1, x.shape[-1]).contiguous()
        ends = Ends(
            norm.weight if norm else None,
            norm.epsilon if norm else 1e-6,
            gated,
            self.bias,
            None if residual is None else residual.reshape(-1, residual.shape[-1]),
        )
        plain_result = activation is None or late is not None
        target = out.view(-1, out.shape[-1]) if out is not None and plain_result else None
        if residual is out and target is not None:
            ends = replace(ends, residual=target)
        y = self.multiply(flat, target, ends, prefetch=prefetch)
        if not plain_result:
            y = self.ops.gate(y, activation)
            return y if out is None else out.copy_(y)
        return (
            y.view(*x.shape[:-1], -1)
            if isinstance(x, Tensor) and out is None
            else y
            if out is None
            else out
        )

    def silu(self, x: Tensor, out: Tensor | None = None, *, norm: Norm | None = None) -> Tensor:
        """silu(gate) · up of many rows."""
        # by a kernel that the product must not run ahead of
        written = decode.dequantize(self.parts, tiles=True)
        flat = x.reshape(-1, x.shape[-1])
        y = gemm.multiply(replace(self.tiles, weights=written), flat, out, norm=norm, pdl=False)
        return y.view(*x.shape[:-1], -1)

    # -- the kernels -----------------------------------------------------------------------

    def multiply(
        self,
        x: Tensor | PackedInput,
        out: Tensor | None,
        ends: Ends,
        *,
        launch: gather_plan.Launch | None = None,
        prefetch: KvPrefetch | None = None,
        pdl: bool = True,
    ) -> Tensor:
        """x [rows, in], or gate and up of so many inputs (`ends.gated`)."""
        count = x.rows if isinstance(x, PackedInput) else x.shape[0]
        if out is None:
            out = torch.empty(count, self.out_features, dtype=self.layout.dtype, device=self.device)
        if isinstance(x, PackedInput) or (launch is None and self.by_products(count)):
            rows.multiply(self.parts, x, out, ends, prefetch=prefetch, pdl=pdl)
        elif self.gathered(count) and not self.layout.sliced:
            gather.gather(self.parts, x, out, ends, arrived=self.arrived, launch=launch, pdl=pdl)
        else:
            self._one_by_one(x, out, ends, launch, pdl)
        return out

    @property
    def arrived(self) -> Tensor:
        """Counters for every part of the row blocks, of which there are no more than processors."""
        return workspace.current(self.device).counter("vptq arrived", workspace.MOST_PROCESSORS)

    def _one_by_one(
        self, x: Tensor, out: Tensor, ends: Ends, launch: gather_plan.Launch | None, pdl: bool
    ) -> None:
        """What comes before, the product, what comes after."""
        x = x if ends.gated is None else self.ops.gate(x, ends.gated)
        x = x if ends.norm is None else self.ops.normalize(x, Norm(ends.norm, ends.epsilon))
        product = out if ends.residual is None else torch.empty_like(out)
        if self.gathered(x.shape[0]):
            gather.gather(
                self.parts, x, product, Ends(), arrived=self.arrived, launch=launch, pdl=pdl
            )
        elif self.direct(x.shape[0]):
            gather.direct(self.parts, x, product, arrived=self.arrived, pdl=pdl)
        else:
            decode.multiply(self.parts, x, out, residual=ends.residual)
            product = out
        if ends.residual is not None and product is not out:
            torch.add(product, ends.residual, out=out)
        if ends.bias is not None:
            out += ends.bias


def prepare(
    tensor: VectorQuant,
    *,
    dtype: torch.dtype,
    ops: ModuleType,
    doubled: bool | None = None,
    bias: Tensor | None = None,
) -> FusedLinear:
    """Lay a weight out for the kernels, or decode it where none takes it."""
    if tensor.experts is not None:
        raise ValueError("a weight per expert: prepare them one by one")
    reason = unsupported_reason(tensor, dtype)
    if reason:
        weight = tensor.dequantize(dtype)
        return TorchLinear(
            functools.partial(torch.nn.functional.linear, weight=weight),
            ops=ops,
            kernel="vptq",
            why=f"decoded once: {reason}",
            shape=tensor.shape,
            nbytes=weight.nbytes,
        )
    if doubled is None:
        doubled = gather_plan.worth_doubling(tensor)
    copies = (
        gather_plan.residual_copies(tensor, gpu.of(tensor.device), doubled=doubled)
        if tensor.device.type == "cuda"
        else 8
    )
    layout = lay_out(tensor, dtype=dtype, doubled=doubled, residual_copies=copies)
    return VptqLinear((layout,), ops=ops, bias=bias)


def join(linears: Sequence[FusedLinear], bias: Tensor | None = None) -> VptqLinear | None:
    """One linear of several (q, k and v; gate and up), where they are alike in all but their
    outputs.
    """
    found = [linear for linear in linears if isinstance(linear, VptqLinear)]
    if len(found) < len(linears) or len(linears) > MOST_PARTS:
        return None
    parts = tuple(part for linear in found for part in linear.parts)
    alike = {
        (part.form, part.halves, part.length, part.dense_steps, part.chunks, part.residual is None)
        for part in parts
    }
    if len(alike) > 1 or any(part.sliced for part in parts):
        return None
    return VptqLinear(parts, ops=found[0].ops, bias=bias)
