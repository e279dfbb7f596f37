"""From a weight and a device to the linear that multiplies with it, and the ops around it.

`prepare` lays a weight out once; the result is a `FusedLinear` for ever after. Where no fast kernel
fits, its `why` says so by name and reason: never a silent slow path.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import cpu, imitation, reference, triton_cache
from flyweight.kernels.linear import prompts
from flyweight.kernels.linear.fused import FusedLinear, Segments, TorchLinear
from flyweight.kernels.linear.permuted import PermutedLinear, sort_columns
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import ACTIVATIONS, format_of
from flyweight.kernels.vptq import linear as vptq
from flyweight.tensors import (
    Float4,
    Float8,
    IntBlock,
    IntGroup,
    NvFloat4,
    Plain,
    QuantTensor,
    Sparse24,
    VectorQuant,
)


@dataclass(frozen=True, eq=False)
class Request:
    """A weight to be laid out. `exact` forbids kernels that compute anything but x @ dequantize():
    evaluation wants it. `activation` marks a merged gate/up, whose rows a kernel may pair up to
    apply it at once.
    """

    tensor: QuantTensor
    dtype: torch.dtype
    exact: bool
    bias: Tensor | None
    activation: str | None
    ops: ModuleType


Preparer = Callable[[Request], FusedLinear | None]  # None: this kernel does not take it


def tiles(request: Request) -> FusedLinear | None:
    """CUDA tiles of integers, float8 and 16-bit floats."""
    if request.tensor.device.type != "cuda" or request.exact:
        return None
    tensor, note = _find_sparse(request.tensor, request.dtype)
    activation = request.activation if request.activation in ACTIVATIONS else None
    form = format_of(tensor, request.dtype)
    if form is None or (activation and tensor.matrix_shape[0] % 32):
        return None
    activation = activation if form.pairs_rows else None
    return TiledLinear(
        tensor,
        dtype=request.dtype,
        ops=request.ops,
        bias=request.bias,
        activation=activation,
        note=note,
    )


def sorted_tiles(request: Request) -> FusedLinear | None:
    """The same of integers whose groups are of scattered inputs (act-order)."""
    tensor = request.tensor
    if not isinstance(tensor, IntGroup) or tensor.device.type != "cuda" or request.exact:
        return None
    activation = request.activation if request.activation in ACTIVATIONS else None
    found = sort_columns(tensor)
    if found is None or format_of(found[0], request.dtype) is None:
        return None
    if activation and tensor.matrix_shape[0] % 32:
        return None
    return PermutedLinear(
        *found, dtype=request.dtype, ops=request.ops, bias=request.bias, activation=activation
    )


def vectors(request: Request) -> FusedLinear | None:
    """VPTQ on CUDA."""
    tensor = request.tensor
    if (
        tensor.device.type != "cuda"
        or request.exact
        or not isinstance(tensor, VectorQuant)
        or tensor.experts is not None
    ):
        return None
    return vptq.prepare(
        tensor,
        dtype=request.dtype,
        ops=request.ops,
        bias=request.bias,
    )


NATIVE = "native"  # the name of a CPU's kernels in C
_in_c = True  # whether a CPU's own kernels may be used


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Weights that are laid out meanwhile are multiplied by torch alone."""
    global _in_c
    before, _in_c = _in_c, False
    try:
        yield
    finally:
        _in_c = before


def in_own_bits(request: Request) -> FusedLinear | None:
    """A CPU's kernels in C, for weights of which torch would keep floats, by themselves or besides:
    one by one, where the whole model does not run through them (mixtures of experts).
    """
    tensor = request.tensor
    if (
        not _in_c
        or not isinstance(tensor, Float4 | NvFloat4 | IntBlock | IntGroup)
        or tensor.device.type != "cpu"
        or request.dtype != torch.float32
        or tensor.experts is not None
    ):
        return None
    from flyweight.kernels.native import library
    from flyweight.kernels.native.linear import NativeLinear
    from flyweight.kernels.native.weight import group_layout

    if library.why_not() is not None:
        return None
    if isinstance(tensor, IntGroup) and (request.exact or group_layout(tensor) is None):
        return None
    linear = NativeLinear(tensor, exact=request.exact)
    return TorchLinear(
        linear,
        ops=request.ops,
        kernel=NATIVE,
        why=linear.why,
        shape=tensor.shape,
        nbytes=linear.nbytes,
    )


def on_cpu(request: Request) -> FusedLinear | None:
    """torch's own products of float32 inputs."""
    tensor = request.tensor
    if tensor.device.type != "cpu" or request.dtype != torch.float32 or tensor.experts is not None:
        return None
    run, kernel, why, nbytes = cpu.choose(tensor, exact=request.exact)
    return TorchLinear(
        run,
        ops=request.ops,
        kernel=kernel,
        why=why,
        shape=tensor.shape,
        nbytes=nbytes,
        in_eight_bits=many_rows(request),
    )


