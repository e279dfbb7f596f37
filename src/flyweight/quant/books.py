"""Codebooks of one layer, and how a column's vectors are matched with their entries.

Main and residual entry are chosen together: the best pair over the few nearest main entries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.quant.kmeans import fused, nearest, parts_for, split_book


@dataclass(eq=False)
class Books:
    """Entries in the stored dtype's values."""

    main: Tensor  # [centroids, length]
    residual: Tensor | None
    beam: int

    @functools.cached_property
    def split(self) -> Any:
        """Of the main book, for the fused search."""
        return split_book(self.main)

    def match(self, points: Tensor) -> tuple[Tensor, Tensor | None]:
        """points [n, length] → indices [n] into main and residual."""
        if self.residual is None:
            return nearest(points, self.main)[0], None
        first = self.candidates(points)  # [n, beam]
        left = points[:, None] - self.main[first]  # [n, beam, length]
        second, distance = nearest(left.flatten(0, 1), self.residual)
        pick = distance.view(first.shape).argmin(1, keepdim=True)
        return first.gather(1, pick)[:, 0], second.view(first.shape).gather(1, pick)[:, 0]

    def candidates(self, points: Tensor) -> Tensor:
        """The main entries that are tried: the nearest ones. (On a GPU: nearly always.)"""
        beam = min(self.beam, self.main.shape[0])
        scores = torch.addmm(self.main.square().sum(1), points, self.main.T, alpha=-2)
        return (
            scores.topk(beam, dim=1, largest=False).indices
            if beam > 1
            else scores.argmin(1, keepdim=True)
        )

    def walk(
        self,
        tile: Tensor,
        matrix: Tensor,
        *,
        scale: Tensor,
        bias: Tensor,
        first: Tensor,
        second: Tensor,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One block [columns, out] of GPTQ's recursion: the rounded columns, and the errors that
        the rest has to make up for.

        With `values` it is a block of coordinate descent: the tile is the pull on these values, the
        errors are their moves. `scale` and `bias` [columns] normalize; indices go to the rows of
        `first` and `second`.
        """
        if fused(tile, self.main):
            from flyweight.quant.triton.vectors import Search, walk

            parts = parts_for(tile.shape[1] // self.main.shape[1], self.main)
            search = Search(self.main, self.residual, self.split, parts, self.beam)
            return walk(
                tile,
                matrix.contiguous(),
                search,
                scale=scale,
                bias=bias,
                first=first,
                second=second,
                values=values,
            )
        rounded = torch.empty_like(tile)
        errors = torch.empty_like(tile)
        tile = tile.clone()
        for i, pivot in enumerate(matrix.diagonal()):
            x = tile[i] if values is None else values[i] + tile[i] / pivot
            main, residual = self.match(((x - bias[i]) / scale[i]).view(-1, self.main.shape[1]))
            first[i, : len(main)] = main
            if residual is not None:
                second[i, : len(residual)] = residual
            rounded[i] = self.decode(main, residual).flatten() * scale[i] + bias[i]
            errors[i] = (x - rounded[i]) / pivot if values is None else rounded[i] - values[i]
            tile[i + 1 :].addr_(matrix[i, i + 1 :], errors[i], alpha=-1)
        return rounded, errors

    def decode(self, main: Tensor, residual: Tensor | None) -> Tensor:
        vectors = self.main[main]
        return (
            vectors
            if residual is None or self.residual is None
            else vectors + self.residual[residual]
        )

    def stored(self, dtype: torch.dtype) -> Books:
        extra = None if self.residual is None else self.residual.to(dtype).float()
        return Books(self.main.to(dtype).float(), extra, self.beam)
