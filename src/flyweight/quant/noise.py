"""The noise that rounding is expected to make, as a function of the scales [in] between activations
and weights.

A rounding error is uniform over its step, hence independent of everything else: the outputs'
expected squared error is, but for a factor, the sum of squared steps times the energy that meets
them. That takes no product of matrices and has a gradient, so that every channel's scale can be
moved by itself, where SmoothQuant and AWQ choose one exponent for all.

    weights      Σ_(row, group) step² · Σ_(j in group) |x_j|² / s_j²
                 step = range of the group's w_j · s_j
    activations  Σ_token step² · Σ_j s_j² · |w_j|²
                 step = largest |x_j| / s_j
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Noise = Callable[[Tensor], Tensor]  # scales [in] → expected squared error
Allowed = Callable[[Tensor], Tensor]  # scales → the nearest ones that the layer before can take
STEPS = 60
RATE = 0.05


def weight_noise(
    weight: Tensor, energy: Tensor, *, group_size: int, symmetric: bool = True
) -> Noise:
    """Of rounding `weight` [out, in] in groups of columns, where the inputs' squares sum to
    `energy` [in].
    """
    sizes = weight.float().abs() if symmetric else weight.float()

    def noise(scales: Tensor) -> Tensor:
        pieces = (sizes * scales).unflatten(1, (-1, group_size))
        ranges = (
            pieces.amax(-1)
            if symmetric
            else pieces.amax(-1).clamp(min=0) - pieces.amin(-1).clamp(max=0)
        )  # [out, groups]
        return (
            ranges.square().sum(0)
            * (energy / scales.square()).unflatten(0, (-1, group_size)).sum(-1)
        ).sum()

    return noise


def token_noise(x: Tensor, weight: Tensor, largest: Tensor, *, tokens: int) -> Noise:
    """Of int8 tokens x [sample, in], a sample of `tokens` whose largest values are `largest` [in].

    Channels that the sample does not know at their loudest would be taken for quiet ones, and some
    are loud in one token of ten thousand: each counts as one more token of the whole.
    """
    sizes = x.abs()
    energy = weight.float().square().sum(0)
    share = x.shape[0] / tokens

    def noise(scales: Tensor) -> Tensor:
        steps = (sizes / scales).amax(1).square().sum() + share * (largest / scales).square().sum()
        return steps * (scales.square() * energy).sum()

    return noise


def quietest(noise: Noise, scales: Tensor, allowed: Allowed, *, steps: int = STEPS) -> Tensor:
    """Scales near `scales` with the least noise that so many steps find."""
    exponents = allowed(scales).log().requires_grad_()
    optimizer = torch.optim.Adam([exponents], lr=RATE)
    least = torch.inf
    best = allowed(scales)
    with torch.enable_grad():
        for _ in range(steps):
            tried = allowed(exponents.exp())
            value = noise(tried)
            if value.item() < least:
                least = value.item()
                best = tried.detach()
            optimizer.zero_grad()
            value.log().backward()
            optimizer.step()
    return best
