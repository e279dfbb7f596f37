"""The only table: (kind of weight, device) → the function that multiplies with it, and why that one.

`prepare` lays a weight out once for its kernel; the result is called with x for ever after. Where no fast kernel
fits, the choice says so by name and reason, once: never a silent slow path.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from flyweight.kernels import gemv, reference, vptq
from flyweight.kernels.cpu import CpuLinear
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.tensors import Plain, QuantTensor, VectorQuant


@dataclass(frozen=True)
class Prepared:
    """A weight laid out for one kernel: call it with x [..., in] to get [..., out]."""

    run: Callable[[Tensor], Tensor]
    kernel: str
    why: str
    shape: tuple[int, ...]
    nbytes: int
    adds_bias: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


def prepare(tensor: QuantTensor, *, dtype: torch.dtype, exact: bool = False, bias: Tensor | None = None,
            gated: bool = False) -> Prepared:
    """Choose and lay out. `exact` forbids kernels that compute anything but x @ dequantize(): evaluation wants it.

    `gated` marks a merged gate/up, whose rows a CUDA kernel may pair up.
    """
    if tensor.device.type == "cuda" and not exact:
        kind = gemv.format_of(tensor, dtype)
        if kind is not None and (not gated or tensor.matrix_shape[0] % 32 == 0):
            on_cuda = CudaLinear(tensor, dtype=dtype, bias=bias, gated=gated)
            return Prepared(on_cuda, f"gemv.{kind}", "up to 8 rows; more are written out in 16 bits for cuBLAS", tensor.shape,
                            on_cuda.weight.nbytes, adds_bias=True)
        if isinstance(tensor, VectorQuant) and tensor.experts is None:
            vectors = vptq.prepare(tensor, dtype=dtype)
            return Prepared(vectors, "vptq", vectors.why, tensor.shape, vectors.nbytes)
    plain = isinstance(tensor, Plain)
    weight = tensor.weight.to(dtype) if isinstance(tensor, Plain) else tensor.dequantize(dtype)
    linear: Callable[[Tensor], Tensor]
    linear = functools.partial(torch.nn.functional.linear, weight=weight)
    if weight.device.type == "cpu" and dtype == torch.float32 and weight.ndim == 2:
        linear = CpuLinear(weight)

    def run(x: Tensor) -> Tensor:
        return linear(tensor.quantize_input(x).to(dtype))

    why = "plain weight" if plain else f"no kernel for {tensor.kind} here: dequantized once at load"
    return Prepared(linear if plain else run, "torch.linear", why, tensor.shape, weight.nbytes)


def decoder_ops(device: torch.device | str) -> ModuleType:
    """Norm, rope, KV write and attention for a device: a module with the functions of `reference`."""
    return _cuda_ops() if torch.device(device).type == "cuda" else reference


@functools.cache
def _cuda_ops() -> ModuleType:
    if importlib.util.find_spec("triton") is None:
        warnings.warn("norm, rope and prefill attention run as plain torch ops: triton is not installed (pip install triton)",
                      stacklevel=3)
        return reference
    return importlib.import_module("flyweight.kernels.cuda_ops")
