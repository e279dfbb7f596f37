"""Attention of any mix of new tokens over the paged cache: whole prompts, later chunks of them,
decoding rows.

    out = softmax(q Kᵀ · scale) V,  token at position p sees the cached tokens p − window < j ≤ p of
    its sequence

Scores that are bent (`reference.Bend`: a soft-cap, sinks) all go through the Triton kernel.
Three ways. Prompts and chunks of them go through prefill_attention.cu where that is switched on.
Else sequences that begin in this step go through torch's attention (torch_runs.py). All others go
through the Triton kernel here, which reads pages through the block table. plan.py says which
sequence goes where, tiles.py how the kernel's work is split.

Columns that every row of a tile sees run without a mask. Limit: the matrix units for prompts, bytes
of KV / bandwidth for few rows. Not measured yet: `benchmarks/prefill_ops.py` does it, and sweeps
`Tile`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels.attention import prefill
from flyweight.kernels.attention.plan import Plan
from flyweight.kernels.attention.prefill import Heads, Units
from flyweight.kernels.attention.tiles import Launch, Tile, large_tile
from flyweight.kernels.attention.torch_runs import attend_run
from flyweight.kernels.reference import Bend

LOG2_E = tl.constexpr(1 / math.log(2))
LOWEST = tl.constexpr(-1.0e30)  # of a masked score; finite, since −∞ less −∞ is no number


@triton.jit
def _read_pages(
    pages, scales, at, scale_at, live, written, DTYPE: tl.constexpr, CODES: tl.constexpr
):
    """Keys or values [columns, dimensions] as numbers: codes of 8 bits (kv_format.py) are
    multiplied with their token's scale.
    """
    if CODES == 0:
        value = tl.load(pages + at, mask=live, other=0.0)
    else:
        code = tl.load(pages + at, mask=live, other=0)
        if CODES == 1:  # e4m3: the same bits one place further on are an fp16 number, 2^-8 as much
            bits = code.to(tl.uint16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            number = code.to(tl.float32)
        scale = tl.load(scales + scale_at, mask=written, other=0.0).to(tl.float32)
        value = (number * scale[:, None]).to(DTYPE)
    return value


@triton.jit
def _absorb(
    query,
    most,
    total,
    result,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    start,
    end,
    place,
    dim,
    scale,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the running softmax: `most` and `total` in base 2, over the columns from `start`
    on.
    """
    column = start + tl.arange(0, COLUMNS)
    # what lies beyond may never have been written: not even a number
    written = column < end if MASKED else column >= 0
    page = tl.load(table + column // PAGE, mask=written, other=0).to(tl.int64)
    at = ((page * PAGE + column % PAGE) * slot_stride)[:, None] + dim[None, :]
    live = written[:, None] & (dim < HEAD_DIM)[None, :]
    scale_at = page * (tl.num_programs(1) * PAGE) + column % PAGE
    key = _read_pages(keys, key_scales, at, scale_at, live, written, query.dtype, CODES)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFT_CAP > 0:  # cap · tanh(score / cap), in base 2 as all scores are
        turned = tl.math.exp2(score * (-2 * LOG2_E / SOFT_CAP))
        score = SOFT_CAP * (2 / (1 + turned) - 1)
    if MASKED:
        seen = (column[None, :] <= place[:, None]) & written[None, :]
        if WINDOW > 0:
            seen = seen & (column[None, :] > place[:, None] - WINDOW)
        score = tl.where(seen, score, LOWEST)
    value = _read_pages(values, value_scales, at, scale_at, live, written, query.dtype, CODES)
    highest = tl.maximum(most, tl.max(score, axis=1))
    weight = tl.math.exp2(score - highest[:, None])
    fade = tl.math.exp2(most - highest)
    result = tl.dot(weight.to(value.dtype), value, result * fade[:, None], input_precision="ieee")
    return highest, total * fade + tl.sum(weight, axis=1), result


@triton.jit
def _with_sink(total, most, sinks, head):
    """`total` and the share of the head's logit that gives nothing."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += tl.math.exp2(sink - most)
    return total


@triton.jit
def _read_tile(tiles):
    """This program's row of the table: where its pages begin in the block tables, its first token,
    tokens, its position, the first and the end of its columns, its part.
    """
    tile = tiles + tl.program_id(0) * 7
    pages = tl.load(tile)
    token = tl.load(tile + 1)
    count = tl.load(tile + 2)
    position = tl.load(tile + 3)
    begin = tl.load(tile + 4)
    end = tl.load(tile + 5)
    part = tl.load(tile + 6)
    return pages, token, count, position, begin, end, part


@triton.jit(do_not_specialize_on_alignment=["tables", "tiles"])
def _attend(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    tables,
    tiles,
    parts,
    sums,
    sinks,
    scale,
    query_stride,
    slot_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    pages, token, count, position, begin, end, part = _read_tile(tiles)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    live = (row // GROUP < count)[:, None] & (dim < HEAD_DIM)[None, :]
    head_at = (head * GROUP + row % GROUP) * HEAD_DIM
    tokens = (token + row // GROUP).to(tl.int64)
    at = (tokens * query_stride + head_at)[:, None] + dim[None, :]
    q = tl.load(query + at, mask=live, other=0.0)
    most = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK], tl.float32)
    keys += head * HEAD_DIM
    values += head * HEAD_DIM
    if CODES > 0:
        key_scales += head * PAGE
        value_scales += head * PAGE
    clear = begin  # up to here every row sees every column
    if WINDOW == 0:
        clear += tl.maximum(tl.minimum(end, position + 1) - begin, 0) // COLUMNS * COLUMNS
    for masked in tl.static_range(2):
        for start in range(clear if masked else begin, end if masked else clear, COLUMNS):
            most, total, result = _absorb(
                q,
                most,
                total,
                result,
                keys,
                values,
                key_scales,
                value_scales,
                tables + pages,
                start,
                end,
                position + row // GROUP,
                dim,
                scale,
                slot_stride,
                HEAD_DIM,
                PAGE,
                WINDOW,
                COLUMNS,
                CODES,
                SOFT_CAP,
                MASKED=masked,
            )
    if parts is None:
        total = _with_sink(total, most, sinks, head * GROUP + row % GROUP)
        at = (tokens * (kv_heads * GROUP * HEAD_DIM) + head_at)[:, None] + dim[None, :]
        tl.store(out + at, (result / total[:, None]).to(out.dtype.element_ty), mask=live)
    else:
        at = (part * kv_heads + head) * ROWS + row
        tl.store(parts + (at * HEAD_DIM)[:, None] + dim[None, :], result / total[:, None], live)
        tl.store(sums + at, most + tl.math.log2(total))


@triton.jit
def _add_parts(
    parts,
    sums,
    merges,
    out,
    sinks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row of a tile from its parts, each weighted by its share of the sum of exponentials."""
    merge = merges + tl.program_id(0) * 4
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = tl.program_id(2)
    dim = tl.arange(0, BLOCK)
    token = tl.load(merge)
    count = tl.load(merge + 1)
    first = tl.load(merge + 2)
    number = tl.load(merge + 3)
    if row // GROUP < count:
        most = LOWEST + 0.0
        total = 0.0
        result = tl.zeros([BLOCK], tl.float32)
        for part in range(first, first + number):
            at = (part * kv_heads + head) * ROWS + row
            share = tl.load(sums + at)
            highest = tl.maximum(most, share)
            fade = tl.math.exp2(most - highest)
            weight = tl.math.exp2(share - highest)
            result = result * fade + weight * tl.load(
                parts + at * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0
            )
            most = highest
            total = total * fade + weight
        total = _with_sink(total, most, sinks, head * GROUP + row % GROUP)
        at = (token + row // GROUP).to(tl.int64) * (kv_heads * GROUP * HEAD_DIM) + (
            head * GROUP + row % GROUP
        ) * HEAD_DIM
        tl.store(out + at + dim, (result / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_attention(
    query: Tensor,
    cache: KVStorage,
    plan: Plan,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
    bend: Bend | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """query [tokens, heads, head_dim], `new` this step's keys and values [tokens, kv_heads,
    head_dim] → as query, contiguous.
    """
    tokens, heads, size = query.shape
    fresh = new is not None and size % 8 == 0 and size <= 256 and query.dtype != torch.float32
    fresh = fresh and bend is None
    kv_heads = cache.keys.shape[2]
    own = Heads(heads, kv_heads, size, query.dtype)
    units = list[Units]()
    apart = frozenset[int]()
    if fresh and prefill.takes(own, query.device, scale):
        units, apart = plan.prompts(own, cache.block_size, codes=cache.eight is not None)
    runs, launches = plan.cut(
        heads // kv_heads,
        kv_heads,
        large=tile or large_tile(size, query.dtype),
        fresh=fresh,
        apart=apart,
    )
    if len(runs) == 1 and not launches and not units:
        assert new is not None
        return attend_run(query, *new, runs[0], scale)
    out = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    for run in runs:
        assert new is not None
        out[run.begin : run.end] = attend_run(query, *new, run, scale)
    for part in units:
        assert new is not None
        keys, values = (cache.keys, cache.values) if part.page else new
        if part.slots is not None:
            keys, values = cache.read(part.slots)
        prefill.attend(
            query, keys, values, out, units=part, heads=own, tables=plan.batch.block_tables
        )
    for launch in launches:
        _attend_tiles(query, cache, out, plan, launch, scale=scale, bend=bend or Bend())
    return out


def _pages(cache: KVStorage) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """Keys, values, their scales and which codes they are, as the kernel is handed them."""
    if cache.eight is None:
        return cache.keys, cache.values, None, None, 0
    codes = cache.eight.format.number
    as_bytes = (x.view(torch.uint8) if codes == 1 else x for x in (cache.keys, cache.values))
    keys, values = as_bytes
    return keys, values, *cache.eight.scales, codes


def _attend_tiles(
    query: Tensor,
    cache: KVStorage,
    out: Tensor,
    plan: Plan,
    launch: Launch,
    *,
    scale: float,
    bend: Bend,
) -> None:
    _, heads, size = query.shape
    kv_heads = cache.keys.shape[2]
    tile = launch.tile
    shape = dict(
        GROUP=heads // kv_heads,
        HEAD_DIM=size,
        BLOCK=max(16, triton.next_power_of_2(size)),
        ROWS=tile.rows,
    )
    parts = sums = None
    if launch.parts:
        parts = torch.empty(launch.parts * kv_heads * tile.rows * size, device=query.device)
        sums = torch.empty(launch.parts * kv_heads * tile.rows, device=query.device)
    keys, values, key_scales, value_scales, codes = _pages(cache)
    _attend[(launch.tiles.shape[0], kv_heads)](
        query,
        keys,
        values,
        key_scales,
        value_scales,
        out,
        plan.batch.block_tables,
        launch.tiles,
        parts,
        sums,
        bend.sinks,
        scale / math.log(2),
        query.stride(0),
        cache.keys.stride(1),
        PAGE=cache.block_size,
        WINDOW=plan.window,
        COLUMNS=tile.columns,
        CODES=codes,
        SOFT_CAP=(bend.soft_cap or 0) / math.log(2),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shape,
    )
    if launch.merges is not None:
        grid = launch.merges.shape[0], kv_heads, tile.rows
        _add_parts[grid](parts, sums, launch.merges, out, bend.sinks, num_warps=1, **shape)
