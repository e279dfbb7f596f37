"""What the VPTQ kernels' launches have in common: weights with one input share a launch's thread
blocks; norms and residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flyweight.kernels.linear.tiles import ACTIVATIONS
from flyweight.kernels.vptq.layout import Layout

MOST = 3  # q, k and v
Parts = tuple[Layout, ...]


@dataclass(frozen=True)
class Ends:
    """What a linear does to its input and output besides: x is gate and up of the activation
    `gated`, `residual` is added to y.
    """

    norm: Tensor | None = None
    epsilon: float = 1e-6
    gated: str | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None

    @property
    def some(self) -> bool:
        return self.gated is not None or any(
            tensor is not None for tensor in (self.norm, self.bias, self.residual)
        )

    def of(self, rows: slice) -> Ends:
        return self if self.residual is None else replace(self, residual=self.residual[rows])

    @property
    def defines(self) -> dict[str, int]:
        gated = 0 if self.gated is None else ACTIVATIONS[self.gated]
        return {"NORM": int(self.norm is not None), "GATED": gated}


def in_order(parts: Parts) -> bool:
    """Whether stored columns are the inputs, whole 256."""
    stored = parts[0].affine.numel()
    return (
        stored == parts[0].in_features
        and stored % 256 == 0
        and all(part.source is None for part in parts)
    )


@functools.cache
def share_out(work: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Thread blocks of each part: at least one, at most one for a unit of its work, such that the
    busiest has least to do.
    """
    ctas = [1] * len(work)
    for _ in range(count - len(work)):
        open_ = [i for i in range(len(work)) if ctas[i] < work[i]]
        if not open_:
            break
        ctas[max(open_, key=lambda i: work[i] / ctas[i])] += 1
    return tuple(ctas)


def part_arguments(
    parts: Parts, ctas: Sequence[int], *, byte_books: bool = False
) -> tuple[Any, ...]:
    """What PART of cuda/vptq.cuh stands for, three times."""
    args: list[Any] = []
    for part, count in zip(parts, ctas, strict=True):
        args += [
            part.stream,
            part.byte_book if byte_books else part.book,
            part.byte_residual if byte_books else part.residual,
            part.dense,
            part.affine,
            part.source,
            part.out_features,
            count,
        ]
    return *args, *([None] * 6 + [0, 0]) * (MOST - len(parts))
