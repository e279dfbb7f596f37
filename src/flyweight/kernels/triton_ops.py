"""Norms, silu·mul, activation quantization, rope with KV write, and argmax: each one pass over memory, in Triton.

    rms_norm, add_rms_norm, norm_quantize      out = x / √(mean x² + ε) · w, x = x + residual first
    silu_mul, silu_quantize, quantize_rows     out = gate / (1 + e^−gate) · up
    rope_norm_write                            q, k = rope(norm(q, k)) in place; cache[slot] = k, v

Work split: a program holds a whole row in registers (several rows where they are short), so a row is read once however
many results it has: its sum with the residual, its norm, its codes and their scale. silu·mul without codes needs no
whole rows, and is cut along them too. Limit: bytes / bandwidth for many rows, the launch for few.

Every intermediate is rounded to the 16-bit type where the torch ops of `reference` round it, and codes are made of
what the unquantized op would return: batches of any size and the plain path compute one function. The number of rows
is an ordinary argument, so kernels compile once for each width. Not measured yet: `benchmarks/prefill_ops.py` does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyweight.engine.batch import KVStorage
from flyweight.tensors.float8 import FLOAT8_MAX

INT8_MAX, FLOAT8_LIMIT = tl.constexpr(127.0), tl.constexpr(FLOAT8_MAX)
ROUND = tl.constexpr(1.5 * 2**23)  # adding and taking it away again rounds a small float32 to an integer, half to even
ARGMAX_BLOCK = 4096


@triton.jit
def _rows_of(rows, ROWS: tl.constexpr):
    """The rows of this program [ROWS, 1], in 64 bits since they get multiplied by widths, and which of them exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    return row.to(tl.int64), row < rows


@triton.jit
def _store_rows(value, out, scales, row, exists, column, SIZE: tl.constexpr):
    """Write float32 rows as out's type; as codes with a scale for each row where `scales` is given.

    The arithmetic of tensors.quantize_int8_rows and Float8.quantize_input: torch turns 127 / most into (1 / most) · 127.
    """
    if scales is not None:
        most = tl.max(tl.abs(value), axis=1, keep_dims=True)
        if out.dtype.element_ty == tl.int8:
            most = tl.maximum(most, 127e-12)
            value = value * (tl.math.div_rn(1.0, most) * INT8_MAX) + ROUND - ROUND
            scale = tl.math.div_rn(most, most * 0 + INT8_MAX)
        else:
            scale = tl.maximum(tl.math.div_rn(most, most * 0 + FLOAT8_LIMIT), 1e-12)
            value = tl.math.div_rn(value, tl.broadcast_to(scale, value.shape))
            value = tl.minimum(tl.maximum(value, -FLOAT8_LIMIT), FLOAT8_LIMIT)
        tl.store(scales + row, scale, mask=exists)
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=exists & (column < SIZE))


