"""SmoothQuant: move the outliers of the activations into the weights, where a scale per row can
bear them.

s_j = max|x_j|^α / max|w_j|^(1−α) over all linears that read x; the layer before gives x / s, the
linears take W · s. The float function stays the same. α is one number, or searched per group for
the least output error of what is rounded: int8 tokens and channels, or weights alone. For int8
tokens the scales found are then refined one by one, by gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyweight.quant.noise import Allowed, Least, Noise, quietest, token_noise, weight_noise
from flyweight.tensors import quantize_int8_rows

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REFINE_STEPS = 30
UNSEEN = 4  # one token in so many judges what was learned on the others


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


def w8a8_error(x: Tensor, weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Scales → squared output error over all siblings with int8 tokens x [tokens, in] and int8
    channels.
    """
    x = x.float()
    wanted = [x @ weight.float().T for weight in weights]

    def error(scales: Tensor) -> Tensor:
        codes, steps = quantize_int8_rows(x / scales)
        tokens = codes * steps
        total = x.new_zeros((), dtype=torch.float64)
        for weight, output in zip(weights, wanted, strict=True):
            scaled = weight.float() * scales
            width = (scaled.abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-12)
            rounded = torch.clamp(torch.round(scaled / width), -128, 127) * width
            total += (tokens @ rounded.T).sub_(output).square_().mean(dtype=torch.float64)
        return total

    return error


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


def int8_noise(x: Tensor, weights: Sequence[Tensor], *, largest: Tensor, tokens: int) -> Noise:
    """Expected of int8 tokens and channels. x [sample, in] is a sample of `tokens` whose largest
    values are `largest` [in]; what judges afterwards is left out.
    """
    seen = x[~judges(x)].float()
    weight = torch.cat([w.float() for w in weights])
    rounding = weight_noise(weight, seen.square().sum(0), group_size=weight.shape[1])
    reading = token_noise(seen, weight, largest, tokens=tokens)
    return lambda scales: rounding(scales) + reading(scales)


def judges(x: Tensor) -> Tensor:
    """bool [sample]: the tokens that judge."""
    return torch.arange(x.shape[0], device=x.device) % UNSEEN == 0


def refine(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Tensor,
    noise: Noise,
    allowed: Allowed = lambda scales: scales,
) -> Tensor:
    """Of scales near `scales` with less `noise` (`int8_noise` of x), `scales` and none at all,
    those with the least error on tokens that the noise knows nothing of.
    """
    refined = quietest(noise, scales, allowed, steps=REFINE_STEPS)
    error = w8a8_error(x[judges(x)], weights)
    least = Least(error(refined), refined)
    for candidate in (allowed(scales), torch.ones_like(scales)):
        least.offer(error(candidate), candidate)
    return least.candidate[0]
