"""A decoder layer as data: what it is made of, in which order, and what differs between families.

    hidden ─► before_attention ─► qkv ─► attention ─► o ─► after_attention ─► +
           ─► before_mlp ─► MLP or experts ─► after_mlp ─► +

A family is a function from its config to a `ModelPlan` (`config.Family`); `standard.standard_plan`
is that of Llama and its like, and others replace what they do otherwise. Executors (`layer.py`) run
a plan, quantization walks it (`LayerPlan.groups`), presets and `info` take their shapes from it.
docs/add-a-model.md adds a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flyweight.kernels.gated_delta.shape import DeltaShape

ROPE = "rope"  # the name of a model's only rope table
LOCAL = "local"  # that of layers with a window, where they have their own


@dataclass(frozen=True)
class RopeConfig:
    """`scaling` holds the numbers of `kind` under their Hugging Face names, the original length
    always filled in.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.scaling)[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = dict(self.scaling).get(key)
        return default if value is None else value


@dataclass(frozen=True)
class NormPlan:
    """An RMS norm by the name of its weight; `plus_one` multiplies with 1 + weight."""

    name: str
    plus_one: bool = False


@dataclass(frozen=True)
class TurnedHeads:
    """`heads` heads that follow each other, of `before` + `rotary` + `after` rows each."""

    heads: int
    rotary: int
    before: int = 0
    after: int = 0

    @property
    def rows(self) -> int:
        return self.heads * (self.before + self.rotary + self.after)


@dataclass(frozen=True)
class Interleaved:
    """Rope turns rows 2i and 2i + 1 of each head together; everybody here turns row i with row
    i + rotary / 2. Loading puts the first outputs (those of queries and keys, `parts`) into that
    order, which no score notices: both sides of every product have it.
    """

    parts: tuple[TurnedHeads, ...]

    def order(self, outputs: int) -> list[int]:
        """Which stored row comes at each place."""
        found: list[int] = []
        for part in self.parts:
            for _ in range(part.heads):
                first = len(found) + part.before
                end = first + part.rotary
                found += range(len(found), first)
                found += [*range(first, end, 2), *range(first + 1, end, 2)]
                found += range(end, end + part.after)
        return [*found, *range(len(found), outputs)]


@dataclass(frozen=True)
class HeadParts:
    """Outputs that files hold head by head, each head with its parts one after the other; here all
    heads of one part come before the next, the parts in the order `wanted`.
    """

    heads: int
    parts: tuple[int, ...]  # their rows, as the files have them
    wanted: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.heads * sum(self.parts)

    def order(self) -> list[int]:
        head = sum(self.parts)
        begins = [sum(self.parts[:part]) for part in range(len(self.parts))]
        return [
            index * head + begins[part] + row
            for part in self.wanted
            for index in range(self.heads)
            for row in range(self.parts[part])
        ]


@dataclass(frozen=True)
class ByParts:
    """`HeadParts` of the first linears of a group, one each; the others stay as they are."""

    linears: tuple[HeadParts, ...]

    def order(self, outputs: int) -> list[int]:
        """Which stored row comes at each place."""
        found: list[int] = []
        for linear in self.linears:
            begin = len(found)
            found += [begin + row for row in linear.order()]
        return [*found, *range(len(found), outputs)]


@dataclass(frozen=True)
class Group:
    """Linears that share one input and are merged into one call, and what makes that input.

    The output channels of `source` are the input channels of `linears`: a factor taken out of one
    can be put into the others. For o_proj that holds where v_proj has as many heads; otherwise each
    v channel feeds several. An empty source: nothing that a factor could be taken out of.
    """

    name: str
    source: str
    linears: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # outputs of each linear
    in_features: int = 0
    bias: bool = False  # whether the config promises one
    activation: str | None = None  # of a merged gate/up
    # outputs in another order than that of the files: rope turns neighbours, or heads hold parts
    interleaved: Interleaved | ByParts | None = None

    @property
    def routed(self) -> bool:
        """Of an expert that sees only the tokens sent to it."""
        return self.name.startswith("experts.")


@dataclass(frozen=True)
class LatentPlan:
    """Keys and values of all heads as one row for each token (multi-head latent attention):

        row = norm(kv_a x)[rank] | rope(kv_a x)[rope_dim]
        key of a head = (kv_b row)[plain_dim] | row's rope part,  value = (kv_b row)[value_dim]

    The cache holds rows. `AttentionPlan.head_dim` is their width, and its one kv head is theirs.
    """

    rank: int
    plain_dim: int  # of queries and keys, that rope does not turn
    rope_dim: int
    value_dim: int
    norm: NormPlan
    kv_b: Group
    # queries through a latent of their own: q_b(norm(q_a x)); None: the group qkv makes queries
    query_norm: NormPlan | None = None
    query_b: Group | None = None
    epsilon: float = 1e-6  # of the two norms, whatever config.json says of others

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.kv_b,) if self.query_b is None else (self.query_b, self.kv_b)

    @property
    def norms(self) -> tuple[tuple[NormPlan, int], ...]:
        """With their widths."""
        own = ((self.norm, self.rank),)
        if self.query_norm is None or self.query_b is None:
            return own
        return (self.query_norm, self.query_b.in_features), *own


