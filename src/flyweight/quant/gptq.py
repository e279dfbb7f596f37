"""GPTQ: round one column at a time and let the columns still to come make up for its error.

With U the upper factor of the inverse Hessian, column i leaves the error e = (w_i − q_i) / U_ii and every later
column j moves by −e · U_ij. Work goes in blocks of 128 columns; the rest of the matrix moves once per block, by a
matrix product. Rows are independent, so siblings are solved as one matrix with their rows one after the other.

Columns go by falling importance (act-order) on grids that are fixed beforehand from the original groups (static
groups): the order then costs nothing at run time. Without act-order, a grid is made when its first column comes up.

`sweeps` adds what GPTQ leaves on the table: cyclic coordinate descent on the same objective, each sweep followed by a
least-squares refit of all scales of a row together. Neither can make the layer's error worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.quant.grid import Grid, Integers, make_grid, stored
from flyweight.quant.statistics import Statistics
from flyweight.tensors import IntGroup

BLOCK = 128


@dataclass(frozen=True)
class GPTQ:
    act_order: bool = True
    damping: float = 0.01
    sweeps: int = 0


def gptq(weight: Tensor, statistics: Statistics, settings: Integers, options: GPTQ, *,
         mask: Tensor | None = None, target: Tensor | None = None) -> IntGroup:
    """weight [out, in] → integers; `mask` (bool, True where kept) holds pruned weights at zero throughout.

    The sweeps aim at `target` where given: the weight before it was pruned.
    """
    weight = weight.float().clone()
    weight[:, statistics.importance <= 0] = 0
    order, upper = statistics.factor(act_order=options.act_order, damping=options.damping)
    grid = make_grid(weight, settings, statistics.importance)
    grids = ColumnGrids(grid, order, dynamic=not options.act_order and grid.group_size < weight.shape[1],
                        importance=statistics.importance)
    columns = weight.T[order].contiguous()  # [in, out]: one column of the weight is one contiguous row here
    kept = None if mask is None else mask.T[order]
    codes = recursion(columns, upper, grids, kept)
    grid, codes = grids.grid, torch.empty_like(codes).index_copy_(0, order, codes).T
    target = weight if target is None else target.float()
    hessian = statistics.damped(options.damping)
    for _ in range(options.sweeps):
        codes = descend(target, codes, grid, hessian, mask=mask)
        grid = refit(target, codes, grid, hessian)
    return grid.tensor(codes)


class ColumnGrids:
    """Scale and zero point of one column after the other, in the order in which they are rounded."""

    def __init__(self, grid: Grid, order: Tensor, *, dynamic: bool, importance: Tensor) -> None:
        self.grid, self.order, self.dynamic, self.importance = grid, order, dynamic, importance
        self.group_of = (order // grid.group_size).tolist()
        self.steps = 2**grid.settings.bits - 1

    def at(self, begin: int, end: int, columns: Tensor) -> tuple[Tensor, Tensor]:
        """[end − begin, rows] each, contiguous; a dynamic grid is first made anew from the columns as they are now."""
        if self.dynamic and begin % self.grid.group_size == 0:
            size, group = self.grid.group_size, begin // self.grid.group_size
            made = make_grid(columns[begin : begin + size].T, dataclasses.replace(self.grid.settings, group_size=size),
                             self.importance[begin : begin + size])
            self.grid.scales[:, group], self.grid.zeros[:, group] = made.scales[:, 0], made.zeros[:, 0]
        groups = torch.tensor(self.group_of[begin:end], device=columns.device)
        return self.grid.scales.T[groups].contiguous(), self.grid.zeros.T[groups].contiguous()

    @property
    def block(self) -> int:
        return min(BLOCK, self.grid.group_size) if self.dynamic else BLOCK


def recursion(columns: Tensor, upper: Tensor, grids: ColumnGrids, kept: Tensor | None = None) -> Tensor:
    """Round `columns` [in, out] (overwritten) in place of order; codes [in, out]."""
    codes = torch.empty_like(columns)
    step = graphed(round_block)
    for begin in range(0, columns.shape[0], grids.block):
        end = min(begin + grids.block, columns.shape[0])
        scales, zeros = grids.at(begin, end, columns)
        part = None if kept is None else kept[begin:end].contiguous()
        errors = step(columns[begin:end].clone(), upper[begin:end, begin:end].contiguous(), scales, zeros, grids.steps,
                      codes[begin:end], part)
        columns[end:] -= upper[begin:end, end:].T @ errors
    return codes


def round_block(block: Tensor, upper: Tensor, scales: Tensor, zeros: Tensor, steps: int, codes: Tensor,
                kept: Tensor | None) -> Tensor:
    """One block [columns, out]: fills `codes`, returns the errors that the rest of the matrix has to make up for."""
    errors = torch.empty_like(block)
    diagonal = upper.diagonal()[:, None]
    for i in range(block.shape[0]):
        code = torch.clamp(torch.round(block[i] / scales[i]) + zeros[i], 0, steps)
        if kept is not None:
            code = torch.where(kept[i], code, zeros[i])
        codes[i] = code
        errors[i] = (block[i] - (code - zeros[i]) * scales[i]) / diagonal[i]
        block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors


def graphed(function: Callable) -> Callable:
    """The same function replayed as a CUDA graph per shape: a block is a thousand tiny launches. Plain on the CPU."""
    graphs: dict[tuple, tuple] = {}

    def run(block: Tensor, upper: Tensor, scales: Tensor, zeros: Tensor, steps: int, codes: Tensor,
            kept: Tensor | None) -> Tensor:
        if not block.is_cuda:
            return function(block, upper, scales, zeros, steps, codes, kept)
        inputs = [block, upper, scales, zeros, codes, *([] if kept is None else [kept])]
        key = (block.shape, kept is None)
        if key not in graphs:
            buffers = [tensor.clone() for tensor in inputs]
            graph = torch.cuda.CUDAGraph()
            mask = None if kept is None else buffers[5]
            function(*buffers[:4], steps, buffers[4], mask)  # loads the kernels, which must not happen while capturing
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = function(*buffers[:4], steps, buffers[4], mask)
            graphs[key] = (graph, buffers, output)
        graph, buffers, output = graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        codes.copy_(buffers[4])
        return output

    return run


def columnwise(columns: Tensor, upper: Tensor, round_column: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The recursion for any way of rounding: `round_column(j, column [out])` → its rounded value. `columns` is overwritten."""
    for begin in range(0, columns.shape[0], BLOCK):
        end = min(begin + BLOCK, columns.shape[0])
        errors = torch.empty_like(columns[begin:end])
        for j in range(begin, end):
            value = round_column(j, columns[j])
            errors[j - begin] = (columns[j] - value) / upper[j, j]
            columns[j + 1 : end].addr_(upper[j, j + 1 : end], errors[j - begin], alpha=-1)
            columns[j] = value
        columns[end:] -= upper[begin:end, end:].T @ errors
    return columns


