"""Round to nearest: no statistics needed, though importance can weight the ranges. The baseline of
every solver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight.quant.grid import Integers, make_grid
from flyweight.tensors import Int8Channel, IntGroup, merge

AT_ONCE = (
    1 << 24
    # weights: rows do not depend on each other, and a search holds several copies of them
)


def rtn(weight: Tensor, settings: Integers, importance: Tensor | None = None) -> IntGroup:
    """weight [out, in] → integers on the grid that `settings` describes."""
    parts = []
    for rows in weight.split(max(1, AT_ONCE // weight.shape[1])):
        grid = make_grid(rows, settings, importance)
        parts.append(grid.tensor(grid.codes(rows.float())))
    (whole,) = merge(parts)
    assert isinstance(whole, IntGroup)
    return whole


def to_int8_channel(tensor: IntGroup) -> Int8Channel:
    """An 8-bit symmetric weight with one group per channel as W8A8: the same numbers, activations
    in int8 too.
    """
    return Int8Channel(tensor.integers().to(torch.int8), tensor.scales.float())
