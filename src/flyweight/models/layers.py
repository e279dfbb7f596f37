"""Linear, Embedding and RMSNorm: holders of weights, without autograd.

A Linear may stand for several projections with one input (q/k/v, gate/up). Neighbours that agree in scheme are one
weight and one call, VPTQ's with their codebooks one call; the others (differing g_idx, mixed bits) are run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flyweight.errors import CheckpointError
from flyweight.kernels import dispatch, vptq
from flyweight.tensors import QuantTensor, merge
from flyweight.values import known


class Weights(Protocol):
    """Where weights come from: a checkpoint, a preset, or what a quantizer has just made."""

    config: Any  # a Hugging Face config.json as a dict

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, prefix: str) -> QuantTensor: ...

    def check_used(self) -> None: ...


def load_tensor(weights: Weights, name: str, shape: tuple[int, ...], *, device: torch.device | str,
                dtype: torch.dtype) -> Tensor:
    tensor = weights.tensor(name)
    _check_shape(name, tensor.shape, shape)
    return tensor.to(device=device, dtype=dtype)


def _check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise CheckpointError(f"{name}: shape {list(found)} does not fit config.json, which asks for {list(expected)}")


class Linear:
    """y = x Wᵀ + b for the projections `names`, whose outputs of `sizes` follow each other in y."""

    def __init__(self, tensors: Sequence[QuantTensor], bias: Tensor | None = None, *, names: Sequence[str] = (),
                 dtype: torch.dtype, exact: bool = False, gated: bool = False):
        self.names = tuple(names)
        self.sizes = tuple(tensor.shape[-2] for tensor in tensors)
        merged = merge(tensors)
        alone = len(merged) == 1  # then the kernel may add the bias, and pair gate with up
        self.segments = [dispatch.prepare(segment, dtype=dtype, exact=exact, bias=bias if alone else None, gated=gated and alone)
                         for segment in merged]
        self.bias = None if alone and self.segments[0].adds_bias else bias
        self.watch: Callable[[Tensor], None] | None = None  # called with every input, for calibration
        self.single: Callable[..., Tensor] | None = self.segments[0].run if len(self.segments) == 1 else None
        if self.single is None and (joined := vptq.join([segment.run for segment in self.segments], self.bias)):
            self.single, self.bias = joined, None

    @classmethod
    def load(cls, weights: Weights, prefix: str, names: Sequence[str], *, sizes: Sequence[int], in_features: int, bias: bool,
             device: torch.device | str, dtype: torch.dtype, exact: bool = False, gated: bool = False) -> Linear:
        """`bias` says what the config promises; a bias in the file (GPTQ tools write zeros) is used either way."""
        tensors, biases, given = [], [], False
        for name, size in zip(names, sizes, strict=True):
            tensor = weights.linear(prefix + name)
            _check_shape(prefix + name, tensor.shape, (size, in_features))
            tensors.append(tensor.to(device))
            there = weights.has(f"{prefix}{name}.bias")
            given = given or there
            if bias or there:
                biases.append(load_tensor(weights, f"{prefix}{name}.bias", (size,), device=device, dtype=dtype))
            else:
                biases.append(torch.zeros(size, device=device, dtype=dtype))
        joined = torch.cat(biases)
        used = known(joined.any(), otherwise=given)
        return cls(tensors, joined if used else None, names=names, dtype=dtype, exact=exact, gated=gated)

    def __call__(self, x: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(x)
        out = self.single(x) if self.single else torch.cat([segment(x) for segment in self.segments], -1)
        return out if self.bias is None else out.add_(self.bias)

    def substitute(self, multiply: Callable[[Tensor], Tensor] | None) -> None:
        """From now on `multiply` computes x Wᵀ: quantization tries weights out. The prepared ones are let go.

        None: nothing does, until the next call of this.
        """
        self.segments = []
        self.single = multiply

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


class Embedding:
    def __init__(self, weight: Tensor):
        self.weight = weight  # [vocab, hidden]

    def __call__(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self.weight)


class RMSNorm:
    """The weight and epsilon; the arithmetic is an op of the device."""

    def __init__(self, weight: Tensor, epsilon: float):
        self.weight, self.epsilon = weight, epsilon
