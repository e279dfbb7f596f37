"""Keys whose channels are of one size, for a cache that keeps them in 8 bits.

    q · k = Σ (q_c · 2^−e_c) · (k_c · 2^e_c)

A token's key has one scale for all channels of a head (kv_format.py), so a few large channels leave
few steps to the others. Qwen2.5's biases make such channels: they are a hundred times as large as
the rest. Small channels are multiplied by a power of two as the weights are loaded, and those of
the queries divided by it. No product changes, and since it is a power of two no rounding does.

How large a channel can be is told by the weights: the norm's weight where keys are normed, else
|bias| + PEAK · √(Σ (weight · norm)²), as if the channels of the hidden state were independent. Rope
turns two channels into each other, so these have one exponent.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flyweight.models.config import ModelConfig
from flyweight.models.kv_scheme import KVScheme
from flyweight.models.layers import Weights
from flyweight.models.plan import LayerPlan
from flyweight.models.standard import plan_of
from flyweight.tensors import QuantTensor, scale_rows

PEAK = 1.0  # standard deviations that a channel may be away from its bias
SHARE = 0.75  # of the difference in bits: large channels need finer steps than small ones
MOST = 8  # the largest exponent: smaller channels hardly count, and 16-bit scales have their limits


def balance_keys(weights: Weights, scheme: KVScheme) -> Weights:
    """`weights`, with balanced keys where the cache keeps them in evenly spaced codes."""
    even = scheme.format is not None and not scheme.format.dtype.is_floating_point
    return BalancedKeys(weights) if even and scheme.scales is None else weights


class BalancedKeys:
    """Weights as they are, but for queries and keys."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.config: dict[str, Any] = weights.config
        plan = plan_of(ModelConfig.from_dict(weights.config))
        self.ropes = plan.ropes
        self.layers = {name: layer for layer in plan.layers for name in balanced_names(layer)}
        self.factors: dict[str, Tensor | None] = {}  # of rows, by the name of a linear or a norm
        self.read: dict[str, QuantTensor] = {}  # linears that were looked at before their turn

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def tensor(self, name: str) -> Tensor:
        found = self.weights.tensor(name)
        factors = self.factors_of(name.rpartition(".")[0])
        return found if factors is None else found * factors.to(found)

    def linear(self, prefix: str) -> QuantTensor:
        factors = self.factors_of(prefix)
        found = self.read.pop(prefix) if prefix in self.read else self.weights.linear(prefix)
        if factors is None:
            return found
        scaled = scale_rows(found, factors)
        assert scaled is not None
        return scaled

    def check_used(self) -> None:
        self.weights.check_used()

    def factors_of(self, name: str) -> Tensor | None:
        """Of the rows of a linear and its bias, or of a norm's weight; None: it stays as it is."""
        layer = self.layers.get(name)
        if layer is None:
            return None
        if name not in self.factors:
            self.factors |= self.balance(layer)
        return self.factors[name]

    def balance(self, layer: LayerPlan) -> dict[str, Tensor | None]:
        """Powers of two for what makes the queries and keys of a layer."""
        attention = layer.attention
        query, key = balanced_names(layer)
        if attention.key_norm is not None:
            sizes = self.weights.tensor(f"{key}.weight").float().abs()[None]
        else:
            self.read |= {name: self.weights.linear(name) for name in (query, key)}
            if any(scale_rows(self.read[name], torch.ones(1)) is None for name in (query, key)):
                return {query: None, key: None}
            sizes = self.key_sizes(layer, key).view(attention.kv_heads, attention.head_dim)
        rotary = self.ropes[attention.rope].rotary_dim if attention.rope is not None else 0
        exponents = balancing_exponents(sizes, rotary)
        queries = -exponents
        if attention.key_norm is None:
            queries = queries.repeat_interleave(attention.heads // attention.kv_heads, 0)
        return {query: torch.exp2(queries).flatten(), key: torch.exp2(exponents).flatten()}

    def key_sizes(self, layer: LayerPlan, key: str) -> Tensor:
        """How large each channel of the keys is, [kv_heads · head_dim]."""
        weight = self.read[key].dequantize()
        norm = layer.before_attention
        if norm is not None:
            by = self.weights.tensor(f"{layer.prefix}{norm.name}.weight").to(weight)
            weight = weight * (by + 1 if norm.plus_one else by)
        sizes = PEAK * weight.square().sum(-1).sqrt()
        if self.weights.has(f"{key}.bias"):
            sizes = sizes + self.weights.tensor(f"{key}.bias").to(weight).abs()
        return sizes


def balanced_names(layer: LayerPlan) -> tuple[str, ...]:
    """What queries and keys are made by: their norms, else their linears; none where the files hold
    both in one, or in an order of their own.
    """
    attention = layer.attention
    if layer.delta is not None or attention.latent is not None or attention.whole_norms:
        return ()
    if attention.query_norm is not None and attention.key_norm is not None:
        norms = (attention.query_norm, attention.key_norm)
        plain = not any(norm.plus_one for norm in norms)
        return tuple(layer.prefix + norm.name for norm in norms) if plain else ()
    group = layer.qkv
    if attention.gated or group.interleaved is not None or len(group.linears) != 3:
        return ()
    return tuple(layer.prefix + name for name in group.linears[:2])


def balancing_exponents(sizes: Tensor, rotary: int) -> Tensor:
    """Of channels [heads, head_dim] of these sizes; half of the way is left to the queries, so that
    neither side leaves the range of 16 bits.
    """
    half = rotary // 2
    pairs = (sizes[:, :half].square() + sizes[:, half:rotary].square()).sqrt() / math.sqrt(2)
    sizes = torch.cat([pairs, pairs, sizes[:, rotary:]], -1).clamp(min=torch.finfo().tiny)
    behind = torch.log2(sizes.amax(-1, keepdim=True) / sizes)
    exponents = (SHARE * behind).round().clamp(max=MOST)
    return exponents - (exponents.amax(-1, keepdim=True) / 2).floor()
