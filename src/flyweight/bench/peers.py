"""Other people's kernels on the same weight, where they are installed.

`build` takes a QuantTensor, lays the weight out in fresh memory and returns a call; it raises where
the weight, the rows or the machine does not suit, and that reason becomes the row. Activation
quantization is part of the call, as it is of ours.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.errors import MissingPackageError, OptionError, UnsupportedError, unknown
from flyweight.kernels.cpu_integer import sums_exactly
from flyweight.packing import pack
from flyweight.tensors import (
    Float8,
    Int8Channel,
    IntGroup,
    Sparse24,
    quantize_float8_rows,
    quantize_int8_rows,
)

Run = Callable[[Tensor], Tensor]
INSTALL = {"gemlite": "pip install gemlite", "vllm": "pip install vllm"}


@dataclass(frozen=True)
class Peer:
    name: str
    formats: tuple[str, ...]
    build: Callable[..., Run]  # (tensor, *, rows, dtype)


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        raise MissingPackageError(f"{root} is not installed; `{INSTALL[root]}`") from error


def need(fits: bool, reason: str) -> None:
    if not fits:
        raise UnsupportedError(reason)


# -- torch ----------------------------------------------------------------------------------------


def torch_int4(tensor: IntGroup, *, rows: int, dtype: torch.dtype) -> Run:
    """tinygemm: W = (q − 8) · scale + offset, so that offset = (8 − zero point) · scale."""
    need(
        tensor.bits == 4 and tensor.g_idx is None and tensor.group_size in (32, 64, 128, 256),
        "groups of 32 to 256 only",
    )
    need(tensor.device.type == "cpu" or dtype == torch.bfloat16, "bfloat16 only")
    codes = tensor.values()
    scales = tensor.scales.to(dtype)
    zeros = 8 if tensor.zeros is None else tensor.zeros.to(dtype)
    pairs = (
        torch.stack([scales, (8 - zeros) * scales], -1).transpose(0, 1).contiguous()
    )  # [groups, out, 2]
    if tensor.device.type == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        op = torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        halves = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(halves, 8)
        op = torch.ops.aten._weight_int4pack_mm
    return functools.partial(_run_int4, op=op, packed=packed, group=tensor.group_size, pairs=pairs)


def _run_int4(x: Tensor, *, op: Any, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    return op(x, packed, group, pairs)


def torch_int8(tensor: Int8Channel, *, rows: int, dtype: torch.dtype) -> Run:
    need(tensor.input_scale is None, "dynamic activations only")
    need(
        tensor.device.type != "cpu" or sums_exactly(),
        "this processor has no VNNI, and without it the sums are cut off",
    )
    return functools.partial(
        _run_int8, weight=tensor.codes.clone(), scales=tensor.scales.float().flatten().clone()
    )


def _run_int8(x: Tensor, *, weight: Tensor, scales: Tensor) -> Tensor:
    """cuBLAS wants more than 16 rows: fewer are padded to 32."""
    codes, scale = quantize_int8_rows(x)
    padded = F.pad(codes.to(torch.int8), (0, 0, 0, max(0, 32 - len(x)) if x.is_cuda else 0))
    return (torch._int_mm(padded, weight.t())[: len(x)].float() * scale * scales).to(x.dtype)


def torch_fp8(tensor: Float8, *, rows: int, dtype: torch.dtype) -> Run:
    need(
        tensor.block is None and tensor.activation == "token",
        "one scale per output and dynamic activations only",
    )
    scales = tensor.scales.float().expand(tensor.matrix_shape[0], 1).t().contiguous()  # [1, out]
    return functools.partial(_run_fp8, weight=tensor.weight.clone(), scales=scales)


def _run_fp8(x: Tensor, *, weight: Tensor, scales: Tensor) -> Tensor:
    codes, scale = quantize_float8_rows(x)
    return torch._scaled_mm(
        codes, weight.t(), scale_a=scale, scale_b=scales, out_dtype=x.dtype, use_fast_accum=True
    )


def cusparselt(tensor: Sparse24, *, rows: int, dtype: torch.dtype) -> Run:
    need(
        isinstance(tensor.inner, Int8Channel) and tensor.device.type == "cuda", "int8 on a GPU only"
    )
    dense = tensor.to_dense()
    assert isinstance(dense, Int8Channel)
    return functools.partial(
        _run_cusparselt,
        packed=torch._cslt_compress(dense.codes),
        scales=dense.scales.float().flatten(),
    )


def _run_cusparselt(x: Tensor, *, packed: Tensor, scales: Tensor) -> Tensor:
    codes, scale = quantize_int8_rows(x)
    padded = F.pad(codes.to(torch.int8), (0, 0, 0, -len(x) % 32))
    sums = torch._cslt_sparse_mm(packed, padded.t(), out_dtype=torch.int32)  # [out, rows]
    return (sums.t()[: len(x)].float() * scale * scales).to(x.dtype)


# -- packages -------------------------------------------------------------------------------------


def gemlite(tensor: IntGroup, *, rows: int, dtype: torch.dtype) -> Run:
    core = package("gemlite.core")
    need(tensor.g_idx is None, "no act-order")
    kind = {torch.float16: core.DType.FP16, torch.bfloat16: core.DType.BF16}[dtype]
    layer = core.GemLiteLinearTriton(
        tensor.bits,
        group_size=tensor.group_size,
        in_features=tensor.in_features,
        out_features=tensor.matrix_shape[0],
        input_dtype=kind,
        output_dtype=kind,
    )
    zeros = (
        torch.full_like(tensor.scales, 1 << (tensor.bits - 1))
        if tensor.zeros is None
        else tensor.zeros
    )
    layer.pack(
        tensor.values().to(torch.uint8),
        tensor.scales.to(dtype).clone(),
        zeros.to(dtype).clone(),
        None,
    )
    return layer


def marlin(tensor: IntGroup, *, rows: int, dtype: torch.dtype) -> Run:
    """vLLM's (0.33), with its own repacking, from the package or from its library alone.

    Symmetric weights only: its zero points are packed in yet another order.
    """
    if not hasattr(torch.ops._C, "marlin_gemm"):
        package("vllm._custom_ops")
    need(
        tensor.zeros is None and tensor.g_idx is None and tensor.bits in (4, 8),
        "symmetric, without act-order; add --symmetric",
    )
    outputs, inputs = tensor.matrix_shape
    bits = tensor.bits
    packed = pack(tensor.values(), bits).t().contiguous()  # GPTQ's order: [in · bits / 32, out]
    weight = torch.ops._C.gptq_marlin_repack(packed, inputs, outputs, bits, False)
    scales = tensor.scales.t().to(dtype).contiguous()  # [groups, out]
    processors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return functools.partial(
        _run_marlin,
        weight=weight,
        scales=_permuted(scales, _scale_order(tensor.group_size < inputs)),
        locks=torch.zeros(4 * processors, dtype=torch.int32, device=tensor.device),
        kind=1 << 50 | 1 << (bits - 1 + 17) | bits << 8,  # uint4b8, uint8b128 of vllm.scalar_type
    )


def _scale_order(grouped: bool) -> list[int]:
    """In which order Marlin's threads take the scales of neighbouring outputs."""
    if grouped:
        return [i + 8 * j for i in range(8) for j in range(8)]
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _permuted(scales: Tensor, order: list[int]) -> Tensor:
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape).contiguous()


