"""The qkv linear with decode attention behind it, in one kernel: host side of
cuda/qkv_attention.cu.

CTAs hand their results to each other through mailboxes in memory, which a launch finds empty and
which the launch before it has emptied. So launches come in a fixed cycle (the layers of a step),
and each names its own mailbox and the next one's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.gpu import Gpu
from flyweight.kernels import jit
from flyweight.kernels.attention.decode import (
    CHUNK,
    COLUMNS,
    AttentionLayer,
    HeadShape,
    Rows,
    eight_bit_arguments,
    eight_bit_defines,
)
from flyweight.kernels.linear import gemv, gemv_plan
from flyweight.kernels.linear.choose import route, within_attention
from flyweight.kernels.linear.fused import FusedLinear, Norm
from flyweight.kernels.linear.gemv_plan import Plan
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight

SHORTEST = 32  # tokens worth a CTA of their own
HEAD_DIMS = (64, 128, 256)
# Where a row alone would have up to so many runs, a CTA takes several rows of a sequence at once
# (TOGETHER of qkv_attention.cu); more runs are short enough, and cost more to hand over
TOGETHER = 4
# Bytes: where the first 32 tiles of a run lie in the cache, and the newest token; what a CTA takes
KNOWN = 4 * 32 + 16 + 64
SHORTEST_WINDOW = 64  # tokens: of shorter ones a row may see nothing of a tile


@dataclass(frozen=True)
class Mailbox:
    """Words of all ones are empty: a NaN that no arithmetic makes."""

    qkv: Tensor  # [rows, width of q, k and v]
    states: Tensor  # float32, a partial result of each CTA

    @classmethod
    def make(
        cls,
        shape: HeadShape,
        rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        chunk: int = 1,
    ) -> Mailbox:
        """`chunk`: rows that may be of one sequence."""
        ctas = shape.kv_heads * head_ctas(shape, gpu.of(device))
        queries = rows_together(shape, chunk, gpu.of(device)) * shape.item_heads
        states = ctas * queries * (shape.head_dim + 4)
        return cls(
            torch.full((rows, shape.width), -1, dtype=torch.int16, device=device).view(dtype),
            torch.full((states,), -1, dtype=torch.int32, device=device).view(torch.float32),
        )


def mailbox_cycle(
    shape: HeadShape,
    rows: int,
    layers: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    chunk: int = 1,
) -> list[Mailbox]:
    """One for each of at least two layers; neighbours differ, the last and the first too. Two, or
    three for an odd count. `chunk`: rows that may be of one sequence.
    """
    boxes = [
        Mailbox.make(shape, rows, dtype=dtype, device=device, chunk=chunk)
        for _ in range(2 + layers % 2)
    ]
    return [
        boxes[2 if layers % 2 and layer == layers - 1 else layer % 2] for layer in range(layers)
    ]


def head_tiles(shape: HeadShape) -> int:
    """Of the linear, that belong to a kv head."""
    return shape.width // shape.kv_heads // 16


def head_ctas(shape: HeadShape, device: Gpu) -> int:
    """CTAs that share a kv head: all are resident at once, and each has a tile of the linear. As
    many for each part of its query heads.
    """
    most = min(device.processors // shape.kv_heads, head_tiles(shape))
    return most // shape.items_of_kv_head * shape.items_of_kv_head


def most_tiles(shape: HeadShape, device: Gpu) -> int:
    """Of the linear that one CTA has."""
    return math.ceil(head_tiles(shape) / head_ctas(shape, device))


def chunk_of(rows: int, *, shared: bool) -> int:
    """Rows of a step that may be of one sequence."""
    return min(rows, CHUNK) if shared else 1


def chunk_bytes(shape: HeadShape, chunk: int, device: Gpu) -> int:
    """Of the keys and values of new tokens in shared memory, and of queries, beyond those of one
    row.
    """
    query = 2 * shape.head_dim + (64 if shape.eight_bits else 16)
    queries = (rows_together(shape, chunk, device) - 1) * shape.item_heads * query
    return 4 * shape.head_dim * (chunk - 1) + (36 * chunk if chunk > 1 else 0) + queries


def rows_together(shape: HeadShape, chunk: int, device: Gpu) -> int:
    """Rows of a sequence that a CTA takes at once: as many as have room for their query heads in
    the columns of a product. `chunk`: rows that may be of one sequence.
    """
    runs = head_ctas(shape, device) // shape.items_of_kv_head // chunk
    if runs > TOGETHER or shape.gated or 0 < (shape.window or 0) < SHORTEST_WINDOW:
        return 1
    return min(chunk, COLUMNS // shape.item_heads)


def linear_plan(
    weight: TiledWeight,
    shape: HeadShape,
    rows: int,
    device: Gpu,
    more: int = 0,
    *,
    beside: bool = False,
    lone_row: bool = False,
) -> Plan | None:
    """`more`: bytes of shared memory that are needed besides; `beside`: all kernels of the layer
    leave each other room; `lone_row`: one, without an adapter.
    """
    tiles = most_tiles(shape, device)
    own = more + shape.item_heads * (shape.head_dim + 8) * 2 + 4 * shape.head_dim + 128 + KNOWN
    if shape.eight_bits:  # rows of queries lie further apart, and the newest token has scales
        own += shape.item_heads * 48 + 128
    if beside and pairs(shape, device):
        found = gemv_plan.pair_plan(weight.matrix, rows, device, tiles=tiles, more=own)
        if found:
            return found
    # Beside kernels that have an SM each it takes one too: of CTAs with room for two, an SM that is
    # free early would get both
    alone = route(weight.matrix, rows, device).kernel in ("gemv_cluster", "gemm_small")
    return gemv_plan.fitting_plan(
        weight.matrix,
        rows,
        device,
        tiles=tiles,
        more=own,
        alone=alone and not beside,
        attends=beside,
        lone_row=lone_row,
    )


def pairs(shape: HeadShape, device: Gpu) -> bool:
    """Whether the CTAs of a kv head may share tiles in pairs (PAIRED of gemv.cuh): two and two of
    one head, each with as many tiles.
    """
    ctas = head_ctas(shape, device)
    return device.has_warpgroups and ctas % 2 == 0 and head_tiles(shape) % ctas == 0


def leaves_room(
    linear: FusedLinear, shape: HeadShape, rows: int, device: Gpu, chunk: int = 1
) -> bool:
    """Whether this linear and its attention have a kernel beside which another one fits on every
    SM (`FusedLinear.leaves_room`).
    """
    if not isinstance(linear, TiledLinear):
        return False
    more = chunk_bytes(shape, chunk, device)
    found = linear_plan(linear.weight, shape, rows, device, more, beside=True)
    return found is not None and gemv_plan.leaves_room(found, device)


def unsupported_reason(
    linear: FusedLinear, shape: HeadShape, rows: int, device: Gpu, chunk: int = 1
) -> str | None:
    """None, or why this linear and its attention are not one kernel."""
    if not isinstance(linear, TiledLinear):
        return f"qkv runs as {linear.kernel}"
    weight = linear.weight
    if not within_attention(weight.matrix, rows, device):
        return f"{rows} rows of {weight.format} are faster through a kernel of their own"
    if reason := shape.unsupported_reason():
        return reason
    if shape.head_dim not in HEAD_DIMS:
        return (
            f"head_dim {shape.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}, so "
            f"attention is a kernel of its own"
        )
    if shape.group % shape.items_of_kv_head:
        return (
            f"{shape.group} query heads share a kv head: more than {COLUMNS}, and not to be cut "
            f"into equal parts"
        )
    if rows not in gemv_plan.ROWS:
        return f"{rows} rows are not {', '.join(map(str, gemv_plan.ROWS))}"
    if weight.out_features != shape.width:
        return f"the linear has {weight.out_features} outputs, its heads {shape.width}"
    if shape.items > device.processors:
        return f"{shape.items} parts of kv heads are more than the GPU has processors"
    if shape.rotary % (shape.head_dim // 16):
        return (
            f"rope turns {shape.rotary} of {shape.head_dim} dimensions, no multiple of "
            f"{shape.head_dim // 16}"
        )
    if linear_plan(weight, shape, rows, device, chunk_bytes(shape, chunk, device)) is None:
        return (
            f"{rows} rows of {weight.in_features} inputs do not fit into shared memory beside "
            f"attention"
        )
    return None


def qkv_attention(
    linear: FusedLinear,
    x: Tensor,
    out: Tensor,
    cache: KVStorage,
    rows: Rows,
    *,
    layer: AttentionLayer,
    norm: Norm,
    mailboxes: tuple[Mailbox, Mailbox],
) -> Tensor:
    """x [rows, in] → out [rows, heads · head_dim]; writes the new K and V. `mailboxes`: this
    launch's, and the next one's.

    A row of length 0 is padding, and its out is left as it was.
    """
    assert isinstance(linear, TiledLinear)
    weight = linear.weight
    shape = layer.shape
    device = gpu.of(x.device)
    count = x.shape[0]
    ctas = head_ctas(shape, device)
    tiles = most_tiles(shape, device)
    adapted = rows.adapted
    chunk = chunk_of(count, shared=rows.before is not None)
    more = chunk_bytes(shape, chunk, device) + (adapted.shared_bytes(tiles) if adapted else 0)
    lone_row = count == 1 and not adapted
    chosen = linear_plan(weight, shape, count, device, more, beside=layer.beside, lone_row=lone_row)
    assert chosen is not None, unsupported_reason(linear, shape, count, device, chunk)
    x, arranged = linear.arranged(x, norm)
    assert arranged is not None
    norm = arranged.folded
    defines = (
        gemv.defines(weight, count, chosen, device, norm=True)
        | shape.defines
        | {"HEAD_CTAS": ctas, "SHORTEST": SHORTEST}
        | eight_bit_defines(cache)
        | (adapted.defines(tiles, chosen.warps, shape.kv_heads * ctas) if adapted else {})
        | ({"CHUNK": chunk} if chunk > 1 else {})
        | ({"TOGETHER": 1} if rows_together(shape, chunk, device) > 1 else {})
    )
    kernel = jit.load("qkv_attention.cu", defines=defines).kernel("qkv_attention")
    mine, following = mailboxes
    args = (
        weight.weights,
        weight.records,
        gemv.channels(weight, count),
        x,
        norm.weight,
        weight.bias,
        layer.norms.query,
        layer.norms.key,
        rows.rope,
        rows.lengths,
        rows.tables,
        cache.keys,
        cache.values,
        out,
        mine.qkv,
        mine.states,
        following.qkv,
        following.states,
        norm.epsilon,
        float(layer.scale),
        rows.tables.shape[1],
        gemv.tickets(weight, count, x.device, beside=layer.beside),
        *((rows.before,) if chunk > 1 else ()),
        *eight_bit_arguments(cache),
        *layer.bend_arguments,
        *(adapted.arguments if adapted else ()),
    )
    # one on every SM, so that all offer the same room
    cluster = 2 if chosen.paired else 1
    grid = max(shape.kv_heads * ctas, device.processors // cluster * cluster)
    threads = chosen.threads + 32 * (adapted is not None)
    kernel.launch(grid, threads, args, shared=chosen.shared, pdl=True, cluster=cluster)
    return out
