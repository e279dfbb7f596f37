"""Every op of the decoder in plain torch: the CPU path, and what the fused kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.engine.batch import Batch, KVStorage


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), eps=epsilon).to(x.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 · size] with the gate half first → [tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on the first `2 · cos.shape[-1]` of head_dim; x [tokens, heads, head_dim], cos and sin [tokens, rotary / 2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def write_kv(cache: KVStorage, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    cache.keys.flatten(0, 1)[slots] = keys
    cache.values.flatten(0, 1)[slots] = values


def paged_attention(query: Tensor, cache: KVStorage, batch: Batch, *, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of each sequence's new tokens over its pages; query [tokens, heads, head_dim]."""
    output = torch.empty_like(query)
    for i, length in enumerate(batch.kv_lengths):
        begin, end = batch.query_starts[i], batch.query_starts[i + 1]
        blocks = batch.block_tables[i, : -(-length // cache.block_size)].long()
        keys = cache.keys[blocks].flatten(0, 1)[:length].transpose(0, 1)  # [kv_heads, length, head_dim]
        values = cache.values[blocks].flatten(0, 1)[:length].transpose(0, 1)
        rows = query[begin:end].transpose(0, 1)  # [heads, new, head_dim]
        mask = None
        if end - begin > 1 or (window and length > window):
            at = torch.arange(length - (end - begin), length, device=query.device)[:, None]
            column = torch.arange(length, device=query.device)[None]
            mask = column <= at
            if window:
                mask &= column > at - window
        out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=scale, enable_gqa=True)
        output[begin:end] = out[0].transpose(0, 1)
    return output