@triton.jit(do_not_specialize=["rows"])
def _norm(x, residual, weight, out, total, scales, rows, x_stride, residual_stride, weight_rows, epsilon,
          SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    dtype = x.dtype.element_ty
    row, exists = _rows_of(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = exists & (column < SIZE)
    value = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + column, mask=live, other=0.0).to(tl.float32)
        tl.store(total + row * SIZE + column, value.to(dtype), mask=live)
        value = value.to(dtype).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / SIZE + epsilon)
    factor = tl.load(weight + row % weight_rows * SIZE + column, mask=live, other=0.0).to(tl.float32)
    value = (value * inverse).to(dtype).to(tl.float32) * factor
    _store_rows(value.to(dtype).to(tl.float32), out, scales, row, exists, column, SIZE)


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(gate_up, out, scales, rows, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
              INTERLEAVED: tl.constexpr):
    dtype = gate_up.dtype.element_ty
    row, exists = _rows_of(rows, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = exists & (column < SIZE)
    place = gate_up + row * stride + (column // 8 * 16 + column % 8 if INTERLEAVED else column)
    gate = tl.load(place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(place + (8 if INTERLEAVED else SIZE), mask=live, other=0.0).to(tl.float32)
    value = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    _store_rows(value.to(dtype).to(tl.float32), out, scales, row, exists, column, SIZE)


@triton.jit(do_not_specialize=["rows"])
def _quantize(x, out, scales, rows, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, exists = _rows_of(rows, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = exists & (column < SIZE)
    value = tl.load(x + row * stride + column, mask=live, other=0.0).to(tl.float32)
    _store_rows(value, out, scales, row, exists, column, SIZE)


def _shape_of(size: int) -> dict[str, int]:
    """16 values a thread where that takes 1 to 16 warps; short rows share a program. Fused multiply-adds would round a
    code once where torch rounds twice."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    warps = min(16, max(1, rows * block // 512))
    return dict(SIZE=size, BLOCK=block, ROWS=rows, num_warps=warps, enable_fp_fusion=False)


def _flat(x: Tensor) -> Tensor:
    """[..., size] → [rows, size] whose values follow each other within a row."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, *, epsilon: float,
                 codes: torch.dtype | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    size, flat = x.shape[-1], _flat(x)
    rows, shape = flat.shape[0], _shape_of(size)
    other = None if residual is None else _flat(residual)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=codes or x.dtype, device=x.device)
    scales = None if codes is None else torch.empty(rows, device=x.device)
    if rows:
        _norm[(triton.cdiv(rows, shape["ROWS"]),)](
            flat, other, weight, out, total, scales, rows, flat.stride(0), 0 if other is None else other.stride(0),
            weight.numel() // size, epsilon, **shape)
    return out, total, scales


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension; weight is [size], or [heads, size] where each head has its own."""
    return _launch_norm(x, None, weight, epsilon=epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    out, total, _ = _launch_norm(x, residual, weight, epsilon=epsilon)
    assert total is not None
    return out, total


def norm_quantize(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, *,
                  dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual as codes (int8, or float8 e4m3) and float32 scales [rows], and that sum (x without residual)."""
    codes, total, scales = _launch_norm(x, residual, weight, epsilon=epsilon, codes=dtype)
    assert scales is not None
    return codes, scales, x if total is None else total


def silu_mul(gate_up: Tensor, *, interleaved: bool = False) -> Tensor:
    """[..., 2 · size] → [..., size]: the gate half first, or gate and up by turns of eight (`gemv.interleave_rows`)."""
    size, flat = gate_up.shape[-1] // 2, _flat(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    rows = flat.shape[0]
    if rows:
        _silu_mul[(rows, triton.cdiv(size, block))](flat, out, None, rows, flat.stride(0), SIZE=size, BLOCK=block, ROWS=1,
                                                    INTERLEAVED=interleaved, num_warps=max(1, block // 256))
    return out


def silu_quantize(gate_up: Tensor, *, interleaved: bool = False, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """`silu_mul` as codes and float32 scales [rows]."""
    size, flat = gate_up.shape[-1] // 2, _flat(gate_up)
    codes = torch.empty(*gate_up.shape[:-1], size, dtype=dtype, device=gate_up.device)
    rows, shape = flat.shape[0], _shape_of(size)
    scales = torch.empty(rows, device=gate_up.device)
    if rows:
        grid = triton.cdiv(rows, shape["ROWS"]), 1
        _silu_mul[grid](flat, codes, scales, rows, flat.stride(0), INTERLEAVED=interleaved, **shape)
    return codes, scales


def quantize_rows(x: Tensor, *, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [..., size] as codes (int8, or float8 e4m3) and float32 scales [rows]."""
    flat = _flat(x)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, shape = flat.shape[0], _shape_of(x.shape[-1])
    scales = torch.empty(rows, device=x.device)
    if rows:
        _quantize[(triton.cdiv(rows, shape["ROWS"]),)](flat, codes, scales, rows, flat.stride(0), **shape)
    return codes, scales


@triton.jit
def _normed(value, inverse, norm, at, live, dtype: tl.constexpr):
    factor = tl.load(norm + at, mask=live, other=0.0).to(tl.float32)
    return ((value * inverse).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)


@triton.jit
def _write_part(value, qkv, keys, values, head, at, kv_at, live, HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """q and k back into qkv, where attention reads them; k and v into their slot."""
    tl.store(qkv + at, value.to(qkv.dtype.element_ty), mask=live & (head < HEADS + KV_HEADS))
    tl.store(keys + kv_at, value.to(keys.dtype.element_ty), mask=live & (head >= HEADS) & (head < HEADS + KV_HEADS))
    tl.store(values + kv_at, value.to(values.dtype.element_ty), mask=live & (head >= HEADS + KV_HEADS))


@triton.jit
def _rope_norm_write(qkv, cos, sin, positions, slots, norm, keys, values, stride, table_stride, slot_stride, epsilon,
                     HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                     BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Some heads of a token as three tiles: the halves that rope pairs up [heads, HALF], and the rest it leaves alone."""
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column, rest_column = tl.arange(0, BLOCK)[None, :], 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    exists, turned = head < HEADS + 2 * KV_HEADS, head < HEADS + KV_HEADS
    live, rest_live = exists & (column < HALF), exists & (rest_column < HEAD_DIM)
    at, row = head * HEAD_DIM, qkv + token * stride
    low = tl.load(row + at + column, mask=live, other=0.0).to(tl.float32)
    high = tl.load(row + at + column + HALF, mask=live, other=0.0).to(tl.float32)
    rest = tl.load(row + at + rest_column, mask=rest_live, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low + high * high, axis=1, keep_dims=True) + tl.sum(rest * rest, axis=1, keep_dims=True)
        inverse = tl.math.rsqrt(squares / HEAD_DIM + epsilon)
        low = tl.where(turned, _normed(low, inverse, norm, at + column, live & turned, dtype), low)
        high = tl.where(turned, _normed(high, inverse, norm, at + column + HALF, live & turned, dtype), high)
        rest = tl.where(turned, _normed(rest, inverse, norm, at + rest_column, rest_live & turned, dtype), rest)
    place = (token if positions is None else tl.load(positions + token)) * table_stride + column
    cosine = tl.where(turned, tl.load(cos + place, mask=column < HALF, other=0.0), 1.0)
    sine = tl.where(turned, tl.load(sin + place, mask=column < HALF, other=0.0), 0.0)
    slot = tl.load(slots + token)
    kv_at = slot * slot_stride + (head - HEADS + KV_HEADS) % KV_HEADS * HEAD_DIM
    live, rest_live = live & ((slot >= 0) | (head < HEADS)), rest_live & ((slot >= 0) | (head < HEADS))
    _write_part(low * cosine - high * sine, row, keys, values, head, at + column, kv_at + column, live, HEADS, KV_HEADS)
    column += HALF
    _write_part(high * cosine + low * sine, row, keys, values, head, at + column, kv_at + column, live, HEADS, KV_HEADS)
    if HEAD_DIM > 2 * HALF:
        _write_part(rest, row, keys, values, head, at + rest_column, kv_at + rest_column, rest_live, HEADS, KV_HEADS)


def rope_norm_write(qkv: Tensor, cache: KVStorage, slots: Tensor, *, cos: Tensor, sin: Tensor, heads: int, norm: Tensor | None,
                    epsilon: float, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q/k norm and rope in place, K and V written to `slots` (a negative one is padding); returns views q, k, v of qkv.

    qkv [tokens, heads + 2 · kv_heads, head_dim]; norm [heads + kv_heads, head_dim]. cos and sin come from
    `reference.rope_rows`, or are whole tables [positions, rotary / 2] where `positions` [tokens] is given.
    """
    tokens, all_heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    if positions is None:  # the second half of a row: rope_rows negates the sine of the first
        cos, sin = (table.flatten(1)[:, table.shape[-1] // 2 :] for table in (cos, sin))
    half = cos.shape[-1]
    head_block = min(16, triton.next_power_of_2(all_heads))
    if tokens:
        _rope_norm_write[(tokens, triton.cdiv(all_heads, head_block))](
            qkv, cos, sin, positions, slots, norm, cache.keys, cache.values, qkv.stride(0), cos.stride(0), cache.keys.stride(1),
            epsilon, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=size, HALF=half, BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)), HEAD_BLOCK=head_block)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


@triton.jit
def _argmax_part(logits, most, places, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < SIZE, other=-float("inf")).to(tl.float32)
    best = tl.max(value, axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(most + at, best)
    tl.store(places + at, tl.min(tl.where(value == best, column, SIZE - 1), axis=0))


@triton.jit
def _argmax_merge(most, places, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(most + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    place = tl.load(places + row * PARTS + part, mask=part < PARTS, other=2**31 - 1)
    best = tl.max(value, axis=0)
    tl.store(out + row, tl.min(tl.where((value == best) & (part < PARTS), place, 2**31 - 1), axis=0).to(tl.int64))


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The first of the largest of each row [rows, size], int64 [rows]: a row over many programs, then their results over one."""
    rows, size = logits.shape
    parts = triton.cdiv(size, ARGMAX_BLOCK)
    most = torch.empty(rows, parts, device=logits.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    _argmax_part[(rows, parts)](logits, most, places, logits.stride(0), SIZE=size, BLOCK=ARGMAX_BLOCK)
    _argmax_merge[(rows,)](most, places, out, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out
