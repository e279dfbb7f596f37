"""One block of VPTQ's column recursions: two launches a column, where plain torch takes
twenty-five.

    x = w_i                 (recursion)        x = v_i + w_i / m_ii        (descent)
    m, r = the pair of entries with the least |(x − bias_i) / scale_i − m − r|²
    q = (m + r) · scale_i + bias_i
    e = (x − q) / m_ii      (recursion)        e = q − v_i                 (descent)
    w_j −= m_ij · e         for every later column j of the block

m is one of the BEAM nearest main entries; in descent v are the values so far, w the pull on them.
`nearest.py` finds the nearest entries of each part of the main book (one, or BEAM where parts are
few); `_pair` does the rest. Outputs are independent, so the program that rounds VECTORS vectors
also brings the later columns of the same outputs up to date. The columns of an 8B model's block are
gone through a hundred thousand times: the host's time per launch limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyweight.quant.triton.nearest import ENTRIES, WIDTH, Split, _nearest, cut, load_column
from flyweight.quant.triton.nearest import VECTORS as SEARCHED

# vectors of a program; later columns that it moves at a time
VECTORS = 16
LATER = 16


@triton.jit(do_not_specialize=["row"])
def _pair(
    tile_at,
    values_at,
    matrix_at,
    scale_at,
    bias_at,
    row,
    columns,
    least_at,
    index_at,
    main_at,
    residual_at,
    first_at,
    second_at,
    rounded_at,
    errors_at,
    vectors,
    parts,
    residuals,
    most,
    BEAM: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUALS: tl.constexpr,
    DESCENT: tl.constexpr,
    VECTORS: tl.constexpr,
    LATER: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    real = vector < vectors
    part = tl.arange(0, PARTS)
    outputs = vectors * LENGTH
    begin = row.to(tl.int64) * outputs
    scale = tl.load(scale_at + row)
    bias = tl.load(bias_at + row)
    inside = real[:, None] & (part < parts)[None]
    least = tl.load(least_at + vector[:, None] * parts + part[None], inside, float("inf"))
    index = tl.load(index_at + vector[:, None] * parts + part[None], inside, 0)
    best = tl.full((VECTORS,), float("inf"), tl.float32)
    first = tl.zeros((VECTORS,), tl.int32)
    second = tl.zeros((VECTORS,), tl.int32)
    for _ in range(BEAM):
        low = tl.min(least, 1)
        candidate = tl.min(tl.where(least == low[:, None], index, 2147483647), 1)
        least = tl.where(index == candidate[:, None], float("inf"), least)
        if RESIDUALS:
            entry = tl.arange(0, RESIDUALS)
            distance = tl.zeros((VECTORS, RESIDUALS), tl.float32)
            for place in tl.static_range(LENGTH):
                x = load_column(
                    tile_at,
                    values_at,
                    matrix_at,
                    begin + vector * LENGTH + place,
                    real,
                    row,
                    columns,
                    DESCENT,
                )
                left = tl.div_rn(x - bias, scale) - tl.load(main_at + candidate * LENGTH + place)
                gap = (
                    left[:, None]
                    - tl.load(residual_at + entry * LENGTH + place, entry < residuals, 0.0)[None]
                )
                distance += gap * gap
            distance = tl.where((entry < residuals)[None], distance, float("inf"))
            found = tl.min(distance, 1)
            chosen = tl.min(tl.where(distance == found[:, None], entry[None], 2147483647), 1)
            better = (found < best) & (low < float("inf"))
            second = tl.where(better, chosen, second)
        else:
            found = low
            better = found < best
        first = tl.where(better, candidate, first)
        best = tl.where(better, found, best)
    tl.store(first_at + row * most + vector, first.to(tl.int64), real)
    if RESIDUALS:
        tl.store(second_at + row * most + vector, second.to(tl.int64), real)

    place = tl.arange(0, WIDE)  # from here on [VECTORS, LENGTH]: a run of neighbouring outputs
    whole = real[:, None] & (place < LENGTH)[None]
    output = vector[:, None] * LENGTH + place[None]
    x = load_column(tile_at, values_at, matrix_at, begin + output, whole, row, columns, DESCENT)
    value = tl.load(main_at + first[:, None] * LENGTH + place[None], whole, 0.0)
    if RESIDUALS:
        value += tl.load(residual_at + second[:, None] * LENGTH + place[None], whole, 0.0)
    value = value * scale + bias
    if DESCENT:
        error = value - tl.load(values_at + begin + output, whole, 0.0)
    else:
        error = tl.div_rn(x - value, tl.load(matrix_at + row * (columns + 1)))
    tl.store(rounded_at + begin + output, value, whole)
    tl.store(errors_at + begin + output, error, whole)
    for start in range(row + 1, columns, LATER):
        later = start + tl.arange(0, LATER)
        share = tl.load(matrix_at + row * columns + later, later < columns, 0.0)
        at = later.to(tl.int64)[:, None, None] * outputs + output[None]
        there = (later < columns)[:, None, None] & whole[None]
        tl.store(
            tile_at + at,
            tl.load(tile_at + at, there, 0.0) - share[:, None, None] * error[None],
            there,
        )


@dataclass(frozen=True, eq=False)
class Search:
    """The entries that a column's vectors are matched with, and how the main book is searched."""

    main: Tensor  # [entries, length]
    residual: Tensor | None
    split: Split  # of `main`
    parts: int  # about so many parts of the main book are searched at once
    beam: int  # main entries that are tried with every residual entry


