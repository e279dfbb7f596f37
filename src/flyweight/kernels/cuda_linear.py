"""A weight on a CUDA device: one copy, in the tiles of the small-batch kernel.

Up to 8 rows go through gemv.cu. More are multiplied by cuBLAS with the weight written out in 16 bits into a scratch that
all layers share, so loading never holds two copies of a model. W8A8 computes the same function both ways: whole numbers
are exact in 16-bit floats, and their products are summed in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import gemv, jit
from flyweight.tensors import QuantTensor, quantize_int8_rows

_scratch: dict[torch.device, Tensor] = {}


def scratch(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The device's one buffer for written-out weights, grown as needed; what it held before is gone."""
    held = _scratch.get(device)
    if held is None or held.numel() < count or held.dtype != dtype:
        _scratch[device] = held = torch.empty(count, dtype=dtype, device=device)
    return held[:count]


class CudaLinear:
    """y = x Wᵀ (+ bias). `gated`: a merged gate/up whose silu·mul the small-batch kernel does at once (`fused` only)."""

    def __init__(self, tensor: QuantTensor, *, dtype: torch.dtype, bias: Tensor | None = None, gated: bool = False):
        self.weight = gemv.prepare(tensor, dtype=dtype, bias=bias, interleave=gated)
        self.bias = bias

    def fused(self, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
              residual: Tensor | None = None) -> Tensor:
        """One row, or 2, 4 or 8, with the norm before and silu·mul or the residual after."""
        return self.weight(x, out, norm=norm, epsilon=epsilon, residual=residual)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows <= 8 and not self.weight.interleaved:
            count = 1 << (rows - 1).bit_length()
            if self.weight.fits(count):
                flat = x.reshape(rows, -1)
                if count > rows:
                    flat = F.pad(flat, (0, 0, 0, count - rows))
                return self.weight(flat.contiguous(), pdl=False)[:rows].view(*x.shape[:-1], -1)
        return self.many(x)

    def many(self, x: Tensor) -> Tensor:
        weight = self.weight
        dense = untile(weight, scratch(weight.out_features * weight.in_features, weight.dtype, x.device))
        if weight.kind != "w8a8":
            y = F.linear(x, dense)
        else:
            codes, scale = quantize_int8_rows(x)
            assert weight.channel_scale is not None
            sums = F.linear(codes.to(weight.dtype), dense)
            y = (sums.float() * scale * gemv.deinterleave(weight.channel_scale, weight.interleaved)).to(weight.dtype)
        return y if self.bias is None else y.add_(self.bias)


def untile(weight: gemv.Gemv, out: Tensor) -> Tensor:
    """The weight row-major [out_features, in_features] in its 16-bit type."""
    defines = {
        "FORMAT": gemv.FORMATS[weight.kind], "FP16": int(weight.dtype == torch.float16), "SCALE_FP16": int(weight.scale_fp16),
        "KDIM": weight.in_features, "NDIM": weight.out_features, "GROUP": weight.group, "INTERLEAVED": int(weight.interleaved),
    }
    units = math.ceil(weight.out_features / 16) * math.ceil(weight.in_features / 64)
    kernel = jit.load("untile.cu", defines=defines).kernel("untile")
    kernel.launch(math.ceil(units / 8), 256, (weight.weights, weight.records, out))
    return out.view(weight.out_features, weight.in_features)
