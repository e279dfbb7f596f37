"""SmoothQuant: move the outliers of the activations into the weights, where a scale per row can
bear them.

The layer before gives x / s, the linears take W · s, and the float function stays the same.

    balanced   s_j = (size x_j / rms w_j)^power
    published  s_j = max|x_j|^α / max|w_j|^(1−α)

Tokens and channels in 8 bits make an expected error of Σ_j (x_j / s_j)² · Σ_j (s_j · w_j)², where
the step of a token or a channel is a multiple of its root mean square: least at s² = rms x / rms w.
Behind a norm or attention the size of a channel is the middle of its root mean square and its
largest value: a text's first token is loud where no other is, and all others attend to it. Behind
a gate other texts are loud in other channels, and scales that follow one text cost more in another
than they gain in their own: it is the root mean square alone, to a lower power. Nothing is searched
for: channel by channel, a search fits the calibration text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyweight.quant.noise import Least

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POWER, GATED_POWER = 0.5, 0.3


def balanced(
    importance: Tensor, largest: Tensor, weights: Sequence[Tensor], *, gated: bool = False
) -> tuple[float, Tensor]:
    """(power, scales [in]) from the mean squares and the largest of the inputs [in] and the weights
    [out, in] that share them: 1 in the geometric mean, and in dead columns.
    """
    power = GATED_POWER if gated else POWER
    loud = importance if gated else importance.sqrt() * largest
    energy = torch.stack([weight.float().square().sum(0) for weight in weights]).sum(0)
    alive = (loud > 0) & (energy > 0)
    ratio = torch.where(alive, loud / energy, 1.0).log()
    middle = ratio.sum() / alive.sum().clamp(min=1)
    scales = ((ratio - middle) * (power / 2)).exp().clamp(min=1e-4, max=1e4)
    return power, torch.where(alive, scales, 1.0)


def smooth_scales(largest: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """Scales [in] from the largest inputs [in] and the weights [out, in] that share them; dead
    columns get 1.
    """
    return blend(largest, heaviest(weights), alpha)


def heaviest(weights: Sequence[Tensor]) -> Tensor:
    """max|w_j| over all weights [in]."""
    each = [torch.maximum(w.amax(0), -w.amin(0)).float() for w in weights]
    return torch.stack(each).amax(0).clamp(min=1e-5)


def blend(largest: Tensor, heavy: Tensor, alpha: float) -> Tensor:
    scales = largest.clamp(min=1e-5).pow(alpha) / heavy.pow(1 - alpha)
    return torch.where(largest > 0, scales, torch.ones_like(scales)).clamp(min=1e-4, max=1e4)


def search_alpha(
    error: Callable[[Tensor], Tensor],
    sizes: Sequence[Tensor],
    weights: Sequence[Tensor],
    alphas: Sequence[float] = ALPHAS,
) -> tuple[float, Tensor]:
    """(α, scales) with the least error; no smoothing at all is a candidate too (α = 0).

    `sizes` are measures of the input columns [in] to try: the largest values come from a few tokens
    that say little of the others, for which the root mean square speaks.
    """
    ones = torch.ones_like(sizes[0])
    heavy = heaviest(weights)
    least = Least(error(ones), ones.new_zeros((), dtype=torch.float64), ones)
    for size in sizes:
        for alpha in alphas:
            scales = blend(size, heavy, alpha)
            least.offer(error(scales), torch.full_like(least.candidate[0], alpha), scales)
    chosen, scales = least.candidate
    return float(chosen), scales
