"""The stage of decode steps with latent attention: norm and projections, then three kernels over
the compressed cache (kernels/attention/latent.py), into fixed places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels.attention.decode import Rows
from flyweight.kernels.attention.latent import (
    LatentLayer,
    LatentShape,
    Workspace,
    latent_attention,
)
from flyweight.models.buffers import Buffers, StepRows
from flyweight.models.latent import Latent
from flyweight.models.layer import Block


def unsupported_reason(block: Block, page: int) -> str | None:
    """None, or why there are no kernels for this layer."""
    assert block.latent is not None
    return shape_of(block.latent, page).unsupported_reason(gpu.of(block.latent.device))


def shape_of(latent: Latent, page: int) -> LatentShape:
    plan = latent.plan
    return LatentShape(latent.heads, plan.plain_dim, plan.rank, plan.rope_dim, plan.value_dim, page)


class LatentDecode:
    """As `DecodeAttention`, where heads share one row of the cache."""

    separate: str | None = "latent attention has kernels of its own"

    def __init__(
        self,
        blocks: Sequence[Block],
        caches: Sequence[KVStorage],
        rows: StepRows,
        *,
        pairs: Mapping[str | None, Tensor],
        buffers: Buffers,
    ):
        self.caches = caches
        self.lengths: Tensor | None = rows.lengths
        self.adapters = rows.adapters
        self.beside = False
        self.buffers = buffers
        self.size = len(rows.tokens)
        self.rows = {name: Rows(table, rows.lengths, rows.tables) for name, table in pairs.items()}
        page = caches[0].block_size
        self.layers = {id(block): _layer(block, page) for block in blocks}
        first = self.layers[id(blocks[0])].shape
        self.workspace = Workspace.make(
            first, self.size, dtype=buffers.dtype, device=buffers.device
        )
        self.place = 0  # of the next layer among the caches

    def attend(self, block: Block, hidden: Tensor) -> Tensor:
        latent = block.latent
        assert latent is not None
        plan = block.plan
        cache = self.caches[self.place]
        self.place += 1
        take = self.buffers.take
        projected = take("qkv", sum(plan.qkv.sizes), self.size)
        norm = block.norm(plan.before_attention)
        block.qkv.project(hidden, projected, norm=norm, adapters=self.adapters)
        first = plan.qkv.sizes[0]
        queries = projected[:, :first]
        if latent.query_b is not None and latent.plan.query_b is not None:
            whole = take("query latents", first, self.size)
            whole.copy_(queries)
            queries = take("queries", latent.plan.query_b.sizes[0], self.size)
            latent.query_b.project(whole, queries, norm=latent.query_norm)
        return latent_attention(
            queries,
            projected[:, first:],
            take("attended", plan.attention.out_features, self.size),
            cache,
            self.rows[plan.attention.rope],
            layer=self.layers[id(block)],
            workspace=self.workspace,
        )


def _layer(block: Block, page: int) -> LatentLayer:
    latent = block.latent
    assert latent is not None
    keys, values = latent.absorbed
    scale = block.plan.attention.scale
    return LatentLayer(shape_of(latent, page), scale, latent.norm, keys, values)