def _run_marlin(x: Tensor, *, weight: Tensor, scales: Tensor, locks: Tensor, kind: int) -> Tensor:
    # the nulls: result, bias, scales of x, of the whole, zero points; the flags are vLLM's
    # defaults: no atomic additions, sums in float32, integer zero points
    return torch.ops._C.marlin_gemm(
        x, None, weight, None, scales, None, None, None, locks, kind,
        x.shape[0], scales.shape[1], x.shape[1], False, True, False,
    )  # fmt: skip


def machete(tensor: IntGroup, *, rows: int, dtype: torch.dtype) -> Run:
    """vLLM's for Hopper, with its own repacking; codes less zero point, which it wants as −scale ·
    zero point.
    """
    ops = package("vllm._custom_ops")
    types = package("vllm.scalar_type").scalar_types
    need(tensor.g_idx is None and tensor.bits in (4, 8), "4 or 8 bits without act-order")
    names = ("uint4b8", "uint8b128") if tensor.zeros is None else ("uint4", "uint8")
    kind = getattr(types, names[tensor.bits == 8])
    packed = pack(
        tensor.values(), tensor.bits
    )  # [out, in · bits / 32]: as GPTQ's, column by column
    weight = ops.machete_prepack_B(
        packed.contiguous().t(), a_type=dtype, b_type=kind, group_scales_type=dtype
    )
    scales = tensor.scales.t().to(dtype).contiguous()  # [groups, out]
    zeros = None if tensor.zeros is None else (-scales * tensor.zeros.t().to(dtype)).contiguous()
    group = tensor.group_size if tensor.group_size < tensor.in_features else -1
    return functools.partial(
        _run_machete,
        apply=ops.machete_mm,
        b_q=weight,
        b_type=kind,
        b_group_scales=scales,
        b_group_zeros=zeros,
        b_group_size=group,
    )


