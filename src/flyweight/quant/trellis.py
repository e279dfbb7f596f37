"""Trellis codes of a layer: what a lane holds of a unit is decided at once, and all inputs still to
come make up for its error.

It is GPTQ by blocks. A lane's circle has 32 inputs of two rows, so inputs are walked in blocks of
these 32, the more important blocks first. With U the upper factor of the inverse Hessian in this
order, a block's error E moves later columns by −E · U_bb⁻¹ · U_b,later.

`sweeps` go over all blocks again, each given all others: a circle takes new states where they lower
the layer's error. A row's scale is a least-squares fit behind each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.errors import UnsupportedError
from flyweight.quant.statistics import Statistics, inverse_factor
from flyweight.quant.trellis_search import Shape, search, table
from flyweight.tensors import Trellis
from flyweight.tensors.trellis import BLOCK, SPREAD, STEP, TILE, unit_columns

WIDER = 1.06  # the best scale of normal weights, in their standard deviation by that of the values
QUARTERS = 4  # lanes of different inputs


@dataclass(frozen=True)
class TrellisCode:
    bits: int = 2
    damping: float = 0.01
    sweeps: int = 0
    dtype: torch.dtype = torch.bfloat16  # of scales


def even_scales(statistics: Statistics, weights: Sequence[Tensor]) -> Tensor:
    """Scales [in] that weights are multiplied by and inputs divided: columns of equal mean squares,
    as one scale for all of a row asks for. What an input counts is the search's concern.
    """
    size = torch.stack([weight.float().square().sum(0) for weight in weights]).sum(0)
    scales = size.clamp(min=1e-3 * float(size.mean()) + 1e-30).rsqrt()
    scales = scales / scales.log().mean().exp()
    return torch.where(statistics.importance > 0, scales, torch.ones_like(scales))


@dataclass(frozen=True)
class Piece:
    """The inputs of one quarter's lanes in a unit: 32, or 16 of a single block."""

    unit: int
    quarter: int
    columns: Tensor

    @property
    def steps(self) -> int:
        return len(self.columns) * 2 // STEP


def pieces_of(columns: int, device: torch.device) -> list[Piece]:
    made, begin = [], 0
    for unit, size in enumerate(unit_columns(columns)):
        places = torch.arange(begin, begin + size, device=device).view(-1, QUARTERS, 8)
        made += [Piece(unit, t, places[:, t].flatten()) for t in range(QUARTERS)]
        begin += size
    return made


def to_circles(piece: Tensor) -> Tensor:
    """[out, inputs of a piece] → [circles, steps, 4]."""
    parts = piece.unflatten(1, (-1, 2, STEP)).unflatten(0, (-1, 2, 8))
    # tile, row g + 8, g, half of a block, last four, weight
    return parts.permute(0, 2, 3, 4, 1, 5).flatten(2, 4).flatten(0, 1)


def from_circles(circles: Tensor) -> Tensor:
    """And back."""
    parts = circles.unflatten(1, (-1, 2, 2)).unflatten(0, (-1, 8))
    return parts.permute(0, 4, 1, 2, 3, 5).flatten(3).flatten(0, 2).flatten(1)


