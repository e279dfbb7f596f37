"""Round to nearest: no statistics needed, though importance can weight the ranges. The baseline of every solver."""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight.quant.grid import Integers, make_grid
from flyweight.tensors import Int8Channel, IntGroup


def rtn(weight: Tensor, settings: Integers, importance: Tensor | None = None) -> IntGroup:
    """weight [out, in] → integers on the grid that `settings` describes."""
    grid = make_grid(weight, settings, importance)
    return grid.tensor(grid.codes(weight.float()))


def to_int8_channel(tensor: IntGroup) -> Int8Channel:
    """An 8-bit symmetric weight with one group per channel as W8A8: the same numbers, activations in int8 too."""
    return Int8Channel(tensor.integers().to(torch.int8), tensor.scales.float())
