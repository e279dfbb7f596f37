"""One decoder for Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts: families differ by the flags of ModelConfig.

Blocks know nothing of caches. They ask a context for attention: `Paged` (serving: packed tokens, paged KV) or `Whole`
(calibration and perplexity: full sequences, no cache). Each block loads alone, so that a quantizer can keep just one
in memory. q/k/v and gate/up are merged at load; every device op goes through the ops module of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.errors import CheckpointError
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.kernels.dispatch import decoder_ops
from flyweight.kernels.vptq import Vptq
from flyweight.models import moe
from flyweight.models.config import ModelConfig
from flyweight.models.layers import Embedding, Linear, RMSNorm, Weights, load_tensor
from flyweight.models.rope import rope_tables
from flyweight.tensors import Plain


@dataclass(frozen=True)
class Group:
    """Linears that share one input (and are merged into one call), and what makes that input.

    The output channels of `source` are the input channels of `linears`: a factor taken out of one can be put into
    the others. For o_proj that holds where v_proj has as many heads; otherwise each v channel feeds several.
    """

    name: str
    source: str
    linears: tuple[str, ...]

    @property
    def routed(self) -> bool:
        """Of an expert that sees only the tokens sent to it."""
        return self.name.startswith("experts.")


GROUPS = (
    Group("qkv", "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Group("o", "self_attn.v_proj", ("self_attn.o_proj",)),
    Group("gate_up", "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Group("down", "mlp.up_proj", ("mlp.down_proj",)),
)
LINEARS = tuple(name for group in GROUPS for name in group.linears)


def groups_of(config: ModelConfig, index: int) -> tuple[Group, ...]:
    """Of one layer, in the order in which they run; with experts, theirs stand in place of the MLP's."""
    if config.moe is None or index in config.moe.dense_layers:
        return GROUPS
    return *GROUPS[:2], *(Group(*parts) for parts in moe.groups(config.moe))


class Context(Protocol):
    """What a block asks for besides its input."""

    cos: Tensor
    sin: Tensor

    def attend(self, block: Block, qkv: Tensor) -> Tensor:
        """[..., tokens, heads + 2 · kv_heads, head_dim] → [..., tokens, heads, head_dim]"""


Plans = dict[int | None, Any]  # how attention is cut up, by window: what `ops.plan_attention` gives


class Paged:
    """Packed tokens of many sequences: keys and values go to pages and are read from there."""

    def __init__(self, batch: Batch, caches: Sequence[KVStorage], tables: tuple[Tensor, Tensor], ops: ModuleType,
                 plans: Plans | None = None):
        self.batch, self.caches, self.ops = batch, caches, ops
        self.cos, self.sin = ops.rope_rows(*tables, batch.positions)
        self.plans: Plans = {} if plans is None else plans

    def attend(self, block: Block, qkv: Tensor) -> Tensor:
        cache = self.caches[block.index]
        if block.window not in self.plans:
            self.plans[block.window] = self.ops.plan_attention(self.batch, cache, block.window)
        query_scale, scale = self.ops.attention_scales(block.scale)
        query, *new = self.ops.rope_norm_write(qkv, cache, self.batch.slots, cos=self.cos, sin=self.sin, heads=block.heads,
                                               norm=block.qk_norm, epsilon=block.epsilon, query_scale=query_scale)
        return self.ops.paged_attention(query, cache, self.plans[block.window], scale=scale, new=new)


class Whole:
    """Sequences [batch, tokens, hidden] from their first token on, without a cache."""

    def __init__(self, tokens: int, tables: tuple[Tensor, Tensor], ops: ModuleType):
        self.ops = ops
        self.cos, self.sin = ops.rope_rows(*tables, torch.arange(tokens, device=tables[0].device))

    def attend(self, block: Block, qkv: Tensor) -> Tensor:
        query, keys, values = self.ops.split_heads(qkv, cos=self.cos, sin=self.sin, heads=block.heads, norm=block.qk_norm,
                                                   epsilon=block.epsilon)
        return self.ops.causal_attention(query, keys, values, scale=block.scale, window=block.window)


