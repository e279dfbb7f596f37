"""The qkv linear with decode attention behind it, in one kernel: host side of cuda/qkv_attention.cu.

CTAs hand their results to each other through mailboxes in memory, which a launch finds empty and which the launch before
it has emptied. So launches come in a fixed cycle (the layers of a step), and each names its own mailbox and the next one's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels import choices, jit
from flyweight.kernels.attention import HeadShape
from flyweight.kernels.gemv import ROWS, Gemv, Plan, processors, turns

SHORTEST = 32  # tokens worth a CTA of their own


@dataclass(frozen=True)
class Mailbox:
    """Words of all ones are empty: a NaN that no arithmetic makes."""

    qkv: Tensor  # [rows, (heads + 2 · kv_heads) · head_dim]
    states: Tensor  # float32, a partial result of each CTA

    @classmethod
    def make(cls, shape: HeadShape, rows: int, *, dtype: torch.dtype, device: torch.device) -> Mailbox:
        states = shape.kv_heads * head_ctas(shape, device) * shape.group * (shape.head_dim + 4)
        return cls(torch.full((rows, width(shape)), -1, dtype=torch.int16, device=device).view(dtype),
                   torch.full((states,), -1, dtype=torch.int32, device=device).view(torch.float32))


def mailbox_cycle(shape: HeadShape, rows: int, layers: int, *, dtype: torch.dtype, device: torch.device) -> list[Mailbox]:
    """One for each of at least two layers; neighbours differ, the last and the first too. Two, or three for an odd count."""
    boxes = [Mailbox.make(shape, rows, dtype=dtype, device=device) for _ in range(2 + layers % 2)]
    return [boxes[2 if layers % 2 and layer == layers - 1 else layer % 2] for layer in range(layers)]


def width(shape: HeadShape) -> int:
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim


def head_ctas(shape: HeadShape, device: torch.device) -> int:
    """CTAs that share a kv head: all are resident at once, and each has a tile of the linear."""
    return min(processors(device.index or 0) // shape.kv_heads, (shape.group + 2) * shape.head_dim // 16)


def linear_plan(weight: Gemv, shape: HeadShape, rows: int, device: torch.device) -> Plan | None:
    tiles = math.ceil((shape.group + 2) * shape.head_dim / 16 / head_ctas(shape, device))
    own = shape.group * (shape.head_dim + 8) * 2 + 4 * shape.head_dim + 128
    # Beside kernels that have an SM each it takes one too: of CTAs with room for two, an SM that is free early would get both
    alone = choices.wanted(weight.kind, rows, weight.out_features, weight.in_features) in ("few", "batch")
    return weight.plan(rows, tiles=tiles, more=own, alone=alone)


def why_not(weight: Gemv, shape: HeadShape, rows: int) -> str | None:
    """None, or why this linear and its attention cannot be one kernel."""
    device = weight.weights.device
    reason = shape.supported()
    if reason is not None:
        return reason
    if rows not in ROWS:
        return f"{rows} rows are not {', '.join(map(str, ROWS))}"
    if weight.out_features != width(shape):
        return f"the linear has {weight.out_features} outputs, its heads {width(shape)}"
    if shape.kv_heads > processors(device.index or 0):
        return f"{shape.kv_heads} kv heads are more than the GPU has processors"
    if shape.rotary % (shape.head_dim // 16):
        return f"rope turns {shape.rotary} of {shape.head_dim} dimensions, no multiple of {shape.head_dim // 16}"
    chosen = linear_plan(weight, shape, rows, device)
    if chosen is None:
        return f"{rows} rows of {weight.in_features} inputs do not fit into shared memory beside attention"
    return None


@functools.cache
def shape_defines(shape: HeadShape, ctas: int) -> dict[str, int]:
    return {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "ROTARY": shape.rotary,
            "PAGE": shape.page, "QK_NORM": int(shape.qk_norm), "WINDOW": shape.window or 0, "HEAD_CTAS": ctas}


def qkv_attention(weight: Gemv, x: Tensor, out: Tensor, cache: KVStorage, *, shape: HeadShape, norm: Tensor,
                  norms: tuple[Tensor, Tensor] | None, rope: Tensor, lengths: Tensor, tables: Tensor, mailbox: Mailbox,
                  next_mailbox: Mailbox, epsilon: float, scale: float, pdl: bool = True) -> Tensor:
    """x [rows, in] → out [rows, heads · head_dim]; writes the new K and V.

    lengths int32 [rows] count the new token; tables int32 [rows, pages]. A row of length 0 is padding, and its out is left
    as it was.
    """
    rows, ctas = x.shape[0], head_ctas(shape, x.device)
    chosen = linear_plan(weight, shape, rows, x.device)
    assert chosen is not None, why_not(weight, shape, rows)
    defines = weight.defines(rows, chosen, norm=True) | shape_defines(shape, ctas) | {"SHORTEST": SHORTEST}
    kernel = jit.load("qkv_attention.cu", defines=defines).kernel("qkv_attention")
    query_norm, key_norm = norms or (None, None)
    args = (weight.weights, weight.records, weight.channel_scale, x, norm, weight.bias, query_norm, key_norm, rope, lengths,
            tables, cache.keys, cache.values, out, mailbox.qkv, mailbox.states, next_mailbox.qkv, next_mailbox.states,
            float(epsilon), float(scale), tables.shape[1], turns(weight.kind, rows, x.device))
    grid = max(shape.kv_heads * ctas, processors(x.device.index or 0))  # one on every SM, so that all offer the same room
    kernel.launch(grid, 32 * (chosen.warps + 1), args, shared=chosen.shared, pdl=pdl)
    return out
