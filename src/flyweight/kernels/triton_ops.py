"""Norms, silu·mul, and rope with KV write: each one pass over memory, in Triton.

    rms_norm           out = x / √(mean x² + ε) · w
    add_normed         out = hidden + scale · rms_norm(y)
    silu_mul           out = gate / (1 + e^−gate) · up, and with tanh-gelu for silu
    rope_norm_write    q, k = rope(norm(q, k)) in place; cache[slot] = k, v

Work split: a program of a norm holds a whole row in registers (several rows where they are short),
so a row is read once; silu·mul is cut along rows too. Limit: bytes / bandwidth for many rows, the
launch for few.

Every intermediate is rounded to the 16-bit type where the torch ops of `reference` round it:
batches of any size and the plain path compute one function. The number of rows is an ordinary
argument, so kernels compile once for each width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm


@triton.jit
def _rows_of(rows, ROWS: tl.constexpr):
    """The rows of this program [ROWS, 1], in 64 bits since they get multiplied by widths, and which
    of them exist.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    return row.to(tl.int64), row < rows


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    weight,
    out,
    rows,
    x_stride,
    weight_rows,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype = x.dtype.element_ty
    row, exists = _rows_of(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = exists & (column < SIZE)
    value = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + epsilon)
    factor = tl.load(weight + row % weight_rows * SIZE + column, mask=live, other=0.0).to(
        tl.float32
    )
    tl.store(
        out + row * SIZE + column,
        ((value * inverse).to(dtype).to(tl.float32) * factor).to(dtype),
        mask=live,
    )


@triton.jit(do_not_specialize=["rows"])
def _add_normed(
    hidden,
    y,
    weight,
    out,
    rows,
    epsilon,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype = y.dtype.element_ty
    row, exists = _rows_of(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = exists & (column < SIZE)
    at = row * SIZE + column
    value = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + epsilon)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    normed = ((value * inverse).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
    before = tl.load(hidden + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, (before + normed * scale).to(dtype), mask=live)


@triton.jit
def _tanh_gelu(gate):
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner)  # 1 + tanh(x) = 2 σ(2 x)


@triton.jit
def _silu_mul(
    gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr = False
):
    dtype = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=column < SIZE, other=0.0).to(
        tl.float32
    )
    active = _tanh_gelu(gate) if GELU else gate / (1 + tl.exp(-gate))
    value = active.to(dtype).to(tl.float32) * up
    tl.store(out + row * SIZE + column, value.to(dtype), mask=column < SIZE)


