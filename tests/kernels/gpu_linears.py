"""Weights of every kind for the tests of the linears on a GPU."""

import dataclasses

import pytest
import torch

from flyweight import gpu
from flyweight.kernels import reference, workspace
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.tensors import Float4, Float8, Int8Channel, IntGroup, Plain, QuantTensor, Sparse24

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FUSED_KINDS = [
    "plain",
    "w8a8",
    "int4:128",
    "int8:64",
    "fp8",
    "fp8-static",
    "sparse-w8a8",
    "sparse-int8:64",
    "sparse-int4:128",
    "fp8-block",
]
# One of every format. The others differ from one of these in sizes of groups or in a scale; they
# see fewer shapes, rows and types, since every one is a kernel to compile.
FORMATS = [
    "plain",
    "w8a8",
    "int4:128",
    "int8:128",
    "fp8",
    "sparse-w8a8",
    "sparse-int8:128",
    "sparse-int4:128",
]
KINDS = [
    "plain",
    "w8a8",
    "int4:128",
    "int4:64",
    "int4:32",
    "int4:channel",
    "int8:128",
    "int8:32",
    "int8:channel",
    "fp8",
    "fp8-static",
    "w8a8-static",
    "sparse-w8a8",
    "sparse-int8:128",
    "sparse-int8:32",
    "sparse-int8:channel",
    "sparse-int4:128",
    "sparse-int4:64",
    "sparse-int4:32",
    "fp8-block",
]


def make(kind: str, shape, seed: int = 0, dtype=torch.bfloat16) -> QuantTensor:
    """A random weight; of every second seed symmetric, or (fp8) with one scale for the whole
    tensor.
    """
    columns, sparse = shape[1], kind.startswith("sparse-")
    if kind.endswith("-static"):  # x beyond three times its deviation is cut off
        scale = torch.tensor([3 / (448 if kind == "fp8-static" else 127)], device="cuda")
        tensor = make(kind.removesuffix("-static"), shape, seed, dtype)
        return dataclasses.replace(
            tensor, input_scale=scale, **({"activation": "static"} if kind == "fp8-static" else {})
        )
    if kind == "fp8-block":  # kernels leave x in 16 bits
        return dataclasses.replace(Float8.random(shape, seed, "cuda", block=128), activation="none")
    if kind == "fp8":
        tensor = Float8.random(shape, seed, "cuda")
        return dataclasses.replace(tensor, scales=tensor.scales[:1]) if seed % 2 else tensor
    if kind == "sparse-w8a8":
        return Sparse24.random(shape, seed, "cuda")
    if kind == "plain":
        return Plain.random(shape, seed, "cuda", dtype=dtype)
    if kind == "w8a8":
        return Int8Channel.random(shape, seed, "cuda")
    if kind == "mxfp4":
        return Float4.random(shape, seed, "cuda")
    bits, group = kind.removeprefix("sparse-").split(":")
    size = columns if group == "channel" else int(group) if columns % int(group) == 0 else 32
    options = dict(bits=int(bits[3:]), group_size=size, dtype=dtype, symmetric=seed % 2 == 1)
    if sparse:
        return Sparse24.random(shape, seed, "cuda", inner=IntGroup, **options)
    return IntGroup.random(shape, seed, "cuda", **options)


def linear_of(tensor: QuantTensor, *, dtype=torch.bfloat16, **options) -> TiledLinear:
    return TiledLinear(tensor, dtype=dtype, ops=reference, **options)


def product_of(tensor: QuantTensor, weight, x: torch.Tensor) -> torch.Tensor:
    """x times a tensor in float64, with x in the codes that a laid-out weight's kernels use."""
    if weight.format.name == "fp8-wide":  # where no matrix unit takes float8 x stays as it is
        return x.double() @ tensor.dequantize(torch.float64).T
    return tensor.matmul_reference(x)


def mailboxes_are_empty() -> bool:
    """Whether every word that was left has been taken."""
    buffers = workspace.current(torch.device("cuda", 0))._buffers
    boxes = [held for (name, _), held in buffers.items() if name == "mailbox"]
    return all((box == -1).all() for box in boxes)


def replayed(multiply, weights, start, *, replays: int) -> list[torch.Tensor]:
    """Some results of a dependent chain in graphs: launches one after the other, then overlapping,
    many times.
    """
    buffers = [torch.empty_like(start) for _ in range(2)]

    def chain(pdl: bool) -> None:
        x = start
        for i, weight in enumerate(weights):
            x = multiply(weight, x, buffers[i % 2], pdl=pdl)

    results = []
    for pdl in (False, True):
        chain(pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(pdl)
        for replay in range(replays if pdl else 1):
            for buffer in buffers:
                buffer.fill_(float("nan"))
            graph.replay()
            if replay % 100 == 0:
                results.append(buffers[(len(weights) - 1) % 2].clone())
    return results


def expected(tensor, x):
    """Float64. Without matrix units for float8 x is not quantized."""
    if isinstance(tensor, Float8) and not gpu.of(0).has_float8:
        return x.double() @ tensor.dequantize().double().T
    return tensor.matmul_reference(x)


def taken_by_gemv(weight):
    """`weight`, or no test: float8 is widened by another kernel where there are no matrix units for
    it.
    """
    if "gemv" not in weight.format.kernels:
        pytest.skip(f"gemv.cu does not take {weight.format.name}")
    return weight


def relative_error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return ((got.double() - want).norm() / want.norm()).item()
