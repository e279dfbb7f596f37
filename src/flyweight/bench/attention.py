"""Decode attention over the paged cache: its share of the copy bandwidth at long contexts.

One new token for each sequence, every sequence with the same context. GB/s counts the keys and
values, which is all that matters at these lengths. Torch's own attention runs beside it on keys and
values that lie in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.bench import replay
from flyweight.bench.kernels import figures, judged, relative_error
from flyweight.bench.replay import Work
from flyweight.bench.rows import Row
from flyweight.kernels import reference
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.models.config import ModelConfig
from flyweight.models.presets import preset_config
from flyweight.tensors.rounding import attention_bound

PAGE = 16


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool

    @classmethod
    def of(cls, preset: str) -> Heads:
        config = ModelConfig.from_dict(preset_config(preset))
        return cls(config.heads, config.kv_heads, config.head_dim, config.qk_norm)


def measure_attention(
    preset: str,
    *,
    batch: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    samples: int,
    bandwidth: float,
) -> Iterator[Row]:
    heads = Heads.of(preset)
    nbytes = 2 * batch * context * heads.kv_heads * heads.head_dim * dtype.itemsize
    pages = -(-context // PAGE)
    shape = (batch * pages, PAGE, heads.kv_heads, heads.head_dim)

    def cache() -> KVStorage:
        keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        return KVStorage(keys, values)

    caches = [cache() for _ in range(replay.copies_for(nbytes, device))]
    tables = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    qkv = torch.randn(
        batch, (heads.heads + 2 * heads.kv_heads) * heads.head_dim, device=device, dtype=dtype
    )
    run = (
        fused(heads, qkv, tables, context)
        if device.type == "cuda"
        else eager(heads, qkv, tables, context)
    )
    error = exact(heads, qkv, caches[0], context, run)
    works = {
        "ours": Work(lambda i: run(caches[i]), len(caches)),
        "torch": torch_work(heads, qkv, caches[:2], context),
    }
    times = replay.measure(works, device, samples=samples)
    facts = {
        "format": "attention",
        "kernel": "attention" if device.type == "cuda" else "reference.paged_attention",
        "rows": batch,
        "context": context,
        "shape": preset,
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "dtype": str(dtype).removeprefix("torch."),
    }
    yield (
        facts
        | judged(error, attention_bound(dtype))
        | figures(
            times["ours"], hot=None, torch_times=times["torch"], nbytes=nbytes, bandwidth=bandwidth
        )
    )


def torch_work(heads: Heads, qkv: Tensor, caches: list[KVStorage], context: int) -> Work:
    """Torch's attention over two copies at least: contexts of this length do not fit into a cache
    twice.
    """
    batch = qkv.shape[0]
    size = heads.head_dim

    def whole(side: Tensor) -> Tensor:
        return side.view(batch, -1, heads.kv_heads, size)[:, :context].transpose(1, 2).contiguous()

    keys = [whole(one.keys) for one in caches]
    values = [whole(one.values) for one in caches]
    query = qkv.view(batch, -1, 1, size)[:, : heads.heads]
    return Work(
        lambda i: F.scaled_dot_product_attention(query, keys[i], values[i], enable_gqa=True),
        len(caches),
    )


def fused(heads: Heads, qkv: Tensor, tables: Tensor, context: int) -> Callable[[KVStorage], Tensor]:
    """The kernel of captured decode steps, positions left unrotated: it costs the same."""
    batch = qkv.shape[0]
    device = qkv.device
    size = heads.head_dim
    shape = HeadShape(heads.heads, heads.kv_heads, size, size, PAGE, heads.qk_norm)
    still = rope_pairs(
        torch.ones(context, size // 2, device=device),
        torch.zeros(context, size // 2, device=device),
    )
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    ones = torch.ones(size, device=device, dtype=qkv.dtype)
    norms = HeadNorms(ones, ones, 1e-6) if heads.qk_norm else HeadNorms()
    layer = AttentionLayer(shape, size**-0.5, norms)
    workspace = Workspace.make(shape, batch, device)
    out = torch.empty(batch, heads.heads * size, device=device, dtype=qkv.dtype)
    rows = Rows(still, lengths, tables)
    return lambda cache: decode_attention(qkv, out, cache, rows, layer=layer, workspace=workspace)


def eager(heads: Heads, qkv: Tensor, tables: Tensor, context: int) -> Callable[[KVStorage], Tensor]:
    batch = tables.shape[0]
    query, keys, values = qkv.view(batch, -1, heads.head_dim).split(
        [heads.heads, heads.kv_heads, heads.kv_heads], 1
    )
    slots = tables[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    step = Batch(
        tokens=slots,
        positions=slots,
        slots=slots,
        block_tables=tables,
        query_starts=list(range(batch + 1)),
        kv_lengths=[context] * batch,
        output_rows=slots,
    )
    plans: list[Any] = []
    if heads.qk_norm:
        query, keys = (
            reference.rms_norm(part, torch.ones(heads.head_dim, device=qkv.device), 1e-6)
            for part in (query, keys)
        )

    def run(cache: KVStorage) -> Tensor:
        if not plans:
            plans.append(reference.plan_attention(step, cache))
        reference.write_kv(cache, keys, values, step.slots)
        return reference.paged_attention(
            query, cache, plans[0], scale=heads.head_dim**-0.5
        ).flatten(1)

    return run


def exact(
    heads: Heads, qkv: Tensor, cache: KVStorage, context: int, run: Callable[[KVStorage], Tensor]
) -> float:
    """The relative error of the first sequence, against float64 over the cache that the run has
    just written to.
    """
    found = run(cache)[0].view(heads.heads, heads.head_dim)
    query = qkv[0].double().view(-1, heads.head_dim)[: heads.heads]
    if heads.qk_norm:
        query = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    keys, values = (
        side.flatten(0, 1)[:context].double().transpose(0, 1) for side in (cache.keys, cache.values)
    )
    grouped = query.view(heads.kv_heads, -1, heads.head_dim)
    weights = (grouped @ keys.mT * heads.head_dim**-0.5).softmax(-1)
    return relative_error(found, (weights @ values).view(heads.heads, heads.head_dim))
