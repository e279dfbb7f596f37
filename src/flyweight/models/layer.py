"""One decoder layer, written once: the program that runs a `LayerPlan` with its weights.

The same program serves plain torch on any device, prompts through fused CUDA kernels, and captured
decode steps. What differs is behind two borders: a `Linear` fuses what its kernels can and does the
rest one by one, and a stage (`attention.py`, `decode_step.py`) turns the hidden state into what o
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from flyweight.kernels.dispatch import decoder_ops
from flyweight.kernels.gated_delta.shape import DeltaWeights
from flyweight.kernels.linear.fused import Handover, Norm, PackedInput
from flyweight.models.adapters import Adapters
from flyweight.models.buffers import Buffers
from flyweight.models.config import ModelConfig
from flyweight.models.delta_net import load_delta
from flyweight.models.latent import Latent
from flyweight.models.layers import Linear, Weights, load_tensor
from flyweight.models.mlp import GatedMlp
from flyweight.models.moe import Experts
from flyweight.models.plan import ExpertsPlan, Group, LayerPlan, NormPlan
from flyweight.models.standard import plan_of


class Stage(Protocol):
    """Norm, q/k/v, rope and attention of one step, over whatever holds its keys and values."""

    @property
    def lengths(self) -> Tensor | None:
        """Of each row's sequence, where rows of length 0 are padding."""

    @property
    def adapters(self) -> Tensor | None:
        """The slot of each row's adapter (`batch.NOBODY`: none); None: nobody has one."""

    @property
    def beside(self) -> bool:
        """Whether all kernels of a layer leave each other room on an SM."""

    def attend(self, block: Block, hidden: Tensor) -> Tensor | PackedInput:
        """[..., tokens, hidden] → what o multiplies with: [..., tokens, heads · head_dim]"""


