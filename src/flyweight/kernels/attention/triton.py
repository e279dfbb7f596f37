"""Attention of any mix of new tokens over the paged cache: whole prompts, later chunks of them,
decoding rows.

    out = softmax(q Kᵀ · scale) V,  token at position p sees the cached tokens p − window < j ≤ p of
    its sequence

Three ways. Prompts and chunks of them go through prefill_attention.cu where that is switched on.
Else sequences that begin in this step have all their keys in this step's own tensors: torch's
attention takes them as they are, neighbours in one call. All others go through the Triton kernel
here, which reads pages through the block table. Its work split, made by the host from the lists of
the batch, so that nothing waits for the device:

    tile      ROWS rows of one kv head: (token, query head) pairs of all heads that share it, so
              that a page is read once for the group
    order     longest first: causal tiles differ in length, and the short ones fill the gaps
    part      where tiles are too few for the GPU, each is cut along the cache; a second kernel adds
              the parts up

Columns that every row of a tile sees run without a mask. Limit: the matrix units for prompts, bytes
of KV / bandwidth for few rows. Not measured yet: `benchmarks/prefill_ops.py` does it, and sweeps
`Tile`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flyweight import gpu
from flyweight.batch import Batch, KVStorage
from flyweight.kernels.attention import prefill
from flyweight.kernels.attention.prefill import Heads, Span, Units
from flyweight.transfer import ALIGNMENT, upload

Rows = list[tuple[int, ...]]
LOWEST = tl.constexpr(-1.0e30)  # of a masked score; finite, since −∞ less −∞ is no number
FRESH_FROM = 64  # new tokens; from here on a sequence is a prompt, not rows of one
# tokens; from here on neighbours of different lengths are apart, since cuDNN's kernel is faster
# than one for all
LONG = 2048
# cuDNN plans each length anew (tens of ms): only for lengths that come again; others take flash
# attention
CUDNN_MULTIPLE = 128
SHORTEST_PART = 512  # cached tokens worth a program of their own


@dataclass(frozen=True)
class Tile:
    """Rows of queries × columns of the cache that a program holds at once."""

    rows: int
    columns: int
    warps: int
    stages: int


# by head_dim, up to
LARGE = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)}
FLOAT32 = Tile(32, 16, 4, 2)  # no speed is asked of it
SMALL_COLUMNS = 64  # of a tile for rows that fill less than an eighth of a large one


@triton.jit
def _absorb(
    query,
    most,
    total,
    result,
    keys,
    values,
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
    key = tl.load(keys + at, mask=live, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        seen = (column[None, :] <= place[:, None]) & written[None, :]
        if WINDOW > 0:
            seen = seen & (column[None, :] > place[:, None] - WINDOW)
        score = tl.where(seen, score, LOWEST)
    value = tl.load(values + at, mask=live, other=0.0)
    highest = tl.maximum(most, tl.max(score, axis=1))
    weight = tl.math.exp2(score - highest[:, None])
    fade = tl.math.exp2(most - highest)
    result = tl.dot(weight.to(value.dtype), value, result * fade[:, None], input_precision="ieee")
    return highest, total * fade + tl.sum(weight, axis=1), result


@triton.jit(do_not_specialize_on_alignment=["tables", "tiles"])
def _attend(
    query,
    keys,
    values,
    out,
    tables,
    tiles,
    parts,
    sums,
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
):
    tile = tiles + tl.program_id(0) * 7
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    pages = tl.load(tile)
    token = tl.load(tile + 1)
    count = tl.load(tile + 2)
    position = tl.load(tile + 3)
    begin = tl.load(tile + 4)
    end = tl.load(tile + 5)
    part = tl.load(tile + 6)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    live = (row // GROUP < count)[:, None] & (dim < HEAD_DIM)[None, :]
    head_at = (head * GROUP + row % GROUP) * HEAD_DIM
    tokens = (token + row // GROUP).to(tl.int64)
    q = tl.load(
        query + (tokens * query_stride + head_at)[:, None] + dim[None, :], mask=live, other=0.0
    )
    most = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK], tl.float32)
    table = tables + pages
    place = position + row // GROUP
    keys += head * HEAD_DIM
    values += head * HEAD_DIM
    clear = begin  # up to here every row sees every column
    if WINDOW == 0:
        clear += tl.maximum(tl.minimum(end, position + 1) - begin, 0) // COLUMNS * COLUMNS
    for start in range(begin, clear, COLUMNS):
        most, total, result = _absorb(
            q,
            most,
            total,
            result,
            keys,
            values,
            table,
            start,
            end,
            place,
            dim,
            scale,
            slot_stride,
            HEAD_DIM,
            PAGE,
            WINDOW,
            COLUMNS,
            MASKED=False,
        )
    for start in range(clear, end, COLUMNS):
        most, total, result = _absorb(
            q,
            most,
            total,
            result,
            keys,
            values,
            table,
            start,
            end,
            place,
            dim,
            scale,
            slot_stride,
            HEAD_DIM,
            PAGE,
            WINDOW,
            COLUMNS,
            MASKED=True,
        )
    result = result / total[:, None]
    if parts is None:
        at = (tokens * (kv_heads * GROUP * HEAD_DIM) + head_at)[:, None] + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=live)
    else:
        at = (part * kv_heads + head) * ROWS + row
        tl.store(parts + (at * HEAD_DIM)[:, None] + dim[None, :], result, mask=live)
        tl.store(sums + at, most + tl.math.log2(total))


@triton.jit
def _add_parts(
    parts,
    sums,
    merges,
    out,
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
        at = (token + row // GROUP).to(tl.int64) * (kv_heads * GROUP * HEAD_DIM) + (
            head * GROUP + row % GROUP
        ) * HEAD_DIM
        tl.store(out + at + dim, (result / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences that begin in this step: one call of torch's attention."""

    begin: int  # the first and the end of their tokens
    end: int
    length: int  # of the longest
    # int32 [sequences + 1], from `begin` on; None: they are of equal length
    starts: Tensor | None = None


