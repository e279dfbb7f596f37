"""A model in another basis of its hidden state, in which weights are near to normal: the same
function, with every matrix turned before it is quantized. Nothing of it is left at run time.

    embedding · Q,  W · diag(norm) · Q behind a norm that is then all ones,  Qᵀ · W into the hidden
    state;  the head, too, so that it is no longer the embedding's twin

An RMS norm without weights does not see Q. What attention makes of the values of a head is turned
by a matrix of the head's own, in v's outputs and o's inputs. down's inputs alone stay as they are.

Q = signs · (Hadamard ⊗ orthogonal): all entries of a row alike or nearly so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flyweight.models.config import ModelConfig
from flyweight.models.plan import ExpertsPlan, Group, LayerPlan, NormPlan
from flyweight.models.standard import plan_of
from flyweight.quant.statistics import matmul_precision
from flyweight.tensors import Plain, QuantTensor

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

Change = Callable[[Tensor], Tensor]  # of a float32 weight [out, in], or of a bias [out, 1]


def orthogonal(size: int, seed: int) -> Tensor:
    """float32 [size, size]"""
    generator = torch.Generator().manual_seed(seed)
    odd = size // (size & -size)
    turned, upper = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
    whole = turned * upper.diagonal().sign()
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1
    return (signs * whole / math.sqrt(size // odd)).float()


def can_rotate(config: ModelConfig) -> bool:
    """Whether every layer reads the hidden state behind a norm and adds to it as it is."""
    return all(
        layer.before_attention is not None
        and layer.before_mlp is not None
        and layer.after_attention is None
        and layer.after_mlp is None
        for layer in plan_of(config).layers
    )


def has_own_values(layer: LayerPlan) -> bool:
    """Whether v and o can share a matrix for each head: a gate between them knows its numbers."""
    attention = layer.attention
    return (
        layer.delta is None
        and attention.kind == "heads"
        and not attention.gated
        and layer.o.source == "self_attn.v_proj"
        and layer.o.in_features == attention.out_features
    )


class Rotated:
    """In the place of the checkpoint `source`, whose files stay as they are."""

    def __init__(self, source: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.inner = source
        self.device = torch.device(device)
        self.seed = seed
        self.plan = plan_of(ModelConfig.from_dict(source.config))
        self.tied = ModelConfig.from_dict(source.config).tied_embeddings
        self.config = dict(source.config) | {"tie_word_embeddings": False}
        self.basis = orthogonal(self.plan.layers[0].hidden_size, seed).to(self.device)
        self.norms = {self.plan.norm.name: self.plan.norm}  # that others take up
        self.changes: dict[str, list[Change]] = {}  # of weights, by the module's name
        self.biases: dict[str, list[Change]] = {}
        self.change(EMBEDDING, self.inputs(None))
        self.change(HEAD, self.inputs(self.plan.norm))
        for layer in self.plan.layers:
            self.add_layer(layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # -- what is changed, and how ------------------------------------------------------------------

    def change(self, module: str, change: Change, *, bias: bool = False) -> None:
        self.changes.setdefault(module, []).append(change)
        if bias:
            self.biases.setdefault(module, []).append(change)

    def inputs(self, norm: NormPlan | None, prefix: str = "") -> Change:
        """Of a weight that reads the hidden state behind `norm`, which it takes up."""

        def turn(weight: Tensor) -> Tensor:
            if norm is not None:
                name = f"{prefix}{norm.name}.weight"
                weight = weight * (self.inner.tensor(name).to(weight) + float(norm.plus_one))
            return weight @ self.basis

        return turn

    def outputs(self, weight: Tensor) -> Tensor:
        return self.basis.T @ weight

    def add_layer(self, layer: LayerPlan) -> None:
        before, middle = layer.before_attention, layer.before_mlp
        assert before is not None and middle is not None
        self.norms |= {layer.prefix + norm.name: norm for norm in (before, middle)}
        self.read(layer, layer.qkv.linears, before)
        self.write(layer, layer.o)
        if has_own_values(layer):
            self.turn_values(layer)
        if isinstance(layer.mlp, ExpertsPlan):
            names = (layer.mlp.router.weight, layer.mlp.shared_gate)
            self.read(layer, [name.removesuffix(".weight") for name in names if name], middle)
            members = [*layer.mlp.experts, *([layer.mlp.shared] if layer.mlp.shared else [])]
        else:
            members = [layer.mlp]
        for mlp in members:
            self.read(layer, mlp.gate_up.linears, middle)
            self.write(layer, mlp.down)

    def read(self, layer: LayerPlan, modules: Sequence[str], norm: NormPlan) -> None:
        for module in modules:
            self.change(layer.prefix + module, self.inputs(norm, layer.prefix))

    def write(self, layer: LayerPlan, group: Group) -> None:
        for module in group.linears:
            self.change(layer.prefix + module, self.outputs, bias=True)

    def turn_values(self, layer: LayerPlan) -> None:
        attention = layer.attention
        size, shared = attention.head_dim, attention.heads // attention.kv_heads
        first = self.seed + 1 + layer.index * attention.kv_heads
        turns = torch.stack([orthogonal(size, first + i) for i in range(attention.kv_heads)])
        turns = turns.to(self.device)

        def values(weight: Tensor) -> Tensor:
            return (turns.mT @ weight.unflatten(0, (-1, size))).flatten(0, 1)

        def results(weight: Tensor) -> Tensor:
            heads = weight.unflatten(1, (-1, size)).transpose(0, 1)
            turned = heads @ turns.repeat_interleave(shared, 0)
            return turned.transpose(0, 1).flatten(1)

        self.change(layer.prefix + "self_attn.v_proj", values, bias=True)
        self.change(layer.prefix + layer.o.linears[0], results)

    # -- the checkpoint ----------------------------------------------------------------------------

    def names(self) -> list[str]:
        own = [f"{HEAD}.weight"] if self.tied else []
        return list(dict.fromkeys([*self.inner.names(), *own]))

    def has(self, name: str) -> bool:
        return self.inner.has(name) or name == f"{HEAD}.weight"

    def linear(self, prefix: str) -> QuantTensor:
        if prefix not in self.changes:
            return self.inner.linear(prefix)
        stored = EMBEDDING if prefix == HEAD and self.tied else prefix
        weight = self.inner.linear(stored).to(self.device).dequantize()
        return Plain(self.turned(weight, self.changes[prefix]))

    def tensor(self, name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self.norms:
            one = 0.0 if self.norms[module].plus_one else 1.0
            return torch.full_like(self.inner.tensor(name), one)
        if kind == "bias" and module in self.biases:
            bias = self.inner.tensor(name)
            turned = self.turned(bias.to(self.device).float()[:, None], self.biases[module])
            return turned[:, 0].to(bias)
        if kind == "weight" and module in self.changes:
            stored = EMBEDDING if module == HEAD and self.tied else module
            weight = self.inner.tensor(f"{stored}.weight")
            turned = self.turned(weight.to(self.device).float(), self.changes[module])
            return turned.to(weight)
        return self.inner.tensor(name)

    @staticmethod
    def turned(weight: Tensor, changes: Sequence[Change]) -> Tensor:
        with matmul_precision("highest"):
            for change in changes:
                weight = change(weight)
        return weight