def trellis(
    weights: Sequence[Tensor], statistics: Statistics, options: TrellisCode
) -> list[Trellis]:
    """Siblings [out, in] of one input."""
    columns = weights[0].shape[1]
    if columns % BLOCK:
        raise UnsupportedError(
            f"a trellis takes inputs in blocks of {BLOCK}, and this layer has {columns}: "
            "give it another solver by a line of the recipe"
        )
    tiles = [-(-len(weight) // TILE) for weight in weights]
    joined = weights[0].new_zeros(TILE * sum(tiles), columns, dtype=torch.float32)
    begins = [TILE * sum(tiles[:i]) for i in range(len(tiles))]
    for begin, weight in zip(begins, weights, strict=True):
        joined[begin : begin + len(weight)] = weight
    joined[:, statistics.importance <= 0] = 0
    states, scales = Solver(joined, statistics, options).run()
    return [
        Trellis.from_states(
            [part[begin // TILE :][:count] for part in states],
            scales[begin:][: len(weight)].contiguous(),
            options.bits,
        )
        for begin, count, weight in zip(begins, tiles, weights, strict=True)
    ]


class Solver:
    """Of one matrix of whole tiles."""

    def __init__(
        self,
        weight: Tensor,
        statistics: Statistics,
        options: TrellisCode,
        shape: Shape | None = None,
    ) -> None:
        self.options = options
        self.shape = shape or Shape.of(options.bits)
        self.values = table(self.shape.state, weight.device)
        pieces = pieces_of(weight.shape[1], weight.device)
        importance = statistics.importance
        weighed = torch.stack([importance[piece.columns].mean() for piece in pieces])
        order = torch.argsort(weighed, descending=True, stable=True).tolist()
        self.pieces = [pieces[i] for i in order]
        self.order = torch.cat([piece.columns for piece in self.pieces])
        self.weight = weight[:, self.order]  # in the order of the walk, as all that follows
        hessian = statistics.hessian[self.order][:, self.order]
        hessian.diagonal()[importance[self.order] <= 0] = 1.0
        self.ridge = statistics.ridge(options.damping)
        self.hessian = hessian
        self.scales = self.first_scales()
        self.states: list[Tensor] = []  # of each piece [circles, steps]
        self.codes = torch.zeros_like(self.weight)

    def first_scales(self) -> Tensor:
        """[out, 1]"""
        spread = self.weight.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)
        return self.stored(spread * (WIDER / SPREAD))

    def stored(self, scales: Tensor) -> Tensor:
        return scales.to(self.options.dtype).float()

    def slices(self) -> list[slice]:
        ends = torch.tensor([len(piece.columns) for piece in self.pieces]).cumsum(0).tolist()
        return [slice(end - len(p.columns), end) for p, end in zip(self.pieces, ends, strict=True)]

    def run(self) -> tuple[list[Tensor], Tensor]:
        """States as `Trellis.states` returns them, and scales."""
        self.walk()
        self.hessian.diagonal().add_(self.ridge)
        self.refit()
        for _ in range(self.options.sweeps):
            self.sweep()
            self.refit()
        return self.assembled(), self.scales.to(self.options.dtype)

    def nearest(self, piece: Piece, target: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
        """States of weights [out, inputs], and their values [out, inputs]; `metric`: what an error
        of each input counts.
        """
        weights = to_circles(metric.expand(TILE, -1))[0]
        states = search(to_circles(target / self.scales), weights / weights.mean(), self.shape)
        return states, from_circles(self.values[states].float() * SPREAD)

    def walk(self) -> None:
        upper = inverse_factor(self.hessian, self.ridge)
        rest = self.weight.clone()
        for piece, own in zip(self.pieces, self.slices(), strict=True):
            corner = upper[own, own]
            root = torch.linalg.inv(corner)
            metric = root.square().sum(1)
            states, codes = self.nearest(piece, rest[:, own], metric)
            self.states.append(states)
            self.codes[:, own] = codes
            errors = (rest[:, own] - codes * self.scales) @ root
            rest[:, own.stop :].addmm_(errors, upper[own, own.stop :], alpha=-1)

    def sweep(self) -> None:
        """Each piece again, given all others."""
        pull = (self.weight - self.codes * self.scales) @ self.hessian
        for i, (piece, own) in enumerate(zip(self.pieces, self.slices(), strict=True)):
            corner = self.hessian[own, own]
            before = self.codes[:, own] * self.scales
            target = before + torch.linalg.solve(corner, pull[:, own], left=False)
            states, codes = self.nearest(piece, target, corner.diagonal())
            after = codes * self.scales
            better = self.circle_cost(target - after, corner) < self.circle_cost(
                target - before, corner
            )
            self.states[i] = torch.where(better[:, None], states, self.states[i])
            rows = better.unflatten(0, (-1, 8))[:, None].expand(-1, 2, -1).flatten()
            self.codes[:, own] = torch.where(rows[:, None], codes, self.codes[:, own])
            moved = self.codes[:, own] * self.scales - before
            pull.addmm_(moved, self.hessian[own], alpha=-1)

    @staticmethod
    def circle_cost(errors: Tensor, corner: Tensor) -> Tensor:
        rows = ((errors @ corner) * errors).sum(1)
        return rows.unflatten(0, (-1, 2, 8)).sum(1).flatten()

    def refit(self) -> None:
        """The scale of each row that is best with its codes."""
        seen = self.codes @ self.hessian
        own = (seen * self.codes).sum(1, keepdim=True)
        fitted = (seen * self.weight).sum(1, keepdim=True) / own
        self.scales = self.stored(torch.where(fitted > 0, fitted, self.scales))

    def assembled(self) -> list[Tensor]:
        """[tiles, units, 32 lanes, steps] of whole units and of a single block."""
        count = len(self.weight) // TILE
        parts: list[list[tuple[Piece, Tensor]]] = [[], []]
        for piece, states in zip(self.pieces, self.states, strict=True):
            parts[piece.steps < 16].append((piece, states.view(count, 8, -1)))
        made = []
        for part in parts:
            units = sorted({piece.unit for piece, _ in part})
            if not part:
                continue
            steps = part[0][0].steps
            into = part[0][1].new_empty(count, len(units), 8, QUARTERS, steps)
            for piece, states in part:
                into[:, piece.unit - units[0], :, piece.quarter] = states
            made.append(into.flatten(2, 3))
        return made