class Block:
    """One decoder layer; `linears` by group name."""

    gate_up: Linear  # these two only where there are no experts
    down: Linear

    def __init__(self, config: ModelConfig, index: int, *, linears: dict[str, Linear], norms: dict[str, RMSNorm],
                 qk_norm: Tensor | None, ops: ModuleType, experts: moe.Experts | None = None):
        self.index, self.linears, self.ops, self.experts = index, linears, ops, experts
        self.groups = groups_of(config, index)
        self.qkv, self.o = linears["qkv"], linears["o"]
        if experts is None:
            self.gate_up, self.down = linears["gate_up"], linears["down"]
        self.input_norm, self.post_norm = norms["input_layernorm"], norms["post_attention_layernorm"]
        self.qk_norm = qk_norm  # [heads + kv_heads, head_dim]
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.epsilon, self.scale, self.window = config.epsilon, config.head_dim**-0.5, config.windows[index]
        self.fusable = (experts is None or experts.grouped is not None) and any(
            all(isinstance(linear.single, kind) for linear in linears.values()) for kind in (CudaLinear, Vptq))

    @classmethod
    def load(cls, weights: Weights, config: ModelConfig, index: int, *, device: torch.device | str, dtype: torch.dtype,
             exact: bool = False) -> Block:
        prefix, hidden, size = f"model.layers.{index}.", config.hidden_size, config.head_dim
        # group: (outputs of each linear, inputs, whether the config promises a bias)
        shapes = {
            "qkv": ([config.heads * size, config.kv_heads * size, config.kv_heads * size], hidden, config.qkv_bias),
            "o": ([hidden], config.heads * size, config.o_bias),
            "gate_up": ([config.intermediate_size] * 2, hidden, config.mlp_bias),
            "down": ([hidden], config.intermediate_size, config.mlp_bias),
        }
        groups = groups_of(config, index)
        if groups is not GROUPS:
            shapes |= moe.shapes(config)
        linears = {}
        for group in groups:
            sizes, in_features, bias = shapes[group.name]
            linears[group.name] = Linear.load(weights, prefix, group.linears, sizes=sizes, in_features=in_features, bias=bias,
                                              device=device, dtype=dtype, exact=exact, gated=group.name.endswith("gate_up"))

        def norm(name: str, width: int) -> Tensor:
            return load_tensor(weights, f"{prefix}{name}.weight", (width,), device=device, dtype=dtype)

        norms = {name: RMSNorm(norm(name, hidden), config.epsilon) for name in ("input_layernorm", "post_attention_layernorm")}
        qk_norm = None
        if config.qk_norm:  # one table for all heads, so that queries and keys are normed in one call
            qk_norm = torch.cat([norm("self_attn.q_norm", size).expand(config.heads, size),
                                 norm("self_attn.k_norm", size).expand(config.kv_heads, size)])
        ops, experts = decoder_ops(device), None
        if groups is not GROUPS:
            experts = moe.Experts.load(weights, config, prefix, linears, ops=ops, device=device, dtype=dtype)
        return cls(config, index, linears=linears, norms=norms, qk_norm=qk_norm, ops=ops, experts=experts)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[..., tokens, hidden] → the same, residual included."""
        delta, hidden = self.step(None, hidden.clone() if self.fusable else hidden, context)
        return hidden if delta is None else hidden + delta

    def step(self, delta: Tensor | None, hidden: Tensor, context: Context, rows: Tensor | None = None
             ) -> tuple[Tensor | None, Tensor]:
        """As `forward`, with the last addition left to the next norm: input and output are (delta, hidden), and the input may be
        overwritten.

        `rows`: the tokens whose results are wanted; keys and values are those of all.
        """
        ops = self.ops
        if self.fusable and self.qkv.watch is None:
            return None, self.fused(hidden if delta is None else hidden + delta, context, rows)
        if delta is None:
            x = ops.rms_norm(hidden, self.input_norm.weight, self.epsilon)
        else:
            x, hidden = ops.add_rms_norm(delta, hidden, self.input_norm.weight, epsilon=self.epsilon)
        attended = self.attend(self.qkv(x), context)
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
            if not len(rows):  # kernels cannot be launched for no rows
                return None, hidden
        x, hidden = ops.add_rms_norm(self.o(attended), hidden, self.post_norm.weight, epsilon=self.epsilon)
        return self.mlp(x), hidden

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x))) if self.experts is None else self.experts(x)

    def fused(self, hidden: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """As `forward`, norms, residuals and silu·mul being part of the linears; `rows` as in `step`."""
        qkv, o = (cast(CudaLinear, linear.single) for linear in (self.qkv, self.o))
        x = hidden.reshape(-1, hidden.shape[-1])
        heads = qkv.fused(x, norm=self.input_norm.weight, epsilon=self.epsilon)
        attended = self.attend(heads.view(*hidden.shape[:-1], -1), context)
        if rows is not None:
            attended, hidden = attended[rows], x[rows]
            if not len(rows):
                return hidden
            x = hidden
        x = o.fused(attended.reshape(len(x), -1), x, residual=x)
        if self.experts is not None:
            return self.experts.fused(x, norm=self.post_norm.weight, epsilon=self.epsilon).view(hidden.shape)
        gate_up, down = (linear.single for linear in (self.gate_up, self.down))
        if isinstance(gate_up, Vptq):
            silu = gate_up.takes_silu(len(x), x.device)
            both = gate_up.fused(x, norm=self.post_norm.weight, epsilon=self.epsilon, silu=silu)
            return cast(Vptq, down).fused(both, x, gated=not silu, residual=x).view(hidden.shape)
        gate_up, down = cast(CudaLinear, gate_up), cast(CudaLinear, down)
        packed = down.packed_input(len(x), x.device, before=gate_up)
        gated = gate_up.fused(x, norm=self.post_norm.weight, epsilon=self.epsilon, to=packed)
        x = down.fused(packed or gated, x, residual=x)
        return x.view(hidden.shape)

    def attention(self, x: Tensor, context: Context) -> Tensor:
        return self.o(self.attend(self.qkv(x), context))

    def attend(self, qkv: Tensor, context: Context) -> Tensor:
        """q/k norm, rope and attention: [..., (heads + 2 · kv_heads) · head_dim] → [..., heads · head_dim]"""
        return context.attend(self, qkv.view(*qkv.shape[:-1], -1, self.head_dim)).flatten(-2)

    def watch(self, callback: Callable[[Group, Tensor], None] | None) -> None:
        """Call back with the input of every group of linears, or stop doing so (None)."""
        for group in self.groups:
            self.linears[group.name].watch = None if callback is None else _bind(callback, group)


def _bind(callback: Callable[[Group, Tensor], None], group: Group) -> Callable[[Tensor], None]:
    return lambda x: callback(group, x)


class Decoder:
    def __init__(self, config: ModelConfig, *, embedding: Embedding, blocks: list[Block], norm: RMSNorm, head: Linear,
                 device: torch.device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.embedding, self.blocks, self.norm, self.head = embedding, blocks, norm, head
        self.tables = rope_tables(config, device)
        self.ops = decoder_ops(device)

    @classmethod
    def load(cls, weights: Weights, *, device: torch.device | str, dtype: torch.dtype, exact: bool = False,
             layers: Iterable[int] | None = None) -> Decoder:
        """`layers` loads those blocks alone (none: embedding, final norm and head), and leaves out the check for extras."""
        config, device = ModelConfig.from_dict(weights.config), torch.device(device)
        vocab, hidden = config.vocab_size, config.hidden_size
        table = load_tensor(weights, "model.embed_tokens.weight", (vocab, hidden), device=device, dtype=dtype)
        blocks = [Block.load(weights, config, index, exact=exact, device=device, dtype=dtype)
                  for index in (range(config.layers) if layers is None else layers)]
        norm = load_tensor(weights, "model.norm.weight", (hidden,), device=device, dtype=dtype)
        if config.tied_embeddings:
            _check_tied(weights, table)
            head = Linear([Plain(table)], names=("lm_head",), dtype=dtype, exact=exact)
        else:
            head = Linear.load(weights, "", ("lm_head",), sizes=(vocab,), in_features=hidden, bias=False, device=device,
                               dtype=dtype, exact=exact)
        if layers is None:
            weights.check_used()
        return cls(config, embedding=Embedding(table), blocks=blocks, norm=RMSNorm(norm, config.epsilon), head=head,
                   device=device, dtype=dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[KVStorage]) -> Tensor:
        """Float32 logits [outputs, vocab] of the tokens in batch.output_rows; caches by layer."""
        rows = None if len(batch.output_rows) == len(batch.tokens) else batch.output_rows
        context = Paged(batch, caches, self.tables, self.ops)
        delta, hidden = self._run(self.embedding(batch.tokens), context, rows)
        return self.logits(hidden, delta)

    @torch.inference_mode()
    def hidden(self, batch: Batch, caches: Sequence[KVStorage], plans: Plans | None = None) -> Tensor:
        """What the last block gives for every token. `plans`: made before, or to be kept for the next batch of this shape."""
        delta, hidden = self._run(self.embedding(batch.tokens), Paged(batch, caches, self.tables, self.ops, plans))
        return hidden if delta is None else hidden + delta

    @torch.inference_mode()
    def forward_whole(self, tokens: Tensor) -> Tensor:
        """Float32 logits [batch, tokens, vocab] of whole sequences [batch, tokens], without a cache."""
        delta, hidden = self._run(self.embedding(tokens), self.whole(tokens.shape[1]))
        return self.logits(hidden, delta)

    def whole(self, tokens: int) -> Whole:
        """The context of cacheless sequences of so many tokens, for `Block.forward`."""
        if tokens > self.config.context_length:
            raise ValueError(f"{tokens} tokens are more than the context of {self.config.context_length}")
        return Whole(tokens, self.tables, self.ops)

    def _run(self, hidden: Tensor, context: Context, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Of the last block only `rows` need more than their keys and values: a prompt has one token to go on from."""
        delta = None
        for block in self.blocks:
            delta, hidden = block.step(delta, hidden, context, rows if block is self.blocks[-1] else None)
        return delta, hidden

    def logits(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """Final norm and head of what the last block gives, float32."""
        if not hidden.numel():  # chunks of prompts alone: nobody wants logits, and kernels cannot be launched for no rows
            return torch.empty(*hidden.shape[:-1], self.config.vocab_size, device=hidden.device)
        if delta is None:
            return self.head(self.ops.rms_norm(hidden, self.norm.weight, self.norm.epsilon)).float()
        return self.head(self.ops.add_rms_norm(delta, hidden, self.norm.weight, epsilon=self.norm.epsilon)[0]).float()


def _check_tied(weights: Weights, table: Tensor) -> None:
    """Some tools write the tied head a second time: harmless where it is the same."""
    if weights.has("lm_head.weight") and not torch.equal(weights.tensor("lm_head.weight").to(table), table):
        raise CheckpointError("lm_head.weight differs from model.embed_tokens.weight, but config.json ties them")
