"""A weight on a CUDA device: one copy, in the tiles that the small-batch kernels read.

Few rows go through gemv.cu or gemv_split.cu, some through few.cu or batch.cu, many through gemm.cu, which all read the same
tiles; choices.py has the borders. Where none fits, and for so many rows that it is worth it, the weight is written out in 16
bits into a scratch that all layers share, so loading never holds two copies of a model: row-major for cuBLAS, or, where silu·mul
follows, in tiles for gemm.cu, which does that too. W8A8 computes the same function every way: whole numbers are exact in 16-bit
floats, and their products are summed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import batch, choices, few, gemm, gemv, gemv_split, jit
from flyweight.tensors import FLOAT8, FLOAT8_MAX, QuantTensor, quantize_float8_rows, quantize_int8_rows

# What is tried where the fastest way does not take a shape or a device; cuBLAS is the last of all.
NEXT = {"gemv": ("gemv", "batch", "gemm"), "few": ("few", "planes", "batch", "gemm", "gemv"), "batch": ("batch", "gemm", "gemv"),
        "planes": ("planes", "few", "batch", "gemm", "gemv"), "gemm": ("gemm", "gemv"), "written": ("written",),
        "cublas": ()}
_scratch: dict[torch.device, list[Tensor]] = {}


def scratch(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The device's one buffer for written-out weights; what it held before is gone.

    It grows as needed, and what it was before stays: captured graphs hold its address.
    """
    size, held = count * dtype.itemsize, _scratch.setdefault(device, [])
    if not held or held[-1].nbytes < size:
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    return held[-1][:size].view(dtype)