@dataclass(frozen=True)
class AttentionPlan:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens that a token sees; None: all before it
    rope: str | None = ROPE  # which table turns queries and keys; None: they are not turned
    query_norm: NormPlan | None = None  # over each head
    key_norm: NormPlan | None = None
    whole_norms: bool = False  # these norms are over all heads together
    soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    # a logit for each head that takes its share of the softmax and gives nothing
    sinks: str | None = None
    # results are multiplied by σ(gate); the group qkv gives the gates of all heads before queries
    gated: bool = False
    latent: LatentPlan | None = None  # keys and values are made of one row for all heads

    @property
    def kind(self) -> str:
        """How attention is done: `heads` have keys and values of their own, or share a `latent`."""
        return "heads" if self.latent is None else "latent"

    @property
    def out_features(self) -> int:
        """What o multiplies with."""
        size = self.head_dim if self.latent is None else self.latent.value_dim
        return self.heads * size

    @property
    def cached_numbers(self) -> int:
        """Of a token in the cache of one layer."""
        return self.head_dim if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def plain(self) -> bool:
        """Whether fused kernels know all of it."""
        return self.soft_cap is None and self.sinks is None


@dataclass(frozen=True)
class DeltaPlan:
    """Gated DeltaNet in the place of attention (`kernels/gated_delta`): the group qkv projects to
    [q | k | v | z | b | a], and a state for each sequence takes the place of keys and values.
    """

    shape: DeltaShape
    conv: str  # [channels, 1, width]
    decay: str  # [value_heads]
    step_bias: str  # [value_heads]
    norm: NormPlan  # over each value head, before the gate

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All but the linears."""
        heads = (self.shape.value_heads,)
        return {
            self.conv: (self.shape.channels, 1, self.shape.width),
            self.decay: heads,
            self.step_bias: heads,
            f"{self.norm.name}.weight": (self.shape.value_dim,),
        }


@dataclass(frozen=True)
class MlpPlan:
    """down(act(gate x) · up x)"""

    gate_up: Group
    down: Group

    @property
    def activation(self) -> str:
        assert self.gate_up.activation is not None
        return self.gate_up.activation

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True)
class RouterPlan:
    """How a token chooses among experts.

    kind  `softmax`: over all experts, then the largest; `chosen_softmax`: the largest, then over
    these;
          `sigmoid`: of each expert by itself, the largest by score + bias
    """

    weight: str
    experts: int
    chosen: int
    normalize: bool
    kind: str = "softmax"
    scale: float = 1.0
    bias: str | None = None
    # experts in so many equal groups, of which the best few are looked into; 1: all experts
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class ExpertsPlan:
    router: RouterPlan
    experts: tuple[MlpPlan, ...]
    shared: MlpPlan | None = None
    shared_gate: str | None = None  # a logit of the shared expert's share; None: it counts whole

    @property
    def groups(self) -> tuple[Group, ...]:
        """All gate/up first, then all down, the shared expert's before the others: how calibration
        sees them.
        """
        members = (*((self.shared,) if self.shared else ()), *self.experts)
        return *(one.gate_up for one in members), *(one.down for one in members)


@dataclass(frozen=True)
class LayerPlan:
    index: int
    hidden_size: int
    epsilon: float
    qkv: Group
    attention: AttentionPlan
    o: Group
    mlp: MlpPlan | ExpertsPlan
    before_attention: NormPlan | None
    before_mlp: NormPlan | None
    after_attention: NormPlan | None = None
    after_mlp: NormPlan | None = None
    residual_scale: float = 1.0  # of what attention and MLP add to the hidden state
    delta: DeltaPlan | None = None  # takes the place of `attention`, which nobody then reads

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.index}."

    @property
    def groups(self) -> tuple[Group, ...]:
        """All linears, in the order in which they run."""
        latent = self.attention.latent
        return self.qkv, *(latent.groups if latent else ()), self.o, *self.mlp.groups

    @property
    def foldable_groups(self) -> tuple[Group, ...]:
        """Those whose source feeds nothing else: experts and router share a norm, and a factor
        taken out of it would have to go into all of them.
        """
        return tuple(
            group
            for group in self.groups
            if group.source and group.name in ("qkv", "q_b", "kv_b", "o", "gate_up", "down")
        )

    @property
    def norms(self) -> tuple[NormPlan, ...]:
        """Over the hidden state."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(norm for norm in places if norm is not None)

    @property
    def adds_plainly(self) -> bool:
        """Whether o and down add their results to the hidden state as they are."""
        return (
            self.after_attention is None and self.after_mlp is None and self.residual_scale == 1.0
        )


@dataclass(frozen=True)
class ModelPlan:
    layers: tuple[LayerPlan, ...]
    ropes: Mapping[str, RopeConfig] = field(default_factory=dict)  # by the name that layers give
    norm: NormPlan = NormPlan("model.norm")
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def routers(self) -> list[str]:
        """Prefixes of routers and shared experts' gates: linears to other engines, and never
        quantized.
        """
        found = []
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertsPlan):
                names = (layer.mlp.router.weight, layer.mlp.shared_gate)
                found += [layer.prefix + name for name in names if name is not None]
        return [name.removesuffix(".weight") for name in found]

    def shape_logits(self, logits: Any) -> Any:
        """The scale and soft-cap of a tensor of logits, if there are any."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_soft_cap is not None:
            logits = self.logit_soft_cap * (logits / self.logit_soft_cap).tanh()
        return logits
