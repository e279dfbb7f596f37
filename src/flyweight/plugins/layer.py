"""What becomes of a layer of another engine whose product is ours. Needs no other engine.

The engines of the vLLM family name the parts of a layer alike (`bias`, `skip_bias_add`,
`input_is_parallel`, parameters with `input_dim` and `output_dim`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels.linear.repeated import RepeatedLinear
from flyweight.plugins import op
from flyweight.tensors import QuantTensor

KEY = "flyweight_key"  # the parameter by which the op finds a layer's linear


@dataclass(frozen=True)
class Taken:
    """A layer that has become a linear of ours."""

    outputs: int
    adds_bias: bool  # which is part of the product then
    by: RepeatedLinear

    def multiply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() or type(x) is not Tensor:  # traced with fake tensors
            y = op.linear(x, getattr(layer, KEY), self.outputs)
        else:
            y = op.multiply(x, self.by)
        return y if bias is None or self.adds_bias else y + bias


def take(
    layer: torch.nn.Module, parts: list[QuantTensor], *, dtype: torch.dtype, device: torch.device
) -> Taken:
    """Lay the parts of a (merged) projection out as one linear, kept as long as the layer lives."""
    bias = folded_bias(layer)
    found = op.prepare(parts, dtype=dtype, bias=bias)
    key = op.hold(found, device, owner=layer)
    layer.register_parameter(KEY, torch.nn.Parameter(key, requires_grad=False))
    outputs = sum(part.matrix_shape[0] for part in parts)
    return Taken(outputs, adds_bias=found.adds_bias and bias is not None, by=op.held(key))


def folded_bias(layer: torch.nn.Module) -> Tensor | None:
    """The bias that every call of this layer adds: of layers that are cut by inputs, one rank adds
    it, after the others' sums.
    """
    if getattr(layer, "skip_bias_add", False) or hasattr(layer, "input_is_parallel"):
        return None
    bias = getattr(layer, "bias", None)
    return bias.data if isinstance(bias, Tensor) else None


def let_go(layer: torch.nn.Module, *names: str | None) -> None:
    """The originals' memory; their names stay, as engines look at them."""
    for name in names:
        parameter = getattr(layer, name or "", None)
        if isinstance(parameter, Tensor):
            parameter.data = parameter.data.new_empty(0)
