"""Every op of the decoder in plain torch: the CPU path, and what the fused kernels are tested
against.

Small decode steps are bound by the number of ops, so whatever depends on the step alone (rope rows,
gather indices, masks) is worked out once a step, by `rope_rows` and `plan_attention`, and not once
a layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.errors import unknown
from flyweight.kernels.gated_delta.reference import delta_paged as delta_paged
from flyweight.kernels.gated_delta.reference import delta_whole as delta_whole
from flyweight.kernels.linear.fused import Norm
from flyweight.values import has_values


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension; weight is [size], or [heads, size] where each head has its own.

    x / √(|x|² / size + ε) in as few ops as torch allows: half the time of `F.rms_norm` on a CPU,
    where one row needs two ops fewer still, because its scale can be a plain number.
    """
    if x.numel() == x.shape[-1] and x.dtype == torch.float32 and x.device.type == "cpu":
        length = torch.linalg.vector_norm(x).item()
        return (x * weight).mul_((length * length / x.shape[-1] + epsilon) ** -0.5)
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(
        _constant(epsilon, x.device), length, length, value=1 / x.shape[-1]
    ).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """`rms_norm` in either form; 1 + weight is added up in float32, before anything is rounded."""
    if not norm.plus_one:
        return rms_norm(x, norm.weight, norm.epsilon)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return (wide * scale * (1 + norm.weight.float())).to(x.dtype)


def add_normed(
    hidden: Tensor, y: Tensor, norm: Norm | None, *, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """hidden + scale · norm(y), into `out` where there is one; it may be `hidden`."""
    if norm is not None:
        y = normalize(y, norm)
    return torch.add(hidden, y, alpha=scale, out=out)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 · size] → [..., size]; the gate is the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


# of gpt-oss
CLIP = 7.0
SLOPE = 1.702


def clipped_swiglu(gate_up: Tensor) -> Tensor:
    """gate · σ(1.702 gate) · (up + 1), the gate clipped from above and up from both sides."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=CLIP)
    return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-CLIP, CLIP) + 1)


ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_mul, "clipped_swiglu": clipped_swiglu}


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) · up of a merged gate/up, [..., 2 · size] → [..., size]"""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown("activation", activation, ACTIVATIONS))
    return ACTIVATIONS[activation](gate_up)


