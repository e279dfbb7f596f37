"""The nearest entry of a large codebook for each of many vectors, without ever writing the
distances down.

    distance(x, b) = |x|² + |b|² − 2 · x·b,   x·b ≈ hi(x)·hi(b) + hi(x)·lo(b) + lo(x)·hi(b)

hi and lo are the leading and the following eleven bits (float16), so tensor cores give twenty-two:
float32 products would be ten times slower, TF32's ten bits would pick neighbours. A program holds
VECTORS vectors and walks its part of the book; the running minimum stays in registers, lane by
lane, and is reduced once at the end.

             book entries →   part 0     part 1    …
      vectors ↓             ┌─────────┬─────────┐
                            │ program │ program │      few vectors: many parts, to fill the GPU
                            └─────────┴─────────┘

Written out, the distances of one 65536-entry k-means step on 3 million vectors would be 800 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTORS = 64
ENTRIES = 128
WIDTH = 16


@triton.jit
def load_column(tile_at, values_at, matrix_at, at, inside, row, columns, DESCENT: tl.constexpr):
    """What column `row` of a block asks for: itself, or in coordinate descent its value and the
    pull on it.
    """
    x = tl.load(tile_at + at, inside, 0.0)
    if DESCENT:
        x = tl.load(values_at + at, inside, 0.0) + tl.div_rn(
            x, tl.load(matrix_at + row * (columns + 1))
        )
    return x


@triton.jit(do_not_specialize=["row"])
def _nearest(
    points_at,
    values_at,
    matrix_at,
    scale_at,
    bias_at,
    row,
    columns,
    high_at,
    low_at,
    squares_at,
    least_at,
    index_at,
    vectors,
    length,
    entries,
    part_entries,
    parts,
    COLUMN: tl.constexpr,
    DESCENT: tl.constexpr,
    KEEP: tl.constexpr,
    VECTORS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    part = tl.program_id(1)
    lane = tl.arange(0, ENTRIES)
    place = tl.arange(0, WIDTH)
    inside = (vector < vectors)[:, None] & (place < length)[None]
    own = vector[:, None] * length + place[None]
    if COLUMN:
        own += row.to(tl.int64) * vectors * length
        points = load_column(points_at, values_at, matrix_at, own, inside, row, columns, DESCENT)
        points = tl.where(
            inside, tl.div_rn(points - tl.load(bias_at + row), tl.load(scale_at + row)), 0.0
        )
    else:
        points = tl.load(points_at + own, inside, 0.0)
    high = points.to(tl.float16)
    low = (points - high.to(tl.float32)).to(tl.float16)
    best = tl.full((VECTORS, ENTRIES), float("inf"), tl.float32)
    where = tl.zeros((VECTORS, ENTRIES), tl.int32)
    end = tl.minimum((part + 1) * part_entries, entries)
    for begin in range(part * part_entries, end, ENTRIES):
        entry = begin + lane
        at = entry[None] * WIDTH + place[:, None]  # [WIDTH, ENTRIES]
        book_high = tl.load(high_at + at, (entry < end)[None], 0.0)
        book_low = tl.load(low_at + at, (entry < end)[None], 0.0)
        product = tl.dot(low, book_high)
        product = tl.dot(high, book_low, product)
        product = tl.dot(high, book_high, product)
        distance = tl.load(squares_at + entry, entry < end, float("inf"))[None] - 2.0 * product
        where = tl.where(distance < best, begin, where)
        best = tl.minimum(best, distance)
    square = tl.sum(points * points, 1)
    for keep in tl.static_range(
        KEEP
    ):  # of each lane only its nearest: two of the best rarely share one
        least = tl.min(best, 1)
        # The lowest index wins a tie, whatever the lanes do.
        index = tl.min(tl.where(best == least[:, None], where + lane[None], 2147483647), 1)
        best = tl.where(where + lane[None] == index[:, None], float("inf"), best)
        out = (vector * parts + part) * KEEP + keep
        tl.store(least_at + out, least + square, vector < vectors)
        tl.store(index_at + out, tl.minimum(index, entries - 1), vector < vectors)


@dataclass(frozen=True, eq=False)
class Split:
    """A book [entries, length ≤ 16] as its two float16 halves [entries, 16], and the squares of its
    entries.
    """

    high: Tensor
    low: Tensor
    squares: Tensor
    length: int

    @classmethod
    def of(cls, book: Tensor) -> Split:
        wide = torch.nn.functional.pad(book.float(), (0, WIDTH - book.shape[1]))
        high = wide.half()
        return cls(high, (wide - high.float()).half(), wide.square().sum(1), book.shape[1])


def cut(book: Split, parts: int) -> tuple[int, int]:
    """(entries of a part, number of parts): about `parts`, each a whole number of tiles."""
    entries = book.high.shape[0]
    part_entries = triton.cdiv(triton.cdiv(entries, parts), ENTRIES) * ENTRIES
    return part_entries, triton.cdiv(entries, part_entries)


def nearest_by_part(points: Tensor, book: Split, *, parts: int) -> tuple[Tensor, Tensor]:
    """(squared distance, int32 index), each [vectors, parts]: the nearest entry of each part, about
    `parts` of them.
    """
    vectors = points.shape[0]
    part_entries, parts = cut(book, parts)
    least = torch.empty(vectors, parts, device=points.device)
    index = torch.empty(vectors, parts, dtype=torch.int32, device=points.device)
    _nearest[(triton.cdiv(vectors, VECTORS), parts)](
        points.contiguous(),
        None,
        None,
        None,
        None,
        0,
        0,
        book.high,
        book.low,
        book.squares,
        least,
        index,
        vectors,
        book.length,
        book.high.shape[0],
        part_entries,
        parts,
        COLUMN=False,
        DESCENT=False,
        KEEP=1,
        VECTORS=VECTORS,
        ENTRIES=ENTRIES,
        WIDTH=WIDTH,
        num_warps=4,
    )
    return least, index
