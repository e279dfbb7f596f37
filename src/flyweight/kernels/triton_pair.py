"""The best pair of main and residual entry for each vector of a column, and the column that the pairs stand for.

    main m of the BEAM nearest, residual r of all:  the least |x − m − r|²,   value = (m + r) · scale + bias

What `triton_nearest` found (the nearest entry of each part of the main book) goes in; one launch does what takes torch
twenty, and there are a hundred thousand columns in an 8B model's block. A program takes VECTORS vectors; the residual book
is small (256 entries) and lies across its threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTORS = 16


@triton.jit
def _pair(points_at, least_at, index_at, main_at, residual_at, scale_at, bias_at, first_at, second_at, values_at, vectors, parts,
          residuals, BEAM: tl.constexpr, LENGTH: tl.constexpr, PARTS: tl.constexpr, RESIDUALS: tl.constexpr,
          VECTORS: tl.constexpr):
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    real, part = vector < vectors, tl.arange(0, PARTS)
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
                point = tl.load(points_at + vector * LENGTH + place, real, 0.0)
                left = point - tl.load(main_at + candidate * LENGTH + place)
                gap = left[:, None] - tl.load(residual_at + entry * LENGTH + place, entry < residuals, 0.0)[None]
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
    tl.store(first_at + vector, first.to(tl.int64), real)
    tl.store(second_at + vector, second.to(tl.int64), real)
    scale, bias = tl.load(scale_at), tl.load(bias_at)
    for place in tl.static_range(LENGTH):
        value = tl.load(main_at + first * LENGTH + place)
        if RESIDUALS:
            value += tl.load(residual_at + second * LENGTH + place)
        tl.store(values_at + vector * LENGTH + place, value * scale + bias, real)


def best_pairs(points: Tensor, found: tuple[Tensor, Tensor], main: Tensor, residual: Tensor | None, *, beam: int, scale: Tensor,
               bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The column's values [vectors · length]; indices go to the rows `first` and `second` (int64).

    `found` is (squared distance, index) of the nearest entries, each [vectors, parts]; scale and bias are scalars on the device.
    """
    vectors, length = points.shape
    parts = found[0].shape[1]
    values = torch.empty(vectors * length, device=points.device)
    _pair[(triton.cdiv(vectors, VECTORS),)](
        points, *found, main, main if residual is None else residual, scale, bias, first, second, values, vectors, parts,
        0 if residual is None else len(residual), BEAM=1 if residual is None else beam, LENGTH=length,
        PARTS=triton.next_power_of_2(parts), RESIDUALS=0 if residual is None else triton.next_power_of_2(len(residual)),
        VECTORS=VECTORS, num_warps=4)
    return values