@functools.cache
def whole_or_split(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int) -> str | None:
    """Of "gemv" and "split" the faster by estimate. A kernel that leaves no room for the next one is the last choice."""
    whole = rows in gemv.ROWS and gemv.fitting_plan(kind, columns, group, rows, tiles=16 // rows)
    split = gemv_split.choose(kind, outputs, columns, group, rows, processors)
    if split is None or rows == 1:
        return "gemv" if whole else None
    beside = whole and whole.shared <= gemv.SHARED_LIMIT
    at_once = gemv_split.estimate(kind, outputs, columns, group, rows, slices=1, processors=processors)
    return "gemv" if beside and at_once <= 1.05 * split.microseconds else "split"


class CudaLinear:
    """y = x Wᵀ (+ bias). `gated`: a merged gate/up whose silu·mul the small-batch kernel does at once (`fused` only)."""

    def __init__(self, tensor: QuantTensor, *, dtype: torch.dtype, bias: Tensor | None = None, gated: bool = False):
        self.weight = gemv.prepare(tensor, dtype=dtype, bias=bias, interleave=gated)
        self.bias = bias

    def way(self, rows: int, device: torch.device, *, norm: bool = False, residual: bool = False) -> str:
        """The kernel of choices.py for so many rows (with a norm before, a residual after), or the next one that takes them."""
        weight = self.weight
        cut = (weight.kind, weight.out_features, weight.in_features, weight.group, rows, gemv.processors(device.index or 0))
        wanted = choices.wanted(weight.kind, rows, weight.out_features, weight.in_features, residual=residual,
                                gated=weight.interleaved)
        for kernel in NEXT[wanted]:
            if kernel == "gemv":
                if found := whole_or_split(*cut):
                    return found
            elif kernel == "few":
                if few.why_not(weight, rows, device, norm=norm) is None:
                    return kernel
            elif kernel == "batch":
                if batch.choose(*cut) is not None and gpu.capability(device)[0] == 9:
                    return kernel
            elif kernel == "planes":
                if gemm.worth_planes(*cut) and gemm.why_not(weight, gemm.padded_rows(rows), device) is None:
                    return "gemm"
            elif kernel == "written":
                if gemm.why_not(self.plain, gemm.padded_rows(rows), device) is None:
                    return kernel
            elif gemm.why_not(weight, gemm.padded_rows(rows), device) is None:
                return kernel
        return "cublas"

    @functools.cached_property
    def plain(self) -> gemv.Gemv:
        """The weight in 16-bit tiles, which are written for each call."""
        return dataclasses.replace(self.weight, kind="plain", weights=self.weight.weights[:0], records=None, group=64,
                                   scale_fp16=False, symmetric=False, by_rows=True, calls={})

    def packed_input(self, rows: int, device: torch.device, *, before: CudaLinear | None = None) -> gemm.Packed | None:
        """Where the kernel before (that linear, or attention) writes x for a `fused` with a residual, ready for the product.

        None where it has to be packed: x is quantized by its row, or one of the two does not go through gemm.cu.
        """
        weight = self.weight
        ahead = choices.PACKED_AHEAD and weight.kind in ("plain", "int4", "int8") and weight.in_features % 64 == 0
        if not ahead or any(linear.way(rows, device, residual=linear is self) != "gemm" for linear in (self, before) if linear):
            return None
        return gemm.packed_input(weight, rows, device, residual=True)

    def fused(self, x: Tensor | gemm.Packed, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
              residual: Tensor | None = None, to: gemm.Packed | None = None, way: str | None = None) -> Tensor:
        """x [rows, in], with the norm before and silu·mul (`gated`) or the residual after; see `packed_input` for `to`."""
        if to is not None or isinstance(x, gemm.Packed):
            return gemm.multiply(self.weight, x, out, norm=norm, epsilon=epsilon, residual=residual, to=to)
        way = way or self.way(x.shape[0], x.device, norm=norm is not None, residual=residual is not None)
        if way == "gemv":
            return self.weight(x, out, norm=norm, epsilon=epsilon, residual=residual)
        if way == "few":
            assert norm is None, "few.cu has none"
            return few.multiply(self.weight, x, out, residual=residual)
        if way in ("split", "batch"):
            multiply = gemv_split.multiply if way == "split" else batch.multiply
            return multiply(self.weight, x, out, norm=norm, epsilon=epsilon, residual=residual)
        if way == "written":  # by a kernel that the product must not run ahead of
            weight = dataclasses.replace(self.plain, weights=untile(self.weight, tiles=True))
            return gemm.multiply(weight, x, out, norm=norm, epsilon=epsilon, residual=residual, pdl=False)
        if way != "cublas":
            return gemm.multiply(self.weight, x, out, norm=norm, epsilon=epsilon, residual=residual)
        from flyweight.kernels.dispatch import decoder_ops  # which imports this file

        ops = decoder_ops(x.device)
        y = self.many(x if norm is None else ops.rms_norm(x, norm, epsilon), out, residual=residual)
        if self.weight.interleaved:
            y = ops.silu_mul(y)
        return y if out is None or y is out else out.copy_(y)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y = self.many(flat) if self.weight.interleaved else self.fused(flat)
        return y.view(*x.shape[:-1], -1)

    def many(self, x: Tensor, out: Tensor | None = None, *, residual: Tensor | None = None) -> Tensor:
        """Through cuBLAS, to `out`; a gated weight gives [gate | up], which is no `out`, and has no residual."""
        weight = self.weight
        dense = untile(weight)
        if weight.kind not in gemv.QUANTIZED:
            y = product(x, dense, None if weight.interleaved else out, residual=residual)
        else:
            assert weight.channel_scale is not None
            channels, static = weight.channel_scale.split([weight.out_features, int(weight.static)])
            codes, scale = quantize_rows(x, weight.kind, static if weight.static else None)
            shrink = 2.0**-15 if weight.dtype == torch.float16 else 1.0  # exact, and keeps sums below fp16's largest
            sums = F.linear((codes.float() * shrink).to(weight.dtype), dense)
            y = (sums.float() * (scale / shrink) * gemv.deinterleave(channels, weight.interleaved)).to(weight.dtype)
            y = y if residual is None else y.add_(residual)
        return y if self.bias is None else y.add_(self.bias)


def product(x: Tensor, dense: Tensor, out: Tensor | None, *, residual: Tensor | None) -> Tensor:
    """x denseᵀ + residual, which may be `out` itself: added in its place, while cuBLAS otherwise gets a copy."""
    if residual is None:
        return torch.mm(x, dense.T, out=out)
    return residual.addmm_(x, dense.T) if residual is out else torch.addmm(residual, x, dense.T, out=out)


def quantize_rows(x: Tensor, kind: str, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of x and their scale, of each row or the one given: what pack.cu does."""
    if static is None:
        return quantize_float8_rows(x) if kind == "fp8" else quantize_int8_rows(x)
    scaled = x.float() / static
    return (scaled.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8) if kind == "fp8" else scaled.round().clamp(-128, 127)), static


def untile(weight: gemv.Gemv, *, tiles: bool = False) -> Tensor:
    """The weight in its 16-bit type, in the scratch: row-major [out_features, in_features], or in `tiles` of that type."""
    defines = {
        **gemv.format_defines(weight.kind), "FP16": int(weight.dtype == torch.float16), "SCALE_FP16": int(weight.scale_fp16),
        "KDIM": weight.in_features, "NDIM": weight.out_features, "GROUP": weight.group, "INTERLEAVED": int(weight.interleaved),
        **({"IN_TILES": 1} if tiles else {}),
    }
    units = math.ceil(weight.out_features / 16) * math.ceil(weight.in_features / 64)
    out = scratch(1024 * units if tiles else weight.out_features * weight.in_features, weight.dtype, weight.weights.device)
    kernel = jit.load("untile.cu", defines=defines).kernel("untile")
    kernel.launch(math.ceil(units / 8), 256, (weight.weights, weight.records, out))
    return out if tiles else out.view(weight.out_features, weight.in_features)
