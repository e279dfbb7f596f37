"""SmoothQuant: move the outliers of the activations into the weights, where a scale per row can bear them.

s_j = max|x_j|^α / max|w_j|^(1−α) over all linears that read x; the layer before gives x / s, the linears take W · s.
The float function stays the same. α is one number, or searched per group for the least output error at 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.tensors import quantize_int8_rows

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def smooth_scales(largest: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """Scales [in] from the largest inputs [in] and the weights [out, in] that share them; dead columns get 1."""
    heaviest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    scales = largest.clamp(min=1e-5).pow(alpha) / heaviest.pow(1 - alpha)
    return torch.where(largest > 0, scales, torch.ones_like(scales)).clamp(min=1e-4, max=1e4)


def w8a8_error(x: Tensor, weights: Sequence[Tensor], scales: Tensor, wanted: Sequence[Tensor] | None = None) -> float:
    """Squared output error over all siblings with int8 tokens and int8 channels; `wanted` are their float outputs."""
    wanted = wanted or [x @ weight.float().T for weight in weights]
    codes, steps = quantize_int8_rows(x / scales)
    tokens, total = codes * steps, 0.0
    for weight, output in zip(weights, wanted, strict=True):
        scaled = weight.float() * scales
        width = (scaled.abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-12)
        rounded = torch.clamp(torch.round(scaled / width), -128, 127) * width
        total += float((tokens @ rounded.T).sub_(output).square_().mean(dtype=torch.float64))
    return total


def search_alpha(x: Tensor, sizes: Sequence[Tensor], weights: Sequence[Tensor], alphas: Sequence[float] = ALPHAS,
                 ) -> tuple[float, Tensor]:
    """(α, scales) with the least error on sample inputs x [tokens, in]; no smoothing at all is a candidate too (α = 0).

    `sizes` are measures of the input columns [in] to try: the largest values come from a few tokens that say little of the
    others, for which the root mean square speaks.
    """
    x = x.float()
    ones, wanted = torch.ones_like(sizes[0]), [x @ weight.float().T for weight in weights]
    best = (w8a8_error(x, weights, ones, wanted), 0.0, ones)
    for size in sizes:
        for alpha in alphas:
            scales = smooth_scales(size, weights, alpha)
            error = w8a8_error(x, weights, scales, wanted)
            if error < best[0]:
                best = (error, alpha, scales)
    return best[1], best[2]
