"""Attention of prompts and of mixed steps: a layer's hidden state → what its o multiplies with.

`Paged` serves: packed tokens of many sequences, keys and values in pages. `Whole` calibrates and
evaluates: full sequences without a cache. Both run the ops of the device; captured decode steps
have a stage of their own (decode_step.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.kernels import reference
from flyweight.kernels.gated_delta.shape import DeltaWeights
from flyweight.models.kv_scheme import KVScheme
from flyweight.models.latent import Latent
from flyweight.models.plan import ROPE

if TYPE_CHECKING:
    from flyweight.models.layer import Block

Plans = dict[int | None, Any]  # how attention is cut up, by window: what `ops.plan_attention` gives
Tables = tuple[Tensor, Tensor]  # cos and sin of every position
RopeTables = Mapping[str | None, Tables]


def by_name(tables: Tables | RopeTables) -> RopeTables:
    """A model's only table may be given without its name."""
    return {ROPE: tables} if isinstance(tables, tuple) else tables


def normed_projections(block: Block, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """All queries and all keys of a token, each normed as one row."""
    assert block.whole_norms is not None
    plan = block.plan.attention
    query = plan.heads * plan.head_dim
    key = plan.kv_heads * plan.head_dim
    query_norm, key_norm = block.whole_norms
    return (
        block.ops.normalize(qkv[..., :query], query_norm),
        block.ops.normalize(qkv[..., query : query + key], key_norm),
    )


def values_of(block: Block, qkv: Tensor) -> Tensor:
    plan = block.plan.attention
    return qkv[..., (plan.heads + plan.kv_heads) * plan.head_dim :]


def split_gate(block: Block, projected: Tensor) -> tuple[Tensor, Tensor]:
    """The gates of all heads, and q, k and v."""
    plan = block.plan.attention
    width = plan.heads * plan.head_dim
    return projected[..., :width], projected[..., width:].contiguous()


class PromptStage:
    """What the two stages have in common: q/k/v, and the rows of the rope tables."""

    lengths: Tensor | None = None
    adapters: Tensor | None = None
    beside = False

    def __init__(self, tables: Tables | RopeTables, positions: Tensor, ops: ModuleType):
        self.ops = ops
        self.rows = {
            name: ops.rope_rows(*pair, positions) for name, pair in by_name(tables).items()
        }

    def attend(self, block: Block, hidden: Tensor) -> Tensor:
        norm = block.norm(block.plan.before_attention)
        return self.mix(block, block.qkv.project(hidden, norm=norm, adapters=self.adapters))

    def mix(self, block: Block, qkv: Tensor) -> Tensor:
        """q/k norm, rope and attention: [..., (heads + 2 · kv_heads) · head_dim] → [..., heads ·
        head_dim]; or what a layer with a state does in its place.
        """
        if block.delta is not None:
            return self.attend_state(block, block.delta, qkv)
        if block.latent is not None:
            return self.attend_latent(block, block.latent, qkv).flatten(-2)
        if block.plan.attention.gated:
            gate, qkv = split_gate(block, qkv)
            return self.mix_heads(block, qkv) * gate.sigmoid()
        return self.mix_heads(block, qkv)

    def mix_heads(self, block: Block, qkv: Tensor) -> Tensor:
        if block.whole_norms is not None:
            qkv = torch.cat([*normed_projections(block, qkv), values_of(block, qkv)], -1)
        heads = qkv.view(*qkv.shape[:-1], -1, block.plan.attention.head_dim)
        return self.attend_heads(block, heads).flatten(-2)

    def attend_heads(self, block: Block, qkv: Tensor) -> Tensor:
        """[..., tokens, heads + 2 · kv_heads, head_dim] → [..., tokens, heads, head_dim]"""
        raise NotImplementedError

    def attend_state(self, block: Block, weights: DeltaWeights, projected: Tensor) -> Tensor:
        """[..., tokens, projected] → [..., tokens, outputs]"""
        raise NotImplementedError

    def attend_latent(self, block: Block, latent: Latent, projected: Tensor) -> Tensor:
        """[..., tokens, outputs of qkv] → [..., tokens, heads, value]"""
        raise NotImplementedError


class Paged(PromptStage):
    """Packed tokens of many sequences: keys and values go to pages and are read from there."""

    def __init__(
        self,
        batch: Batch,
        caches: Sequence[KVStorage],
        tables: Tables | RopeTables,
        ops: ModuleType,
        plans: Plans | None = None,
    ):
        super().__init__(tables, batch.positions, ops)
        self.batch = batch
        self.adapters = batch.adapters
        self.caches = caches
        self.plans: Plans = {} if plans is None else plans

    def attend_state(self, block: Block, weights: DeltaWeights, projected: Tensor) -> Tensor:
        storage = self.caches[block.index].state
        assert storage is not None
        return self.ops.delta_paged(projected, storage, self.batch, weights)

    @functools.cached_property
    def pieces(self) -> list[reference.Piece]:
        """Of layers that torch's attention serves on every device."""
        return reference.plan_attention(self.batch, self.caches[0])

    def attend_latent(self, block: Block, latent: Latent, projected: Tensor) -> Tensor:
        plan = block.plan.attention
        return latent.attend_paged(
            projected,
            self.rows[plan.rope],
            plan.scale,
            batch=self.batch,
            cache=self.caches[block.index],
            pieces=lambda: self.pieces,
        )

    def attend_heads(self, block: Block, qkv: Tensor) -> Tensor:
        plan = block.plan.attention
        cache = self.caches[block.index]
        plans = self.plans
        if plan.window not in plans:
            plans[plan.window] = self.ops.plan_attention(self.batch, cache, plan.window)
        cos, sin = self.rows[plan.rope]
        query_scale, scale = self.ops.attention_scales(plan.scale)
        query, *new = self.ops.rope_norm_write(
            qkv,
            cache,
            self.batch.slots,
            cos=cos,
            sin=sin,
            norm=block.head_norm,
            query_scale=query_scale,
        )
        bend = bend_of(block)
        return self.ops.paged_attention(
            query, cache, plans[plan.window], scale=scale, new=new, bend=bend
        )


class Whole(PromptStage):
    """Sequences [batch, tokens, hidden] from their first token on, without a cache; keys and values
    as a cache of `scheme` would hold them.
    """

    def __init__(
        self,
        tokens: int,
        tables: Tables | RopeTables,
        ops: ModuleType,
        *,
        scheme: KVScheme | None = None,
        first: int = 0,
    ):
        """`first`: the row of the tables where these sequences begin (`rope.long_rows`)."""
        self.scheme = scheme or KVScheme()
        device = next(iter(by_name(tables).values()))[0].device
        super().__init__(tables, torch.arange(first, first + tokens, device=device), ops)

    def attend_state(self, block: Block, weights: DeltaWeights, projected: Tensor) -> Tensor:
        return self.ops.delta_whole(projected, weights)

    def attend_latent(self, block: Block, latent: Latent, projected: Tensor) -> Tensor:
        plan = block.plan.attention
        return latent.attend_whole(projected, self.rows[plan.rope], plan.scale)

    def attend_heads(self, block: Block, qkv: Tensor) -> Tensor:
        plan = block.plan.attention
        cos, sin = self.rows[plan.rope]
        query, keys, values = self.ops.split_heads(
            qkv, cos=cos, sin=sin, heads=plan.heads, norm=block.head_norm
        )
        if (format := self.scheme.format) is not None:
            fixed = self.scheme.scales[block.index] if self.scheme.scales else (None, None)
            keys, values = (
                format.rounded(x, scale) for x, scale in zip((keys, values), fixed, strict=True)
            )
        return self.ops.causal_attention(
            query, keys, values, scale=plan.scale, window=plan.window, bend=bend_of(block)
        )


def bend_of(block: Block) -> reference.Bend | None:
    plan = block.plan.attention
    return None if plan.plain else reference.Bend(plan.soft_cap, block.sinks)
