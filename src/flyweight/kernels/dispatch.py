"""The only table: (kind of weight, device) → the function that multiplies with it, and why that one.

`prepare` lays a weight out once for its kernel; the result is called with x for ever after. Where no fast kernel
fits, the choice says so by name and reason, once: never a silent slow path.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import choices, cpu, gemv, reference, vptq
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.tensors import Float8, Plain, QuantTensor, Sparse24, VectorQuant


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
        tensor, why = _find_sparse(tensor, dtype)
        kind = gemv.format_of(tensor, dtype)
        if kind is not None and (not gated or tensor.matrix_shape[0] % 32 == 0):
            on_cuda = CudaLinear(tensor, dtype=dtype, bias=bias, gated=gated)
            why += choices.explain(kind) + "; what these do not take: cuBLAS"
            return Prepared(on_cuda, f"gemv.{kind}", why, tensor.shape, on_cuda.weight.nbytes, adds_bias=True)
        if isinstance(tensor, VectorQuant) and tensor.experts is None:
            vectors = vptq.prepare(tensor, dtype=dtype, bias=bias)
            return Prepared(vectors, "vptq", vectors.why, tensor.shape, vectors.nbytes, adds_bias=isinstance(vectors, vptq.Vptq))
    if tensor.device.type == "cpu" and dtype == torch.float32 and tensor.experts is None:
        run, kernel, why, nbytes = cpu.choose(tensor, exact=exact)
        return Prepared(run, kernel, why, tensor.shape, nbytes)
    if isinstance(tensor, Plain):
        weight, why = tensor.weight.to(dtype), "plain weight"
    else:
        weight, why = tensor.dequantize(dtype), f"no kernel for {tensor.kind} here{because(tensor)}: dequantized once at load"
    linear = functools.partial(torch.nn.functional.linear, weight=weight)

    def run_quantized(x: Tensor) -> Tensor:
        return linear(tensor.quantize_input(x).to(dtype))

    return Prepared(linear if isinstance(tensor, Plain) else run_quantized, "torch.linear", why, tensor.shape, weight.nbytes)


def _find_sparse(tensor: QuantTensor, dtype: torch.dtype) -> tuple[QuantTensor, str]:
    """A weight with two of four inputs as such where there is a kernel for it, and what is to be said about that."""
    found = Sparse24.find(tensor)
    if not isinstance(found, Sparse24) or gemv.format_of(found, dtype) is None:
        return tensor, ""
    return found, "two of four inputs kept: "


def because(tensor: QuantTensor) -> str:
    """What of a weight of a known kind the kernels cannot take."""
    if isinstance(tensor, Float8) and tensor.device.type == "cuda":
        if tensor.block is not None or tensor.activation not in ("token", "static"):
            return f" (activations: {tensor.activation}, blocks: {tensor.block})"
        if not gemv.has_float8(tensor.device):
            return " (a GPU before sm_89)"
    return ""


def decoder_ops(device: torch.device | str) -> ModuleType:
    """Norm, rope, KV write and attention for a device: a module with the functions of `reference`."""
    if torch.device(device).type != "cuda":
        return reference
    return importlib.import_module("flyweight.kernels.dry_ops") if gpu.is_pretended() else _cuda_ops()


@functools.cache
def _cuda_ops() -> ModuleType:
    reason = why_not_triton()
    if reason is not None:
        warnings.warn(f"norm, rope and prefill attention run as plain torch ops: {reason}", stacklevel=3)
        return reference
    return importlib.import_module("flyweight.kernels.cuda_ops")


def why_not_triton() -> str | None:
    """None, or what Triton lacks here: it compiles the launcher of each kernel with the host's compiler."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "triton needs a C compiler (install gcc, or set CC)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"triton needs {header} (install python3-dev)"