def rope_rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The table rows of a step, [tokens, 1, rotary]: both halves written out, the minus of the
    first half in sin.
    """
    cos = cos[positions][:, None]
    sin = sin[positions][:, None]
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on the first cos.shape[-1] of head_dim; x [..., tokens, heads, head_dim], cos and sin
    from `rope_rows`.
    """
    rotary = cos.shape[-1]
    part = x if rotary == x.shape[-1] else x[..., :rotary]
    turned = torch.addcmul(part * cos, part.roll(rotary // 2, -1), sin).to(x.dtype)
    return turned if part is x else torch.cat([turned, x[..., rotary:]], -1)


def split_heads(
    qkv: Tensor, *, cos: Tensor, sin: Tensor, heads: int, norm: Norm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of qkv [..., tokens, heads + 2 · kv_heads, head_dim]; q and k normed (by a weight
    [heads + kv_heads, head_dim]), turned
    """
    kv_heads = (qkv.shape[-2] - heads) // 2
    qk, values = qkv.split_with_sizes([heads + kv_heads, kv_heads], -2)
    if norm is not None:
        qk = rms_norm(qk, norm.weight, norm.epsilon)
    query, keys = rotate(qk, cos, sin).split_with_sizes([heads, kv_heads], -2)
    return query, keys, values


def rope_norm_write(
    qkv: Tensor,
    cache: KVStorage,
    slots: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: Norm | None,
    query_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_heads` of packed tokens, with K and V written to their slots. A kernel may do it in
    place: qkv is used up.
    """
    heads = qkv.shape[1] - 2 * cache.keys.shape[2]
    query, keys, values = split_heads(qkv, cos=cos, sin=sin, heads=heads, norm=norm)
    write_kv(cache, keys, values, slots)
    return query if query_scale == 1 else query * query_scale, keys, values


def attention_scales(scale: float) -> tuple[float, float]:
    """Of attention's scale, what `rope_norm_write` multiplies q with, and what is left to
    `paged_attention`.
    """
    return 1.0, scale


def write_kv(cache: KVStorage, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    cache.write(keys, values, slots)


# cached tokens; from here on reading pages in place beats copying them for one call with the
# neighbours
LONG = 512


@dataclass(frozen=True)
class Piece:
    """Neighbouring sequences whose attention is one call: one, or a run of decoding ones."""

    begin: int  # the first and the end of their tokens
    end: int
    sequences: int
    # the slots of the cached tokens, [sequences · width]: a slice where they follow each other
    rows: slice | Tensor
    causal: bool  # the sequence begins here: no mask needed
    mask: Tensor | None  # 0 or −∞, [sequences, 1, 1, width] or [new, width]
    # [2, sequences · width, kv_heads, head_dim]: the pages copied, by each layer in turn; pages in
    # 8 bits are new tensors as they are read
    scratch: Tensor | None


def plan_attention(batch: Batch, cache: KVStorage, window: int | None = None) -> list[Piece]:
    """Cut a step into pieces; made once and used by every layer with the same window."""
    pieces = []
    i = 0
    starts = batch.query_starts
    spans: list[slice | None] = [None] * len(batch.kv_lengths)
    if has_values(batch.block_tables):
        spans = [
            _span(table, length, cache.block_size)
            for table, length in zip(batch.block_tables.tolist(), batch.kv_lengths, strict=True)
        ]
    together = [
        starts[k + 1] - starts[k] == 1 and (span is None or length < LONG)
        for k, (span, length) in enumerate(zip(spans, batch.kv_lengths, strict=True))
    ]
    while i < len(spans):
        j = i + 1
        while together[i] and j < len(spans) and together[j]:
            j += 1
        pieces.append(
            _plan_piece(batch, cache, i, j, span=spans[i] if j == i + 1 else None, window=window)
        )
        i = j
    return pieces


def _span(table: list[int], length: int, block_size: int) -> slice | None:
    """The slots of a sequence whose blocks follow each other: read in place, without a copy."""
    blocks = -(-length // block_size)
    start = table[0] * block_size
    return (
        slice(start, start + length)
        if table[:blocks] == list(range(table[0], table[0] + blocks))
        else None
    )


def _plan_piece(
    batch: Batch, cache: KVStorage, first: int, last: int, *, span: slice | None, window: int | None
) -> Piece:
    begin = batch.query_starts[first]
    end = batch.query_starts[last]
    lengths = batch.kv_lengths[first:last]
    sequences = last - first
    width = max(lengths)
    device = cache.keys.device
    size = cache.block_size
    new = (end - begin) // sequences
    column = torch.arange(width, device=device)
    ragged = min(lengths) < width
    causal = new == width > 1 and not (window and width > window)
    mask = None
    at = torch.arange(width - new, width, device=device)[:, None]
    seen = column
    if ragged:
        at = torch.tensor(lengths, device=device)[:, None, None, None] - 1
        # A masked slot must still hold a number: pages that were never written may hold NaN. So the
        # first one stands in.
        seen = column * (column <= at[:, 0, 0])  # [sequences, width]
    if ragged or (new > 1 and not causal) or (window and width > window):
        visible = _visible(column, at, window)
        mask = torch.zeros(visible.shape, dtype=cache.dtype, device=device).masked_fill_(
            ~visible, float("-inf")
        )
    if span is not None:
        return Piece(begin, end, sequences, span, causal, mask, None)
    table = batch.block_tables[first:last].long()
    rows = table.gather(1, (seen // size).expand(sequences, width)) * size + seen % size
    scratch = None
    if cache.eight is None:
        scratch = cache.keys.new_empty(2, rows.numel(), *cache.keys.shape[2:])
    return Piece(begin, end, sequences, rows.flatten(), causal, mask, scratch)


def _visible(column: Tensor, at: Tensor, window: int | None) -> Tensor:
    mask = column <= at
    return mask & (column > at - window) if window else mask


@dataclass(frozen=True, eq=False)
class Bend:
    """What some families do to scores: cap · tanh(score / cap), and a sink for each head that takes
    its share.
    """

    soft_cap: float | None = None
    sinks: Tensor | None = None  # [heads]

    def attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        causal: bool = False,
    ) -> Tensor:
        """As torch's attention, [batch, heads, queries, head_dim], query heads grouped over those
        of keys and values.
        """
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = query.float() @ keys.float().transpose(-1, -2) * scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if causal:
            at = torch.arange(scores.shape[-1], device=scores.device)
            mask = at <= at[-scores.shape[-2] :, None]
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            )
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
            return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ values.float()).to(
                query.dtype
            )
        return (scores.softmax(-1) @ values.float()).to(query.dtype)


def paged_attention(
    query: Tensor,
    cache: KVStorage,
    plan: list[Piece],
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
    bend: Bend | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens over its pages; query and result [tokens,
    heads, head_dim].

    `new`: this step's keys and values, for kernels that need no pages where a sequence begins; here
    they are in the pages.
    """
    outputs = [
        _attend_piece(query[piece.begin : piece.end], cache, piece, scale, bend) for piece in plan
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_piece(
    query: Tensor, cache: KVStorage, piece: Piece, scale: float, bend: Bend | None
) -> Tensor:
    kv_heads, size = cache.keys.shape[2:]
    keys, values = (_read_pages(cache, piece, side) for side in range(2))
    if bend is not None:
        # [sequences, heads, new, head_dim]
        heads = query.unflatten(0, (piece.sequences, -1)).transpose(1, 2)
        out = bend.attention(heads, keys, values, piece.mask, scale=scale, causal=piece.causal)
        return out.transpose(1, 2).flatten(0, 1)
    if piece.end - piece.begin == piece.sequences:
        # One token each: the heads that share a kv head are the rows of one small attention, so
        # nothing is repeated.
        grouped = query.reshape(piece.sequences, kv_heads, -1, size)
        return F.scaled_dot_product_attention(
            grouped, keys, values, piece.mask, scale=scale
        ).reshape(query.shape)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        piece.mask,
        is_causal=piece.causal,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _read_pages(cache: KVStorage, piece: Piece, side: int) -> Tensor:
    """[sequences, kv_heads, width, head_dim]"""
    pages = cache.values if side else cache.keys
    rows = pages.flatten(0, 1)
    if cache.eight is not None:
        copy = cache.eight.read(side, pages, piece.rows)
    elif isinstance(piece.rows, slice):
        return rows[piece.rows].transpose(0, 1)[None]
    else:
        assert piece.scratch is not None
        copy = torch.index_select(rows, 0, piece.rows, out=piece.scratch[side])
    return copy.view(piece.sequences, -1, *rows.shape[1:]).transpose(1, 2)


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None = None,
    bend: Bend | None = None,
) -> Tensor:
    """Whole sequences without a cache: query [batch, tokens, heads, head_dim], keys and values with
    kv_heads.
    """
    tokens = query.shape[1]
    mask = None
    if window and tokens > window:
        at = torch.arange(tokens, device=query.device)
        mask = _visible(at, at[:, None], window)
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    if bend is not None:
        return bend.attention(
            query, keys, values, mask, scale=scale, causal=mask is None
        ).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)
