"""GPTQ: round one column at a time and let the columns still to come make up for its error.

With U the upper factor of the inverse Hessian, column i leaves the error e = (w_i − q_i) / U_ii and
every later column j moves by −e · U_ij. Work goes in blocks of 128 columns; the rest of the matrix
moves once per block, by a matrix product. Rows are independent, so siblings are solved as one
matrix with their rows one after the other.

Columns go by falling importance (act-order) on grids that are fixed beforehand from the original
groups (static groups): the order then costs nothing at run time. Without act-order, a grid is made
when its first column comes up.

`sweeps` adds what GPTQ leaves on the table: cyclic coordinate descent on the same objective, each
sweep followed by a least-squares refit of all scales of a row together. Neither can make the
layer's error worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels.native import rounding
from flyweight.quant.grid import Grid, Integers, make_grid, stored
from flyweight.quant.statistics import Statistics
from flyweight.tensors import IntGroup

BLOCK = 128


@dataclass(frozen=True)
class GPTQ:
    act_order: bool = True
    damping: float = 0.01
    sweeps: int = 0


def gptq(
    weight: Tensor,
    statistics: Statistics,
    settings: Integers,
    options: GPTQ,
    *,
    mask: Tensor | None = None,
    target: Tensor | None = None,
) -> IntGroup:
    """weight [out, in] → integers; `mask` (bool, True where kept) holds pruned weights at zero
    throughout.

    The sweeps aim at `target` where given: the weight before it was pruned.
    """
    weight = weight.float().clone()
    weight[:, statistics.importance <= 0] = 0
    order, upper = statistics.factor(act_order=options.act_order, damping=options.damping)
    grid = make_grid(weight, settings, statistics.importance)
    grids = ColumnGrids(
        grid,
        order,
        dynamic=not options.act_order and grid.group_size < weight.shape[1],
        importance=statistics.importance,
    )
    columns = weight.T[
        order
    ].contiguous()  # [in, out]: one column of the weight is one contiguous row here
    kept = None if mask is None else mask.T[order]
    codes = recursion(columns, upper, grids, kept)
    grid = grids.grid
    codes = torch.empty_like(codes).index_copy_(0, order, codes).T
    target = weight if target is None else target.float()
    hessian = statistics.damped(options.damping)
    for _ in range(options.sweeps):
        codes = descend(target, codes, grid, hessian, mask=mask)
        grid = refit(target, codes, grid, hessian)
    return grid.tensor(codes)


class ColumnGrids:
    """Scale and zero point of one column after the other, in the order of rounding."""

    def __init__(self, grid: Grid, order: Tensor, *, dynamic: bool, importance: Tensor) -> None:
        self.grid = grid
        self.order = order
        self.dynamic = dynamic
        self.importance = importance
        self.group_of = order // grid.group_size
        self.steps = 2**grid.settings.bits - 1

    def at(self, begin: int, end: int, columns: Tensor) -> tuple[Tensor, Tensor]:
        """[end − begin, rows] each, contiguous; a dynamic grid is first made anew from the columns
        as they are now.
        """
        if self.dynamic and begin % self.grid.group_size == 0:
            size = self.grid.group_size
            group = begin // self.grid.group_size
            made = make_grid(
                columns[begin : begin + size].T,
                dataclasses.replace(self.grid.settings, group_size=size),
                self.importance[begin : begin + size],
            )
            self.grid.scales[:, group] = made.scales[:, 0]
            self.grid.zeros[:, group] = made.zeros[:, 0]
        groups = self.group_of[begin:end]
        return self.grid.scales.T[groups].contiguous(), self.grid.zeros.T[groups].contiguous()

    @property
    def block(self) -> int:
        return min(BLOCK, self.grid.group_size) if self.dynamic else BLOCK


def recursion(
    columns: Tensor, upper: Tensor, grids: ColumnGrids, kept: Tensor | None = None
) -> Tensor:
    """Round `columns` [in, out] (overwritten) in place of order; codes [in, out]."""
    codes = torch.empty_like(columns)
    for begin in range(0, columns.shape[0], grids.block):
        end = min(begin + grids.block, columns.shape[0])
        scales, zeros = grids.at(begin, end, columns)
        codes[begin:end], errors = walk(
            columns[begin:end],
            upper[begin:end, begin:end],
            scales,
            zeros,
            steps=grids.steps,
            kept=None if kept is None else kept[begin:end],
        )
        columns[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    return codes


def walk(
    tile: Tensor,
    matrix: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    steps: int,
    kept: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One block [columns, out]: its codes, and the errors that the rest of the matrix has to make
    up for.

    With `values` it is a block of coordinate descent: the tile is the pull on these values, the
    errors are their moves.
    """
    if tile.is_cuda:
        from flyweight.quant.triton import columns

        return columns.walk(
            tile.contiguous(),
            matrix.contiguous(),
            scales,
            zeros,
            steps=steps,
            kept=kept,
            values=values,
        )
    if rounding.takes(tile):
        return rounding.walk(tile, matrix, scales, zeros, steps=steps, kept=kept, values=values)
    codes = torch.empty_like(tile)
    errors = torch.empty_like(tile)
    tile = tile.clone()
    for i, pivot in enumerate(matrix.diagonal()):
        x = tile[i] if values is None else values[i] + tile[i] / pivot
        codes[i] = torch.clamp(torch.round(x / scales[i]) + zeros[i], 0, steps)
        if kept is not None:
            codes[i] = torch.where(kept[i], codes[i], zeros[i])
        rounded = (codes[i] - zeros[i]) * scales[i]
        errors[i] = (x - rounded) / pivot if values is None else rounded - values[i]
        tile[i + 1 :].addr_(matrix[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


def columnwise(
    columns: Tensor, upper: Tensor, round_column: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The recursion for any way of rounding: `round_column(j, column [out])` → its rounded value.
    `columns` is overwritten.
    """
    for begin in range(0, columns.shape[0], BLOCK):
        end = min(begin + BLOCK, columns.shape[0])
        errors = torch.empty_like(columns[begin:end])
        for j in range(begin, end):
            value = round_column(j, columns[j])
            torch.sub(columns[j], value, out=errors[j - begin]).div_(upper[j, j])
            columns[j + 1 : end].addr_(upper[j, j + 1 : end], errors[j - begin], alpha=-1)
            columns[j] = value
        columns[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    return columns


def descend(
    weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Better codes [out, in] on the same grid: one round of coordinate descent on ‖(W − Q)·X‖²,
    block by block.
    """
    scales, zeros = (tensor.T.contiguous() for tensor in grid.expand())
    values = grid.values(codes).T.contiguous()
    found = torch.empty_like(scales)
    pull = hessian @ (weight.T - values)
    for begin in range(0, weight.shape[1], BLOCK):
        block = slice(begin, begin + BLOCK)
        found[block], moves = walk(
            pull[block],
            hessian[block, block],
            scales[block],
            zeros[block],
            values=values[block],
            steps=2**grid.settings.bits - 1,
            kept=None if mask is None else mask.T[block].contiguous(),
        )
        pull.addmm_(hessian[:, block], moves, alpha=-1)
    return found.T


def refit(weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor) -> Grid:
    """All scales of a row by least squares, given the codes; a row keeps its old scales where
    rounding them costs more.
    """
    size = grid.group_size
    groups = grid.scales.shape[1]
    integers = codes - grid.zeros.repeat_interleave(size, 1)
    pieces = integers.unflatten(1, (groups, size))
    normal = torch.empty(weight.shape[0], groups, groups, device=weight.device)
    for g in range(groups):
        columns = slice(g * size, (g + 1) * size)
        normal[:, g] = (
            (integers[:, columns] @ hessian[columns]).unflatten(1, (groups, size)) * pieces
        ).sum(-1)
    right = ((weight @ hessian).unflatten(1, (groups, size)) * pieces).sum(-1)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    ridge = torch.diag_embed(1e-6 * diagonal + 1e-12 * diagonal.amax(1, keepdim=True) + 1e-30)
    # Towards the old scales: a group of zeros has no say in its own.
    fitted = grid.scales + torch.linalg.solve(
        normal + ridge, right - (normal @ grid.scales[..., None])[..., 0]
    )
    fitted = stored(
        torch.where(torch.isfinite(fitted), fitted, grid.scales), grid.settings.scale_dtype
    )

    def cost(scales: Tensor) -> Tensor:
        return ((normal @ scales[..., None])[..., 0] * scales).sum(1) - 2 * (right * scales).sum(1)

    better = cost(fitted) < cost(grid.scales)
    return dataclasses.replace(grid, scales=torch.where(better[:, None], fitted, grid.scales))