def dequantized(request: Request) -> FusedLinear:
    """What nothing else takes: in the model's type, through torch."""
    tensor = request.tensor
    dtype = request.dtype
    if isinstance(tensor, Plain):
        weight = tensor.weight.to(dtype)
        why = "plain weight"
    else:
        weight = tensor.dequantize(dtype)
        why = f"no kernel for {tensor.kind} here{because(tensor)}: dequantized once at load"
    linear = functools.partial(torch.nn.functional.linear, weight=weight)

    def run_quantized(x: Tensor) -> Tensor:
        return linear(tensor.quantize_input(x).to(dtype))

    return TorchLinear(
        linear if isinstance(tensor, Plain) else run_quantized,
        ops=request.ops,
        why=why,
        shape=tensor.shape,
        nbytes=weight.nbytes,
        # without `exact` a prompt is to be faster, and this would not be
        in_eight_bits=many_rows(request) if request.exact else None,
    )


def many_rows(request: Request) -> Callable[[str], Callable[[Tensor], Tensor]] | None:
    """From a type of prompts to the product of many rows in it, through torch; None of weights that
    no kernel multiplies so.
    """
    tensor = request.tensor
    if not isinstance(tensor, IntGroup) or tensor.bits != 4 or tensor.experts is not None:
        return None

    def in_eight_bits(kind: str) -> Callable[[Tensor], Tensor]:
        narrow = prompts.in_eight_bits(tensor.dequantize(), kind)
        return prepare(narrow, dtype=request.dtype, exact=request.exact)

    return in_eight_bits


# the first that takes a weight has it
PREPARERS: list[Preparer] = [tiles, sorted_tiles, vectors, in_own_bits, on_cpu]


def register(preparer: Preparer) -> None:
    """A kernel from outside of this file, asked before all others."""
    PREPARERS.insert(0, preparer)


def prepare(
    tensor: QuantTensor,
    *,
    dtype: torch.dtype,
    exact: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> FusedLinear:
    """Choose a kernel and lay the weight out for it."""
    request = Request(tensor, dtype, exact, bias, activation, decoder_ops(tensor.device))
    return next(
        (found for preparer in PREPARERS if (found := preparer(request))), None
    ) or dequantized(request)


def prepare_table(tensor: QuantTensor, dtype: torch.dtype) -> FusedLinear | None:
    """A weight whose rows are looked up, laid out for the kernel that does it; None: there is none,
    or it would not keep the weight's bits.
    """
    if tensor.device.type != "cuda":
        return None
    form = format_of(tensor, dtype)
    if form is None or "look_up" not in form.kernels:
        return None
    found = prepare(tensor, dtype=dtype)
    return found if found.looks_up else None


def prepare_all(
    tensors: Sequence[QuantTensor],
    *,
    dtype: torch.dtype,
    exact: bool = False,
    bias: Tensor | None = None,
) -> FusedLinear:
    """One linear of projections that share x but not their scheme."""
    parts = [prepare(tensor, dtype=dtype, exact=exact) for tensor in tensors]
    return vptq.join(parts, bias) or Segments(parts)


def _find_sparse(tensor: QuantTensor, dtype: torch.dtype) -> tuple[QuantTensor, str]:
    """A weight with two of four inputs as such where there is a kernel for it, and what is to be
    said about that.
    """
    found = Sparse24.find(tensor)
    if not isinstance(found, Sparse24) or format_of(found, dtype) is None:
        return tensor, ""
    return found, "two of four inputs kept: "


def because(tensor: QuantTensor) -> str:
    """What of a weight of a known kind the kernels cannot take."""
    if not isinstance(tensor, Float8) or tensor.device.type != "cuda":
        return ""
    if tensor.block is None and tensor.activation in ("token", "static"):
        return ""
    return f" (activations: {tensor.activation}, blocks: {tensor.block})"


def decoder_ops(device: torch.device | str) -> ModuleType:
    """Norm, rope, KV write and attention for a device: a module like `reference`."""
    if torch.device(device).type != "cuda":
        return reference
    return (
        importlib.import_module("flyweight.kernels.dry_ops") if gpu.is_pretended() else _cuda_ops()
    )


@functools.cache
def _cuda_ops() -> ModuleType:
    reason = unsupported_by_triton()
    if reason is not None:
        warnings.warn(
            f"norm, rope and prefill attention run as plain torch ops: {reason}", stacklevel=3
        )
        return reference
    imitation.tell_triton()
    triton_cache.ensure_room()
    return importlib.import_module("flyweight.kernels.cuda_ops")


def unsupported_by_triton() -> str | None:
    """None, or what Triton lacks here: it compiles the launcher of each kernel with the host's
    compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "triton needs a C compiler (install gcc, or set CC)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"triton needs {header} (install python3-dev)"