@dataclass(frozen=True)
class Cut:
    """Tiles of one shape, on the host."""

    tile: Tile
    # where its pages begin in the tables, first token, tokens, its position, first and end of the
    # columns, part
    tiles: Rows
    merges: Rows  # first token, tokens, first part, parts; none where tiles are whole

    def padded(self) -> Cut:
        """With tiles and merges of no tokens up to a number that comes again."""
        tiles: Rows = [
            (0, 0, 0, 0, 0, 0, part) for part in range(len(self.tiles), _rounded(len(self.tiles)))
        ]
        merges: Rows = (
            [(0, 0, 0, 0)] * (_rounded(len(self.merges)) - len(self.merges)) if self.merges else []
        )
        return Cut(self.tile, self.tiles + tiles, self.merges + merges)

    @property
    def shape(self) -> tuple[Tile, int, int]:
        return self.tile, len(self.tiles), len(self.merges)

    def launch(self, device: torch.device, into: Tensor | None = None) -> Launch:
        tables = [
            numpy.array(table, dtype=numpy.int32) for table in (self.tiles, self.merges) if table
        ]
        tiles, *merges = upload(device, *tables, into=into)
        return Launch(self.tile, tiles, len(tiles) if merges else 0, merges[0] if merges else None)


@dataclass(frozen=True)
class Launch:
    """Tiles of one shape."""

    tile: Tile
    tiles: Tensor  # int32 [tiles, 7]
    parts: int  # 0: tiles are whole
    merges: Tensor | None  # int32 [merged tiles, 4]


