"""SparseGPT 2:4: of every four neighbouring inputs each row drops the two whose loss costs least,
w² / U_ii².

Same recursion as GPTQ: what a dropped weight did, later columns take over. The mask is final:
pruning gives back the weight and the mask, and every later step (scale folding, clipping, rounding)
multiplies zeros or keeps them by mask. Columns go in their natural order, because the four of a
group must come up together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight.quant.gptq import columnwise
from flyweight.quant.grid import Integers, make_grid
from flyweight.quant.statistics import Statistics
from flyweight.tensors import IntGroup


def prune24(
    weight: Tensor,
    statistics: Statistics,
    *,
    damping: float = 0.01,
    settings: Integers | None = None,
) -> tuple[Tensor, Tensor, IntGroup | None]:
    """weight [out, in] → (pruned weight, mask, and with `settings` the survivors rounded in the
    same pass).
    """
    if weight.shape[1] % 4:
        raise ValueError(f"2:4 needs a multiple of four inputs, not {weight.shape[1]}")
    _, upper = statistics.factor(act_order=False, damping=damping)
    original = weight.float().clone()
    original[:, statistics.importance <= 0] = 0
    columns = original.T.contiguous()  # [in, out]
    mask = torch.zeros_like(columns, dtype=torch.bool)
    codes = torch.empty_like(columns)
    grid = make_grid(original, settings, statistics.importance) if settings else None
    scales, zeros = (
        (tensor.T.contiguous() for tensor in grid.expand()) if grid else (columns, columns)
    )

    def round_column(j: int, column: Tensor) -> Tensor:
        if j % 4 == 0:
            loss = columns[j : j + 4].square() / upper.diagonal()[j : j + 4, None].square()
            mask[j : j + 4].scatter_(
                0, torch.argsort(loss, dim=0, descending=True, stable=True)[:2], True
            )
        value = torch.where(mask[j], column, 0.0)
        if grid is None:
            return value
        codes[j] = torch.clamp(
            torch.round(value / scales[j]) + zeros[j], 0, 2**grid.settings.bits - 1
        )
        return (codes[j] - zeros[j]) * scales[j]

    columnwise(columns, upper, round_column)
    return columns.T.contiguous(), mask.T.contiguous(), grid.tensor(codes.T) if grid else None
