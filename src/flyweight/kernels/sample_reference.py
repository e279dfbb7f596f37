"""Which tokens the filters keep, and how likely each is, by sorting in float64: what samplers are
tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Kept:
    """Of one row, by token id."""

    tokens: Tensor  # bool [vocabulary]
    probabilities: Tensor  # float64 [vocabulary], 0 for what is not kept
    close: Tensor  # bool [vocabulary]: within 1e-6 of a border of top_p or min_p


def kept(logits: Tensor, filters: Filters, *, tolerance: float = 1e-6) -> Kept:
    """Of logits [vocabulary], penalties and masks applied: by (logit falling, id rising) the first
    top_k, of these the first with less than top_p of their mass before them, of these those of at
    least min_p times the largest. Options are taken as the float32 numbers that a device gets.
    """
    temperature, top_p, min_p = (
        torch.tensor(value, dtype=torch.float32).double().item()
        for value in (filters.temperature, filters.top_p, filters.min_p)
    )
    wide = logits.double()
    order = torch.sort(wide, descending=True, stable=True).indices
    below = (wide[order] - wide[order[0]]) / temperature
    mass = torch.where(below == 0, 1.0, below.exp())
    mass = torch.where(wide[order] == -torch.inf, 0.0, mass)
    if filters.top_k:
        mass[filters.top_k :] = 0
    share = mass / mass.sum()
    before = share.cumsum(0) - share
    found = mass > 0
    close = torch.zeros_like(found)
    if top_p < 1:
        found &= before < top_p
        close |= (before - top_p).abs() < tolerance
    found &= mass >= min_p
    close |= (mass - min_p).abs() < tolerance * min_p
    found[0] = True
    probabilities = torch.where(found, mass, 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return Kept(found[back], (probabilities / probabilities.sum())[back], close[back])
