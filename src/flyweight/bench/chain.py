"""The four linears of a block as one dependent chain, as decoding runs them: qkv, o, gate/up, down.

Norms, residual additions and silu·mul are part of it, fused where the kernels fuse them; what
attention would turn into o's input is handed on as it is. Several layers of different weights make
one graph, so that every weight comes from memory, and the time is that of one layer. Torch runs the
same chain in 16 bits beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, chosen, figures, judged, relative_error
from flyweight.bench.replay import Work
from flyweight.bench.rows import Row
from flyweight.bench.shapes import linears
from flyweight.kernels import dispatch
from flyweight.kernels.linear.fused import FusedLinear, Norm
from flyweight.models.buffers import Buffers
from flyweight.tensors import Plain, QuantTensor, Sparse24
from flyweight.tensors.rounding import product_bound

LAYERS = {"cuda": 12, "cpu": 2}
EPSILON = 1e-6
SILU = "silu"
NORMED = (
    "qkv",
    "gate_up",
)  # linears behind a norm; the others add their result to the hidden state
Layer = dict[str, Any]  # by the names of `shapes.linears`


def measure_chain(
    preset: str, case: Case, *, device: torch.device, samples: int, bandwidth: float
) -> Iterator[Row]:
    """One row; `case` gives format, dtype and rows."""
    shapes = linears(preset)
    count = LAYERS[device.type]
    make = FORMATS[case.format]
    weights = [
        {name: make(case, shape, device) for name, shape in shapes.items()} for _ in range(count)
    ]
    width = shapes["o"][1]
    x = torch.randn(case.rows, shapes["o"][0], device=device).to(case.dtype)
    norm = torch.ones(x.shape[-1], device=device, dtype=case.dtype)
    prepared = [lay_out(layer, case) for layer in weights]
    step = fused_step(case, shapes, norm=Norm(norm, EPSILON))
    error = relative_error(step(prepared[0], x.clone()), exact_step(weights[0], x, width))
    torch_dtype = torch.bfloat16 if device.type == "cuda" else case.dtype
    dense = [
        {
            name: Plain.random(shape, i, device, dtype=torch_dtype).weight
            for name, shape in shapes.items()
        }
        for i in range(count)
    ]
    plain = torch_step(norm.to(torch_dtype), width)
    works = {
        "chain": Work(lambda _: run_layers(step, prepared, x)),
        "torch": Work(lambda _: run_layers(plain, dense, x.to(torch_dtype))),
    }
    measured = replay.measure(works, device, samples=samples)
    times = {name: [time / count for time in found] for name, found in measured.items()}
    nbytes = sum(one.nbytes for one in prepared[0].values())
    bits = 8 * sum(t.nbytes for t in weights[0].values()) / sum(n * k for n, k in shapes.values())
    facts = {
        "in_features": None,
        "out_features": None,
        "shape": None,
        "chain": preset,
        "kernel": kernels_of(prepared[0], case.rows),
        "torch_dtype": str(torch_dtype).removeprefix("torch."),
        "bits_per_weight": round(bits, 4),
    }
    first = weights[0]["o"]
    kind = first.inner.kind if isinstance(first, Sparse24) else first.kind
    bound = product_bound(kind, case.dtype, products=len(shapes))
    yield (
        case.fields()
        | facts
        | judged(error, bound)
        | figures(
            times["chain"], hot=None, torch_times=times["torch"], nbytes=nbytes, bandwidth=bandwidth
        )
    )


def lay_out(layer: dict[str, QuantTensor], case: Case) -> Layer:
    return {
        name: dispatch.prepare(
            tensor, dtype=case.dtype, activation=SILU if name == "gate_up" else None
        )
        for name, tensor in layer.items()
    }


def kernels_of(layer: dict[str, FusedLinear], rows: int) -> str:
    """Those that really run, each once, in the order of the chain."""
    found = [
        chosen(linear, rows, norm=name in NORMED, residual=name not in NORMED).kernel
        for name, linear in layer.items()
    ]
    return " + ".join(dict.fromkeys(found))


def run_layers(step: Callable[[Layer, Tensor], Tensor], layers: list[Layer], x: Tensor) -> Tensor:
    hidden = x.clone()  # the fused kernels add into it
    for layer in layers:
        hidden = step(layer, hidden)
    return hidden


def fused_step(
    case: Case, shapes: dict[str, tuple[int, int]], *, norm: Norm
) -> Callable[[Layer, Tensor], Tensor]:
    buffers = Buffers(case.rows, dtype=norm.weight.dtype, device=norm.weight.device)
    width = shapes["o"][1]
    inner = shapes["down"][1]

    def step(layer: Layer, x: Tensor) -> Tensor:
        qkv = buffers.take("qkv", shapes["qkv"][0], len(x))
        layer["qkv"].project(x, qkv, norm=norm)
        layer["o"].project(qkv[:, :width].contiguous(), x, residual=x)
        handover = layer["down"].negotiate(layer["gate_up"], len(x), SILU)
        between = None
        if handover.to is None:
            between = buffers.take("gated", 2 * inner if handover.late else inner, len(x))
        gated = layer["gate_up"].project(x, between, norm=norm, activation=SILU, handover=handover)
        layer["down"].project(handover.to or gated, x, residual=x, handover=handover)
        return x

    return step


def torch_step(norm: Tensor, width: int) -> Callable[[Layer, Tensor], Tensor]:
    def step(layer: Layer, x: Tensor) -> Tensor:
        x = x + F.linear(
            F.linear(F.rms_norm(x, norm.shape, norm, EPSILON), layer["qkv"])[:, :width], layer["o"]
        )
        gate, up = F.linear(F.rms_norm(x, norm.shape, norm, EPSILON), layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    return step


def exact_step(layer: dict[str, QuantTensor], x: Tensor, width: int) -> Tensor:
    """Float64, by the reference of each weight."""
    wide = x.double()

    def normed(hidden: Tensor) -> Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + EPSILON).rsqrt()

    wide = wide + layer["o"].matmul_reference(
        layer["qkv"].matmul_reference(normed(wide))[:, :width]
    )
    gate, up = layer["gate_up"].matmul_reference(normed(wide)).chunk(2, -1)
    return wide + layer["down"].matmul_reference(F.silu(gate) * up)
