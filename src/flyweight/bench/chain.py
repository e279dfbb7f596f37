"""The four linears of a decoder block as one dependent chain, as decoding runs them: qkv → o → gate/up → down.

Norms, residual additions and silu·mul are part of it, fused where the kernels fuse them; what attention would turn into
o's input is handed on as it is. Several layers of different weights make one graph, so that every weight comes from
memory, and the time is that of one layer. Torch runs the same chain in 16 bits beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, figures, relative_error
from flyweight.bench.replay import Work
from flyweight.bench.rows import Row
from flyweight.bench.shapes import linears
from flyweight.kernels import dispatch, gemv
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.tensors import Plain, QuantTensor

LAYERS = {"cuda": 12, "cpu": 2}
EPSILON = 1e-6
Layer = dict[str, Any]  # by the names of `shapes.linears`


def measure_chain(preset: str, case: Case, *, device: torch.device, samples: int, bandwidth: float) -> Iterator[Row]:
    """One row; `case` gives format, dtype and rows."""
    shapes, count = linears(preset), LAYERS[device.type]
    weights = [{name: FORMATS[case.format](case, shape, device) for name, shape in shapes.items()} for _ in range(count)]
    width = shapes["o"][1]
    x = torch.randn(case.rows, shapes["o"][0], device=device).to(case.dtype)
    norm = torch.ones(x.shape[-1], device=device, dtype=case.dtype)
    prepared = [lay_out(layer, case) for layer in weights]
    fused = all(isinstance(one.run, CudaLinear) for one in prepared[0].values())
    step = fused_step(case, shapes, norm=norm) if fused else plain_step(norm, width)
    error = relative_error(step(prepared[0], x.clone()), exact_step(weights[0], x, width))
    torch_dtype = torch.bfloat16 if device.type == "cuda" else case.dtype
    dense = [{name: Plain.random(shape, i, device, dtype=torch_dtype).weight for name, shape in shapes.items()}
             for i in range(count)]
    works = {"chain": Work(lambda _: run_layers(step, prepared, x)),
             "torch": Work(lambda _: run_layers(torch_step(norm.to(torch_dtype), width), dense, x.to(torch_dtype)))}
    times = {name: [time / count for time in found] for name, found in replay.measure(works, device, samples=samples).items()}
    nbytes = sum(one.nbytes for one in prepared[0].values())
    bits = 8 * sum(t.nbytes for t in weights[0].values()) / sum(n * k for n, k in shapes.values())
    yield case.fields() | {"in_features": None, "out_features": None, "shape": None, "chain": preset, "kernel": next(
        iter(prepared[0].values())).kernel, "status": "ok", "relative_error": error,
        "torch_dtype": str(torch_dtype).removeprefix("torch."), "bits_per_weight": round(bits, 4)} | figures(
        times["chain"], hot=None, torch_times=times["torch"], nbytes=nbytes, bandwidth=bandwidth)


def lay_out(layer: dict[str, QuantTensor], case: Case) -> Layer:
    one_kernel = all(gemv.format_of(tensor, case.dtype) for tensor in layer.values())
    return {name: dispatch.prepare(tensor, dtype=case.dtype, gated=name == "gate_up" and one_kernel)
            for name, tensor in layer.items()}


def run_layers(step: Callable[[Layer, Tensor], Tensor], layers: list[Layer], x: Tensor) -> Tensor:
    hidden = x.clone()  # the fused kernels add into it
    for layer in layers:
        hidden = step(layer, hidden)
    return hidden


def fused_step(case: Case, shapes: dict[str, tuple[int, int]], *, norm: Tensor) -> Callable[[Layer, Tensor], Tensor]:
    def buffer(width: int) -> Tensor:
        return torch.zeros(case.rows, width, dtype=norm.dtype, device=norm.device)

    qkv, gated, width = buffer(shapes["qkv"][0]), buffer(shapes["down"][1]), shapes["o"][1]

    def step(layer: Layer, x: Tensor) -> Tensor:
        layer["qkv"].run.fused(x, qkv, norm=norm, epsilon=EPSILON)
        layer["o"].run.fused(qkv[:, :width].contiguous(), x, residual=x)
        packed = layer["down"].run.packed_input(len(x), x.device, before=layer["gate_up"].run)
        layer["gate_up"].run.fused(x, gated, norm=norm, epsilon=EPSILON, to=packed)
        layer["down"].run.fused(packed or gated, x, residual=x)
        return x

    return step


def plain_step(norm: Tensor, width: int) -> Callable[[Layer, Tensor], Tensor]:
    ops = dispatch.decoder_ops(norm.device)

    def step(layer: Layer, x: Tensor) -> Tensor:
        qkv = layer["qkv"](ops.rms_norm(x, norm, EPSILON))
        normed, x = ops.add_rms_norm(layer["o"](qkv[:, :width]), x, norm, epsilon=EPSILON)
        return x + layer["down"](ops.silu_mul(layer["gate_up"](normed)))

    return step


def torch_step(norm: Tensor, width: int) -> Callable[[Layer, Tensor], Tensor]:
    def step(layer: Layer, x: Tensor) -> Tensor:
        x = x + F.linear(F.linear(F.rms_norm(x, norm.shape, norm, EPSILON), layer["qkv"])[:, :width], layer["o"])
        gate, up = F.linear(F.rms_norm(x, norm.shape, norm, EPSILON), layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    return step


def exact_step(layer: dict[str, QuantTensor], x: Tensor, width: int) -> Tensor:
    """Float64, by the reference of each weight."""
    wide = x.double()

    def normed(hidden: Tensor) -> Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + EPSILON).rsqrt()

    wide = wide + layer["o"].matmul_reference(layer["qkv"].matmul_reference(normed(wide))[:, :width])
    gate, up = layer["gate_up"].matmul_reference(normed(wide)).chunk(2, -1)
    return wide + layer["down"].matmul_reference(F.silu(gate) * up)