def _run_machete(x: Tensor, *, apply: Any, **options: Any) -> Tensor:
    return apply(a=x, **options)


def cutlass(tensor: Int8Channel | Float8, *, rows: int, dtype: torch.dtype) -> Run:
    """vLLM's, from the package or from its library alone (`--vllm-library`)."""
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        package("vllm._custom_ops")
    whole = isinstance(tensor, Float8) and tensor.block is not None
    need(
        not whole and tensor.input_scale is None,
        "one scale per output and dynamic activations only",
    )
    weight = tensor.codes if isinstance(tensor, Int8Channel) else tensor.weight
    scales = tensor.scales.float().expand(tensor.matrix_shape[0], 1).contiguous()
    return functools.partial(_run_cutlass, weight=weight.clone(), scales=scales)


def _run_cutlass(x: Tensor, *, weight: Tensor, scales: Tensor) -> Tensor:
    if weight.dtype == torch.int8:
        codes, scale = quantize_int8_rows(x)
        codes = codes.to(torch.int8)
    else:
        codes, scale = quantize_float8_rows(x)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    torch.ops._C.cutlass_scaled_mm(out, codes, weight.t(), scale, scales, None)
    return out


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch._weight_int4pack_mm", ("w4a16",), torch_int4),
        Peer("torch._int_mm", ("w8a8",), torch_int8),
        Peer("torch._scaled_mm", ("fp8",), torch_fp8),
        Peer("cusparselt", ("w8a8-2:4",), cusparselt),
        Peer("gemlite", ("w4a16", "w8a16"), gemlite),
        Peer("vllm.marlin", ("w4a16", "w8a16"), marlin),
        Peer("vllm.machete", ("w4a16", "w8a16"), machete),
        Peer("vllm.cutlass", ("w8a8", "fp8"), cutlass),
    )
}


# Of shared libraries by themselves, which do not say their version: the beginning of the SHA-256.
loaded: dict[str, str] = {}


def load_library(path: Path) -> None:
    """vLLM's operators from the shared library of its wheel, without the package."""
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be loaded ({error})") from error
    with path.open("rb") as file:
        loaded[path.name] = hashlib.file_digest(file, "sha256").hexdigest()[:16]


def names(wanted: str) -> list[str]:
    """`all`, `none` or a list with commas."""
    if wanted in ("all", "none"):
        return list(PEERS) if wanted == "all" else []
    found = [name.strip() for name in wanted.split(",")]
    for name in found:
        if name not in PEERS:
            raise OptionError(unknown("peer", name, [*PEERS, "all", "none"]))
    return found
