"""Every op of the decoder in plain torch: the CPU path, and what the fused kernels are tested against.

Small decode steps are bound by the number of ops, so whatever depends on the step alone (rope rows, gather indices,
masks) is worked out once a step, by `rope_rows` and `plan_attention`, and not once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.engine.batch import Batch, KVStorage


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension; weight is [size], or [heads, size] where each head has its own."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=epsilon).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 · size] with the gate half first → [..., size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The table rows of a step, [tokens, 1, rotary]: both halves written out, the minus of the first half in sin."""
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on the first cos.shape[-1] of head_dim; x [..., tokens, heads, head_dim], cos and sin from `rope_rows`."""
    rotary = cos.shape[-1]
    part = x if rotary == x.shape[-1] else x[..., :rotary]
    turned = torch.addcmul(part * cos, part.roll(rotary // 2, -1), sin).to(x.dtype)
    return turned if part is x else torch.cat([turned, x[..., rotary:]], -1)


def write_kv(cache: KVStorage, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    cache.keys.flatten(0, 1).index_copy_(0, slots, keys)
    cache.values.flatten(0, 1).index_copy_(0, slots, values)


@dataclass(frozen=True)
class Piece:
    """Neighbouring sequences whose attention is one call: a run of decoding ones, or a single one with several tokens."""

    begin: int  # the first and the end of their tokens
    end: int
    blocks: Tensor  # int64 [sequences · most blocks]
    width: int  # cached tokens of the longest
    sequences: int
    causal: bool  # the sequence begins here: no mask needed
    mask: Tensor | None  # bool, [sequences, 1, 1, width] or [new, width]: what each query sees


def plan_attention(batch: Batch, block_size: int, window: int | None = None) -> list[Piece]:
    """Cut a step into pieces; made once and used by every layer with the same window."""
    pieces, i, starts = [], 0, batch.query_starts
    while i < len(batch.kv_lengths):
        j = i + 1
        if starts[j] - starts[i] == 1:
            while j < len(batch.kv_lengths) and starts[j + 1] - starts[j] == 1:
                j += 1
        new, lengths = starts[i + 1] - starts[i], batch.kv_lengths[i:j]
        width = max(lengths)
        blocks = batch.block_tables[i:j, : -(-width // block_size)].long().flatten().clamp_(min=0)  # padding may be −1
        mask, column = None, torch.arange(width, device=blocks.device)
        causal = new == width > 1 and not (window and width > window)
        if new > 1 and not causal:
            at = torch.arange(width - new, width, device=blocks.device)[:, None]
            mask = _visible(column, at, window)
        elif new == 1 and (min(lengths) < width or (window and width > window)):
            at = torch.tensor(lengths, device=blocks.device)[:, None, None, None] - 1
            mask = _visible(column, at, window)
        pieces.append(Piece(starts[i], starts[j], blocks, width, j - i, causal, mask))
        i = j
    return pieces


def _visible(column: Tensor, at: Tensor, window: int | None) -> Tensor:
    mask = column <= at
    return mask & (column > at - window) if window else mask


def paged_attention(query: Tensor, cache: KVStorage, plan: list[Piece], *, scale: float) -> Tensor:
    """Causal attention of each sequence's new tokens over its pages; query and result [tokens, heads, head_dim]."""
    outputs = [_attend_piece(query[piece.begin : piece.end], cache, piece, scale) for piece in plan]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_piece(query: Tensor, cache: KVStorage, piece: Piece, scale: float) -> Tensor:
    kv_heads, size = cache.keys.shape[-2:]

    def gather(pages: Tensor) -> Tensor:
        """[sequences, kv_heads, width, head_dim]"""
        return pages.index_select(0, piece.blocks).view(piece.sequences, -1, kv_heads, size)[:, : piece.width].transpose(1, 2)

    keys, values = gather(cache.keys), gather(cache.values)
    if piece.end - piece.begin == piece.sequences:
        # One token each: the heads that share a kv head are the rows of one small attention, so nothing is repeated.
        rows = query.reshape(piece.sequences, kv_heads, -1, size)
        return F.scaled_dot_product_attention(rows, keys, values, piece.mask, scale=scale).reshape(query.shape)
    rows = query.transpose(0, 1)[None]  # [1, heads, new, head_dim]
    out = F.scaled_dot_product_attention(rows, keys, values, piece.mask, is_causal=piece.causal, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Whole sequences without a cache: query [batch, tokens, heads, head_dim], keys and values with kv_heads."""
    tokens, mask = query.shape[1], None
    if window and tokens > window:
        at = torch.arange(tokens, device=query.device)
        mask = _visible(at, at[:, None], window)
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    out = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
