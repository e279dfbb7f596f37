"""y = x Wᵀ through the native kernels, as a call on tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flyweight.kernels.native import library
from flyweight.kernels.native.weight import Weight, pack
from flyweight.tensors import QuantTensor


class NativeLinear:
    """Call it with x [..., inputs] in float32 to get [..., outputs] in float32."""

    def __init__(self, tensor: QuantTensor, *, exact: bool = False, bias: Tensor | None = None):
        self.weight: Weight = pack(tensor, exact=exact, bias=bias)
        self.outputs, self.inputs = tensor.matrix_shape
        self.nbytes = self.weight.nbytes
        self.why = self.weight.why

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.inputs).float().contiguous()
        out = torch.empty(len(rows), self.outputs)
        if len(rows):
            kernels = library.load()
            matrix = ctypes.byref(self.weight.matrix)
            scratch = torch.empty(kernels.matrix_scratch(matrix, len(rows)) + 64, dtype=torch.uint8)
            kernels.matrix_multiply(
                library.team(),
                matrix,
                rows.data_ptr(),
                out.data_ptr(),
                len(rows),
                -(-scratch.data_ptr() // 64) * 64,
            )
        return out.view(*x.shape[:-1], self.outputs)