def _shape_of(size: int) -> dict[str, int]:
    """16 values a thread where that takes 1 to 16 warps; short rows share a program."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    warps = min(16, max(1, rows * block // 512))
    return dict(SIZE=size, BLOCK=block, ROWS=rows, num_warps=warps)


def _flat(x: Tensor) -> Tensor:
    """[..., size] → [rows, size] whose values follow each other within a row."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension; weight is [size], or [heads, size] where each head has its own."""
    size = x.shape[-1]
    flat = _flat(x)
    rows = flat.shape[0]
    shape = _shape_of(size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        _norm[(triton.cdiv(rows, shape["ROWS"]),)](
            flat, weight, out, rows, flat.stride(0), weight.numel() // size, epsilon, **shape
        )
    return out


def normalize(x: Tensor, norm: Norm) -> Tensor:
    norm = norm.folded
    return rms_norm(x, norm.weight, norm.epsilon)


def add_normed(
    hidden: Tensor, y: Tensor, norm: Norm | None, *, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """hidden + scale · norm(y), into `out` where there is one; it may be `hidden`."""
    whole = all(x is None or x.is_contiguous() for x in (hidden, y, out))
    if norm is None or not whole:
        return reference.add_normed(hidden, y, norm, scale=scale, out=out)
    out = torch.empty_like(hidden) if out is None else out
    norm = norm.folded
    size = y.shape[-1]
    rows = y.numel() // size
    shape = _shape_of(size)
    if rows:
        _add_normed[(triton.cdiv(rows, shape["ROWS"]),)](
            hidden, y, norm.weight, out, rows, norm.epsilon, scale, **shape
        )
    return out


def silu_mul(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """[..., 2 · size] → [..., size]; the gate is the first half."""
    size = gate_up.shape[-1] // 2
    flat = _flat(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    rows = flat.shape[0]
    if rows:
        _silu_mul[(rows, triton.cdiv(size, block))](
            flat,
            out,
            flat.stride(0),
            SIZE=size,
            BLOCK=block,
            GELU=gelu,
            num_warps=max(1, block // 256),
        )
    return out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) · up; what is neither silu nor tanh-gelu runs as plain torch ops."""
    if activation in ("silu", "gelu_tanh"):
        return silu_mul(gate_up, gelu=activation == "gelu_tanh")
    return reference.gate(gate_up, activation)


@triton.jit
def _inverse_size(low, high, rest, epsilon, HEAD_DIM: tl.constexpr):
    """1 / √(mean x² + ε) of heads in three parts"""
    squares = tl.sum(low * low + high * high, axis=1, keep_dims=True) + tl.sum(
        rest * rest, axis=1, keep_dims=True
    )
    return tl.math.rsqrt(squares / HEAD_DIM + epsilon)


@triton.jit
def _normed(value, inverse, norm, at, live, turned):
    """Heads of q and k; those of v stay as they are."""
    dtype = norm.dtype.element_ty
    factor = tl.load(norm + at, mask=live & turned, other=0.0).to(tl.float32)
    normed = ((value * inverse).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
    return tl.where(turned, normed, value)


@triton.jit
def _write_part(
    value, qkv, keys, values, head, at, kv_at, live, HEADS: tl.constexpr, KV_HEADS: tl.constexpr
):
    """q and k back into qkv, where attention reads them; k and v into their slot."""
    tl.store(qkv + at, value.to(qkv.dtype.element_ty), mask=live & (head < HEADS + KV_HEADS))
    if keys is not None:
        tl.store(
            keys + kv_at,
            value.to(keys.dtype.element_ty),
            mask=live & (head >= HEADS) & (head < HEADS + KV_HEADS),
        )
        tl.store(
            values + kv_at,
            value.to(values.dtype.element_ty),
            mask=live & (head >= HEADS + KV_HEADS),
        )


# they may be cut out of a buffer
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_norm_write(
    qkv,
    cos,
    sin,
    slots,
    norm,
    keys,
    values,
    stride,
    table_stride,
    slot_stride,
    epsilon,
    query_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Some heads of a token as three tiles: the halves that rope pairs up [heads, HALF], and the
    rest it leaves alone.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    rest_column = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    exists = head < HEADS + 2 * KV_HEADS
    turned = head < HEADS + KV_HEADS
    live = exists & (column < HALF)
    rest_live = exists & (rest_column < HEAD_DIM)
    at = head * HEAD_DIM
    row = qkv + token * stride
    low = tl.load(row + at + column, mask=live, other=0.0).to(tl.float32)
    high = tl.load(row + at + column + HALF, mask=live, other=0.0).to(tl.float32)
    rest = tl.load(row + at + rest_column, mask=rest_live, other=0.0).to(tl.float32)
    if norm is not None:
        inverse = _inverse_size(low, high, rest, epsilon, HEAD_DIM)
        low = _normed(low, inverse, norm, at + column, live, turned)
        high = _normed(high, inverse, norm, at + column + HALF, live, turned)
        rest = _normed(rest, inverse, norm, at + rest_column, rest_live, turned)
    place = token * table_stride + column
    cosine = tl.where(turned, tl.load(cos + place, mask=column < HALF, other=0.0), 1.0)
    sine = tl.where(turned, tl.load(sin + place, mask=column < HALF, other=0.0), 0.0)
    slot = tl.load(slots + token)
    kv_at = slot * slot_stride + (head - HEADS + KV_HEADS) % KV_HEADS * HEAD_DIM
    live = live & ((slot >= 0) | (head < HEADS))
    rest_live = rest_live & ((slot >= 0) | (head < HEADS))
    by = tl.where(head < HEADS, query_scale, 1.0)
    for second in tl.static_range(2):
        if second:
            value = high * cosine + low * sine
        else:
            value = low * cosine - high * sine
        _write_part(
            value * by,
            row,
            keys,
            values,
            head,
            at + column + second * HALF,
            kv_at + column + second * HALF,
            live,
            HEADS,
            KV_HEADS,
        )
    if HEAD_DIM > 2 * HALF:
        _write_part(
            rest * by,
            row,
            keys,
            values,
            head,
            at + rest_column,
            kv_at + rest_column,
            rest_live,
            HEADS,
            KV_HEADS,
        )


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
    """q/k norm and rope in place, q scaled, K and V written to `slots` (a negative one is padding);
    returns views q, k, v of qkv, K and V as an 8-bit cache gives them back.

    qkv [tokens, heads + 2 · kv_heads, head_dim]; the norm's weight [heads + kv_heads,
    head_dim]; cos and sin from `reference.rope_rows`.
    """
    tokens, all_heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    heads = all_heads - 2 * kv_heads
    # the second half of a row: rope_rows negates the sine of the first
    cos, sin = (table.flatten(1)[:, table.shape[-1] // 2 :] for table in (cos, sin))
    half = cos.shape[-1]
    head_block = min(16, triton.next_power_of_2(all_heads))
    if tokens:
        _rope_norm_write[(tokens, triton.cdiv(all_heads, head_block))](
            qkv,
            cos,
            sin,
            slots,
            None if norm is None else norm.weight,
            cache.keys if cache.eight is None else None,
            cache.values if cache.eight is None else None,
            qkv.stride(0),
            cos.stride(0),
            cache.keys.stride(1),
            0.0 if norm is None else norm.epsilon,
            query_scale,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=size,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)),
            HEAD_BLOCK=head_block,
        )
    query, keys, values = qkv.split([heads, kv_heads, kv_heads], 1)
    if tokens and cache.eight is not None:  # codes are left to plain ops
        cache.write(keys, values, slots)
        keys.copy_(cache.eight.read(0, cache.keys, slots))
        values.copy_(cache.eight.read(1, cache.values, slots))
    return query, keys, values