class Plan:
    """How a step's attention is cut up, made once and used by every layer with the same window."""

    def __init__(self, batch: Batch, window: int | None):
        self.batch = batch
        self.window = window or 0
        starts = batch.query_starts
        lengths = batch.kv_lengths
        self.spans = [
            (start, end - start, length)
            for start, end, length in zip(starts, starts[1:], lengths, strict=False)
        ]
        self.held: dict[
            tuple[bool, int, int, Tile, frozenset[int]], tuple[list[Run], list[Launch]]
        ] = {}
        self.units: dict[Heads, tuple[list[Units], frozenset[int]]] = {}

    def prompts(self, heads: Heads, page: int) -> tuple[list[Units], frozenset[int]]:
        """What prefill_attention.cu takes, and which sequences those are: whole prompts, and chunks
        of others where they fill half the GPU (the Triton kernel cuts long contexts of few rows).
        """
        if heads not in self.units:
            device = self.batch.tokens.device
            width = self.batch.block_tables.shape[1]
            whole = {i: Span(*span, span[0]) for i, span in enumerate(self.spans) if self.fresh(i)}
            chunks = {
                i: Span(*span, i * width)
                for i, span in enumerate(self.spans)
                if i not in whole
                and span[1] >= FRESH_FROM
                and not self.window
                and page % prefill.BOX == 0
            }
            if sum(
                -(-span.new // heads.tokens) for span in chunks.values()
            ) * heads.kv_heads * 2 < _processors(device):
                chunks = {}
            cuts = [
                Units.cut(list(spans.values()), heads, where, device)
                for spans, where in ((whole, 0), (chunks, page))
                if spans
            ]
            self.units[heads] = cuts, frozenset(whole) | frozenset(chunks)
        return self.units[heads]

    def fresh(self, sequence: int) -> bool:
        _, new, length = self.spans[sequence]
        return new == length >= FRESH_FROM and (not self.window or length <= self.window)

    def cut(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> tuple[list[Run], list[Launch]]:
        """Runs for torch and launches for the kernel, without the sequences `apart`; `group` query
        heads share each kv head.
        """
        key = (fresh, group, kv_heads, large, apart)
        if key not in self.held:
            device = self.batch.tokens.device
            cuts = self.cuts(group, kv_heads, large=large, fresh=fresh, apart=apart)
            self.held[key] = (
                self._runs(apart) if fresh else [],
                [cut.launch(device) for cut in cuts],
            )
        return self.held[key]

    def cuts(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> list[Cut]:
        small = Tile(
            max(16, triton.next_power_of_2(group)),
            min(SMALL_COLUMNS, large.columns),
            4,
            large.stages,
        )
        sequences: dict[Tile, list[int]] = {large: [], small: []}
        for i, (_, new, _) in enumerate(self.spans):
            if i not in apart and not (fresh and self.fresh(i)):
                sequences[small if new * group * 8 <= large.rows else large].append(i)
        return [
            self._cut(which, tile, group, kv_heads) for tile, which in sequences.items() if which
        ]

    def _runs(self, apart: frozenset[int]) -> list[Run]:
        def kind(i: int) -> tuple[bool, int]:
            return i not in apart and self.fresh(i), self.spans[i][1] if self.spans[i][
                1
            ] >= LONG else 0

        runs = []
        for (fresh, _), members in itertools.groupby(range(len(self.spans)), key=kind):
            if fresh:
                spans = [self.spans[i] for i in members]
                starts = [start - spans[0][0] for start, *_ in spans]
                lengths = [length for *_, length in spans]
                end = spans[-1][0] + lengths[-1]
                longest = max(lengths)
                equal = min(lengths) == longest
                runs.append(
                    Run(
                        spans[0][0],
                        end,
                        longest,
                        None if equal else self._starts([*starts, end - spans[0][0]]),
                    )
                )
        return runs

    def _starts(self, starts: list[int]) -> Tensor:
        return upload(self.batch.tokens.device, numpy.array(starts, dtype=numpy.int32))[0]

    def _cut(self, sequences: list[int], tile: Tile, group: int, kv_heads: int) -> Cut:
        tokens = tile.rows // group
        width = self.batch.block_tables.shape[1]
        tiles: Rows = []
        for i in sequences:
            start, new, length = self.spans[i]
            for first in range(0, new, tokens):
                position = length - new + first
                count = min(tokens, new - first)
                begin = max(0, position - self.window + 1) if self.window else 0
                tiles.append(
                    (i * width, start + first, count, position, begin, position + count, 0)
                )
        tiles.sort(key=lambda t: t[4] - t[5])
        room = _processors(self.batch.tokens.device) // (len(tiles) * kv_heads)
        longest = tiles[0][5] - tiles[0][4]
        if room < 2 or longest < 2 * SHORTEST_PART:
            return Cut(tile, tiles, [])
        length = max(SHORTEST_PART, -(-longest // room))
        return Cut(tile, *_cut_tiles(tiles, -(-length // tile.columns) * tile.columns))


class FixedPlan(Plan):
    """All sequences through pages, by tables that stay where they are and keep their sizes: what a
    captured pass reads.

    Plans of the same `shape` are the same launches; `fill` gives one the tables of another.
    """

    def __init__(self, batch: Batch, cache: KVStorage, window: int | None, *, heads: int):
        super().__init__(batch, window)
        kv_heads, size = cache.keys.shape[2:]
        cuts = self.cuts(
            heads // kv_heads, kv_heads, large=_large(size, cache.keys.dtype), fresh=False
        )
        self.padded = [cut.padded() for cut in cuts]
        self.shape = tuple(cut.shape for cut in self.padded)
        self.places: list[Tensor] = []
        self.launches: list[Launch] = []

    def place(self) -> FixedPlan:
        """Take memory for the tables, and fill it."""
        sizes = [28 * tiles + 16 * merges + 2 * ALIGNMENT for _, tiles, merges in self.shape]
        self.places = [
            torch.empty(size, dtype=torch.uint8, device=self.batch.tokens.device) for size in sizes
        ]
        self.fill(self)
        return self

    def fill(self, other: FixedPlan) -> None:
        assert self.shape == other.shape
        device = self.batch.tokens.device
        self.launches = [
            cut.launch(device, place) for cut, place in zip(other.padded, self.places, strict=True)
        ]

    def prompts(self, heads: Heads, page: int) -> tuple[list[Units], frozenset[int]]:
        return [], frozenset()

    def cut(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> tuple[list[Run], list[Launch]]:
        return [], self.launches


def _cut_tiles(tiles: Rows, length: int) -> tuple[Rows, Rows]:
    """The parts of all tiles, `length` columns each, and which parts make a tile."""
    parts: Rows = []
    merges: Rows = []
    for sequence, token, count, position, begin, end, _ in tiles:
        starts = range(begin, end, length)
        merges.append((token, count, len(parts), len(starts)))
        for start in starts:
            parts.append(
                (sequence, token, count, position, start, min(start + length, end), len(parts))
            )
    return parts, merges


def _processors(device: torch.device) -> int:
    return gpu.of(device).processors if device.type == "cuda" else 8


def _rounded(count: int) -> int:
    """Up to the next power of two, from 8 on."""
    return max(8, 1 << (count - 1).bit_length())


def _large(size: int, dtype: torch.dtype) -> Tile:
    return FLOAT32 if dtype == torch.float32 else LARGE[max(64, triton.next_power_of_2(size))]


def plan_attention(batch: Batch, cache: KVStorage, window: int | None = None) -> Plan:
    return Plan(batch, window)


def paged_attention(
    query: Tensor,
    cache: KVStorage,
    plan: Plan,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """query [tokens, heads, head_dim], `new` this step's keys and values [tokens, kv_heads,
    head_dim] → as query, contiguous.
    """
    tokens, heads, size = query.shape
    fresh = new is not None and size % 8 == 0 and size <= 256 and query.dtype != torch.float32
    kv_heads = cache.keys.shape[2]
    own = Heads(heads, kv_heads, size, query.dtype)
    units = list[Units]()
    apart = frozenset[int]()
    if fresh and prefill.takes(own, query.device, scale):
        units, apart = plan.prompts(own, cache.block_size)
    runs, launches = plan.cut(
        heads // kv_heads,
        kv_heads,
        large=tile or _large(size, query.dtype),
        fresh=fresh,
        apart=apart,
    )
    if len(runs) == 1 and not launches and not units:
        assert new is not None
        return _attend_run(query, *new, runs[0], scale)
    out = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    for run in runs:
        assert new is not None
        out[run.begin : run.end] = _attend_run(query, *new, run, scale)
    for part in units:
        assert new is not None
        keys, values = (cache.keys, cache.values) if part.page else new
        prefill.attend(
            query, keys, values, out, units=part, heads=own, tables=plan.batch.block_tables
        )
    for launch in launches:
        _attend_tiles(query, cache, out, plan, launch, scale)
    return out


def _attend_run(query: Tensor, keys: Tensor, values: Tensor, run: Run, scale: float) -> Tensor:
    if run.starts is not None:
        return _attend_unequal(query, keys, values, run, scale)
    q, k, v = (
        x[run.begin : run.end].unflatten(0, (-1, run.length)).transpose(1, 2)
        for x in (query, keys, values)
    )
    way = _way(q, k, v)
    if way == SDPBackend.CUDNN_ATTENTION:
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, True, False, scale=scale
        )[0]
    elif way == SDPBackend.FLASH_ATTENTION:
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )[0]
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).reshape(run.end - run.begin, *query.shape[1:])


def _attend_unequal(query: Tensor, keys: Tensor, values: Tensor, run: Run, scale: float) -> Tensor:
    assert run.starts is not None
    q, k, v = (x[run.begin : run.end] for x in (query, keys, values))
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, run.starts, run.starts, run.length, run.length, 0.0, True, False, scale=scale
        )[0].contiguous()
    return torch.cat(
        [
            _attend_run(q, k, v, Run(begin, end, end - begin), scale)
            for begin, end in itertools.pairwise(run.starts.tolist())
        ]
    )


_ways: dict[tuple[torch.dtype, bool, int, int, int], SDPBackend] = {}


def _way(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """The backend that torch chooses, asked once: to ask for some through its context costs more
    than to launch a layer.
    """
    if not q.is_cuda:
        return SDPBackend.MATH
    key = (q.dtype, q.shape[2] % CUDNN_MULTIPLE == 0, q.shape[1], k.shape[1], q.shape[3])
    if key not in _ways:
        wanted = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, *wanted] if key[1] else wanted, set_priority=True
        ):
            _ways[key] = SDPBackend(
                torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=key[2] != key[3])
            )
    return _ways[key]


def _attend_tiles(
    query: Tensor, cache: KVStorage, out: Tensor, plan: Plan, launch: Launch, scale: float
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
    _attend[(launch.tiles.shape[0], kv_heads)](
        query,
        cache.keys,
        cache.values,
        out,
        plan.batch.block_tables,
        launch.tiles,
        parts,
        sums,
        scale / math.log(2),
        query.stride(0),
        cache.keys.stride(1),
        PAGE=cache.block_size,
        WINDOW=plan.window,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shape,
    )
    if launch.merges is not None:
        grid = launch.merges.shape[0], kv_heads, tile.rows
        _add_parts[grid](parts, sums, launch.merges, out, num_warps=1, **shape)