def walk(
    tile: Tensor,
    matrix: Tensor,
    books: Search,
    *,
    scale: Tensor,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rounded, errors), each [columns, out], of a tile [columns, out] under `matrix` [columns,
    columns]; `values`: descent.

    Indices go to the rows of `first` and `second`, int64 [columns, at least the vectors of a
    column]. All float32 and contiguous.
    """
    main = books.main
    residual = books.residual
    split = books.split
    beam = books.beam
    columns, outputs = tile.shape
    length = main.shape[1]
    vectors = outputs // length
    part_entries, parts = cut(split, books.parts)
    rounded = torch.empty_like(tile)
    errors = torch.empty_like(tile)
    tile = tile.clone()
    residuals = 0 if residual is None else len(residual)
    descent = values is not None
    beam = beam if residuals else 1
    keep = beam if parts < 8 * beam else 1
    least = torch.empty(vectors, parts * keep, device=tile.device)
    index = torch.empty(vectors, parts * keep, dtype=torch.int32, device=tile.device)
    assert first.stride(0) == second.stride(0) and first.stride(1) == second.stride(1) == 1
    search = _nearest[(triton.cdiv(vectors, SEARCHED), parts)]
    choose = _pair[(triton.cdiv(vectors, VECTORS),)]
    for row in range(columns):
        search(
            tile,
            values,
            matrix,
            scale,
            bias,
            row,
            columns,
            split.high,
            split.low,
            split.squares,
            least,
            index,
            vectors,
            length,
            split.high.shape[0],
            part_entries,
            parts,
            COLUMN=True,
            DESCENT=descent,
            KEEP=keep,
            VECTORS=SEARCHED,
            ENTRIES=ENTRIES,
            WIDTH=WIDTH,
            num_warps=4,
        )
        choose(
            tile,
            values,
            matrix,
            scale,
            bias,
            row,
            columns,
            least,
            index,
            main,
            residual,
            first,
            second,
            rounded,
            errors,
            vectors,
            parts * keep,
            residuals,
            first.stride(0),
            BEAM=beam,
            LENGTH=length,
            WIDE=triton.next_power_of_2(length),
            PARTS=triton.next_power_of_2(parts * keep),
            RESIDUALS=triton.next_power_of_2(residuals) if residuals else 0,
            DESCENT=descent,
            VECTORS=VECTORS,
            LATER=LATER,
            num_warps=4,
        )
    return rounded, errors