def sweep(target: Tensor, values: Tensor, hessian: Tensor, round_column: Callable[[int, Tensor], Tensor]) -> Tensor:
    """One round of coordinate descent on ‖(W − Q)·X‖²: each column of `values` [in, out] moves to its own best rounding."""
    values = values.clone()
    diagonal = hessian.diagonal().clamp(min=1e-8 * float(hessian.diagonal().mean()) + 1e-30)
    pull = hessian @ (target - values)  # [in, out]: minus half the gradient
    for begin in range(0, values.shape[0], BLOCK):
        end = min(begin + BLOCK, values.shape[0])
        local, moves = pull[begin:end].clone(), torch.empty_like(pull[begin:end])
        for j in range(begin, end):
            new = round_column(j, values[j] + local[j - begin] / diagonal[j])
            moves[j - begin] = new - values[j]
            values[j] = new
            local.addr_(hessian[begin:end, j], moves[j - begin], alpha=-1)
        pull -= hessian[:, begin:end] @ moves
    return values


def descend(weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Better codes [out, in] on the same grid."""
    scales, zeros = (tensor.T.contiguous() for tensor in grid.expand())
    kept = None if mask is None else mask.T.contiguous()
    steps, found = 2**grid.settings.bits - 1, codes.T.contiguous()

    def round_column(j: int, column: Tensor) -> Tensor:
        code = torch.clamp(torch.round(column / scales[j]) + zeros[j], 0, steps)
        found[j] = code if kept is None else torch.where(kept[j], code, zeros[j])
        return (found[j] - zeros[j]) * scales[j]

    sweep(weight.T, grid.values(codes).T, hessian, round_column)
    return found.T


def refit(weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor) -> Grid:
    """All scales of a row by least squares, given the codes; a row keeps its old scales where rounding them costs more."""
    size, groups = grid.group_size, grid.scales.shape[1]
    integers = codes - grid.zeros.repeat_interleave(size, 1)
    pieces = integers.unflatten(1, (groups, size))
    normal = torch.empty(weight.shape[0], groups, groups, device=weight.device)
    for g in range(groups):
        columns = slice(g * size, (g + 1) * size)
        normal[:, g] = ((integers[:, columns] @ hessian[columns]).unflatten(1, (groups, size)) * pieces).sum(-1)
    right = ((weight @ hessian).unflatten(1, (groups, size)) * pieces).sum(-1)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    ridge = torch.diag_embed(1e-6 * diagonal + 1e-12 * diagonal.amax(1, keepdim=True) + 1e-30)
    # Towards the old scales: a group of zeros has no say in its own.
    fitted = grid.scales + torch.linalg.solve(normal + ridge, right - (normal @ grid.scales[..., None])[..., 0])
    fitted = stored(torch.where(torch.isfinite(fitted), fitted, grid.scales), grid.settings.scale_dtype)

    def cost(scales: Tensor) -> Tensor:
        return ((normal @ scales[..., None])[..., 0] * scales).sum(1) - 2 * (right * scales).sum(1)

    better = cost(fitted) < cost(grid.scales)
    return dataclasses.replace(grid, scales=torch.where(better[:, None], fitted, grid.scales))