class Block:
    """A layer's weights; `linears` by group name, `norms` by the name of their weight."""

    def __init__(
        self,
        plan: LayerPlan,
        *,
        linears: dict[str, Linear],
        norms: dict[str, Norm],
        mlp: GatedMlp | Experts,
        ops: ModuleType,
        head_norm: Norm | None = None,
        whole_norms: tuple[Norm, Norm] | None = None,
        sinks: Tensor | None = None,
    ):
        self.plan = plan
        self.linears = linears
        self.norms = norms
        self.mlp = mlp
        self.ops = ops
        self.head_norm = head_norm  # its weight [heads + kv_heads, head_dim]
        self.whole_norms = whole_norms  # of all queries and of all keys of a token
        self.sinks = sinks  # [heads]
        # of a layer with a state in the place of attention
        self.delta: DeltaWeights | None = None
        # of attention whose heads share their keys and values
        self.latent: Latent | None = None
        self.qkv = linears[plan.qkv.name]
        self.o = linears[plan.o.name]

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        exact: bool = False,
        adapters: Adapters | None = None,
    ) -> Block:
        plan = plan_of(config).layers[index]
        ops = decoder_ops(device)
        prefix = plan.prefix
        linears = {
            group.name: Linear.load(
                weights, prefix, group, device=device, dtype=dtype, exact=exact, adapters=adapters
            )
            for group in plan.groups
        }

        def tensor(name: str, width: int) -> Tensor:
            return load_tensor(weights, prefix + name, (width,), device=device, dtype=dtype)

        norms = {
            norm.name: Norm(
                tensor(f"{norm.name}.weight", plan.hidden_size), plan.epsilon, norm.plus_one
            )
            for norm in plan.norms
        }
        if isinstance(plan.mlp, ExpertsPlan):
            experts = Experts.load(weights, plan, linears, ops=ops, device=device, dtype=dtype)
            if experts.waits_for_choices:
                linears[plan.qkv.name].fused.fetch_early()
            mlp: GatedMlp | Experts = experts
        else:
            mlp = GatedMlp(plan.mlp, linears)
        sinks = tensor(plan.attention.sinks, plan.attention.heads) if plan.attention.sinks else None
        block = cls(
            plan,
            linears=linears,
            norms=norms,
            mlp=mlp,
            ops=ops,
            head_norm=None if plan.delta else _head_norm(plan, tensor),
            whole_norms=_whole_norms(plan, tensor),
            sinks=sinks,
        )
        if plan.delta is not None:
            block.delta = load_delta(weights, plan, plan.delta, device)
        block.latent = Latent.load(plan, linears, tensor, device=device, dtype=dtype)
        return block

    @property
    def index(self) -> int:
        return self.plan.index

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.plan.groups

    def norm(self, plan: NormPlan | None) -> Norm | None:
        return None if plan is None else self.norms[plan.name]

    # -- the program -----------------------------------------------------------------------

    def run(
        self,
        hidden: Tensor,
        stage: Stage,
        *,
        rows: Tensor | None = None,
        in_place: bool = False,
        buffers: Buffers | None = None,
    ) -> Tensor:
        """[..., tokens, hidden] → the same, residual included. `rows`: the tokens whose results are
        wanted; keys and values are those of all. `in_place`: the result may take the place of the
        input.
        """
        plan = self.plan
        attended = stage.attend(self, hidden)
        adapters = stage.adapters
        if rows is not None:
            assert isinstance(attended, Tensor)
            attended = attended[rows]
            hidden = hidden[rows]
            adapters = None if adapters is None else adapters[rows]
            if not len(rows):  # kernels cannot be launched for no rows
                return hidden
        out = hidden if in_place else None
        if plan.adds_plainly:
            handover = Handover(beside=stage.beside)
            hidden = self.o.project(
                attended, out, residual=hidden, handover=handover, adapters=adapters
            )
            out = hidden if in_place else None
            return self.mlp.project(
                hidden,
                out,
                norm=self.norm(plan.before_mlp),
                residual=hidden,
                buffers=buffers,
                lengths=stage.lengths,
                adapters=adapters,
                beside=stage.beside,
            )
        y = self.o.project(attended, adapters=adapters)
        hidden = self._add(hidden, y, plan.after_attention, out)
        y = self.mlp.project(
            hidden,
            norm=self.norm(plan.before_mlp),
            residual=None,
            buffers=buffers,
            lengths=stage.lengths,
            adapters=adapters,
        )
        return self._add(hidden, y, plan.after_mlp, out)

    def _add(self, hidden: Tensor, y: Tensor, after: NormPlan | None, out: Tensor | None) -> Tensor:
        scale = self.plan.residual_scale
        return self.ops.add_normed(hidden, y, self.norm(after), scale=scale, out=out)

    def forward(self, hidden: Tensor, stage: Stage) -> Tensor:
        return self.run(hidden, stage)

    # -- for quantization ------------------------------------------------------------------

    def sublayer(
        self, group: Group, mix: Callable[[Block, Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor] | None:
        """What attention or the MLP makes of the input of its first group; None for groups whose
        own output that is already. `mix`: from q, k and v to attention's result
        (`PromptStage.mix`).
        """
        if group == self.plan.qkv:
            return lambda x: self.o(mix(self, self.qkv(x)))
        return self.mlp if group == self.mlp.first_group else None

    def watch(self, callback: Callable[[Group, Tensor], None] | None) -> None:
        """Call back with the input of every group of linears, or stop doing so (None)."""
        for group in self.groups:
            self.linears[group.name].watch = None if callback is None else _bind(callback, group)

    def use_ops(self, ops: ModuleType) -> None:
        """Run with other ops: those that gradients pass through, for one."""
        self.ops = ops
        self.mlp.use_ops(ops)
        for linear in self.linears.values():
            linear.use_ops(ops)


def _bind(callback: Callable[[Group, Tensor], None], group: Group) -> Callable[[Tensor], None]:
    return lambda x: callback(group, x)


def _head_norm(plan: LayerPlan, tensor: Callable[[str, int], Tensor]) -> Norm | None:
    """One table for all heads, so that queries and keys are normed in one call."""
    attention = plan.attention
    if attention.query_norm is None or attention.key_norm is None or attention.whole_norms:
        return None
    rows = []
    for norm, heads in (
        (attention.query_norm, attention.heads),
        (attention.key_norm, attention.kv_heads),
    ):
        weight = tensor(f"{norm.name}.weight", attention.head_dim)
        if norm.plus_one:
            weight = (weight.float() + 1).to(weight.dtype)
        rows.append(weight.expand(heads, attention.head_dim))
    return Norm(torch.cat(rows), plan.epsilon)


def _whole_norms(plan: LayerPlan, tensor: Callable[[str, int], Tensor]) -> tuple[Norm, Norm] | None:
    attention = plan.attention
    query = attention.query_norm
    key = attention.key_norm
    if query is None or key is None or not attention.whole_norms:
        return None
    size = attention.head_dim
    weights = [
        tensor(f"{query.name}.weight", attention.heads * size),
        tensor(f"{key.name}.weight", attention.kv_heads * size),
    ]
    first, second = (Norm(weight, plan.epsilon) for weight in weights)
    return first, second
