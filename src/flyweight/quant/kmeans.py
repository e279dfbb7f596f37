"""Weighted k-means that gives the same bytes every time, on any number of threads and on a GPU.

Float sums depend on their order, and a GPU adds in any order. So all sums here are of whole
numbers: values are put on a fixed-point scale and added as int64, which is exact. Seeding is
k-means++ in rounds: each round draws many centroids at once with probability weight · distance², so
that a book of 65536 is seeded at the price of one iteration.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 25  # distances held at a time


def fixed_point(values: Tensor, count: int) -> tuple[Tensor, float]:
    """int64 values and the factor that turns them back, such that `count` of them add up without
    overflow.
    """
    largest = float(values.abs().max()) if values.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return torch.zeros_like(values, dtype=torch.int64), 0.0
    shift = 60 - math.ceil(math.log2(max(count, 2))) - math.frexp(largest)[1]
    return torch.round(values.double() * 2.0**shift).long(), 2.0**-shift


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Lets a GPU add as it likes: to be deterministic with floats too, torch would sort everything
    by its index first.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def exact_sums(index: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sums of values [n, v] by index [n] → float32 [bins, v], whatever the order of addition."""
    whole, factor = fixed_point(values, values.shape[0])
    sums = torch.zeros(bins, values.shape[1], dtype=torch.int64, device=values.device)
    with any_order():
        sums.index_add_(0, index, whole)
    return (sums.double() * factor).float()


def nearest(points: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Index [n] of the nearest centroid of each point, and the squared distance [n]."""
    if fused(points, book):
        from flyweight.quant.triton.nearest import nearest_by_part

        least, found = nearest_by_part(points, split_book(book), parts=parts_for(len(points), book))
        if least.shape[1] == 1:
            return found[:, 0].long(), least[:, 0].clamp(min=0)
        distance, part = least.min(1, keepdim=True)
        return found.gather(1, part)[:, 0].long(), distance[:, 0].clamp(min=0)
    squares = book.square().sum(1)
    index = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    distance = torch.empty(points.shape[0], device=points.device)
    step = max(1, CHUNK // book.shape[0])
    for begin in range(0, points.shape[0], step):
        part = points[begin : begin + step]
        least, at = torch.addmm(squares, part, book.T, alpha=-2).min(1)
        index[begin : begin + step] = at
        distance[begin : begin + step] = (least + part.square().sum(1)).clamp(min=0)
    return index, distance


def fused(points: Tensor, book: Tensor) -> bool:
    return points.is_cuda and book.shape[1] <= 16


def split_book(book: Tensor) -> Any:
    """What the fused kernel reads of a book; worth keeping where columns come one by one."""
    from flyweight.quant.triton.nearest import Split

    return Split.of(book)


def parts_for(points: int, book: Tensor) -> int:
    """Into how many parts a book is cut so that a GPU has work for all its cores: about 512 tiles
    of 64 points.
    """
    return max(1, min(512 * 64 // max(points, 1), len(book) // 512))


def draw(mass: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` indices with probability ∝ mass [n]; the random numbers come from the CPU so that
    devices agree.
    """
    whole, _ = fixed_point(mass, mass.numel())
    total = whole.cumsum(0)
    marks = (
        torch.rand(count, generator=generator, dtype=torch.float64).to(mass.device)
        * total[-1].double()
    )
    return torch.searchsorted(total, marks.long(), right=True).clamp(max=mass.numel() - 1)


def seed_centroids(
    points: Tensor, weights: Tensor, count: int, generator: torch.Generator, rounds: int = 32
) -> Tensor:
    book = points[draw(weights, 1, generator)]
    distance = nearest(points, book)[1]
    batch = math.ceil(count / rounds)
    while book.shape[0] < count:
        new = points[draw(weights * distance, min(batch, count - book.shape[0]), generator)]
        distance = torch.minimum(distance, nearest(points, new)[1])
        book = torch.cat([book, new])
    return book


def kmeans(
    points: Tensor,
    weights: Tensor,
    count: int,
    *,
    seed: int = 0,
    iterations: int = 20,
    samples: int = 0,
) -> Tensor:
    """Centroids [count, v] of points [n, v] with weights [n]; with `samples` only so many points,
    drawn at random, are used.
    """
    generator = torch.Generator().manual_seed(seed)
    points = points.float()
    weights = weights.float().clamp(min=0)
    if samples and points.shape[0] > samples:
        picked = torch.randperm(points.shape[0], generator=generator)[:samples].to(points.device)
        points = points[picked]
        weights = weights[picked]
    if not bool((weights > 0).any()):
        weights = torch.ones_like(weights)
    book = seed_centroids(points, weights, count, generator)
    before = math.inf
    for _ in range(iterations):
        index, distance = nearest(points, book)
        sums = exact_sums(index, torch.cat([points * weights[:, None], weights[:, None]], 1), count)
        total = sums[:, -1:]
        book = torch.where(total > 0, sums[:, :-1] / total.clamp(min=1e-30), book)
        loss, factor = fixed_point(weights * distance, points.shape[0])
        now = float(loss.sum()) * factor
        empty = (total[:, 0] <= 0).nonzero()[:, 0]
        if len(empty):  # a centroid without points starts anew where the error is
            book[empty] = points[draw(weights * distance, len(empty), generator)]
        if now >= before * (
            1 - 5e-4
        ):  # books are fitted to the output later: the last thousandth is not worth the time
            break
        before = now
    return book
