"""SmoothQuant: move the outliers of the activations into the weights, where a scale per row can bear them.

s_j = max|x_j|^α / max|w_j|^(1−α) over all linears that read x; the layer before gives x / s, the linears take W · s.
The float function stays the same. α is one number, or searched per group for the least output error at 8 bits; the searched
scales are then refined one by one, by gradient, for the least noise that rounding is expected to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyweight.tensors import quantize_int8_rows

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REFINED_TOKENS, REFINE_STEPS, REFINE_RATE = 1024, 30, 0.05


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


def refine(x: Tensor, weights: Sequence[Tensor], scales: Tensor, allowed: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    """Scales near `scales` with less noise, or `scales`: learned on some of the tokens x [tokens, in], judged on the others.

    A rounding error is uniform over its step, so the outputs' expected squared error is, but for a factor,
    Σ_t step_t² · Σ_j s_j²·|w_j|² + Σ_o step_o² · Σ_j |x_j|²/s_j², which needs no product of matrices.
    """
    scales, every = allowed(scales), max(2, x.shape[0] // REFINED_TOKENS)
    seen, unseen = x[::every].float(), x[1::every].float()
    weight = torch.cat([w.float() for w in weights])
    sizes, w_energy, x_energy = weight.abs(), weight.square().sum(0), seen.square().sum(0)
    exponents = scales.log().requires_grad_()
    optimizer = torch.optim.Adam([exponents], lr=REFINE_RATE)
    least, best = torch.inf, scales
    with torch.enable_grad():
        for _ in range(REFINE_STEPS):
            tried = allowed(exponents.exp())
            token_steps, row_steps = (seen.abs() / tried).amax(1), (sizes * tried).amax(1)
            noise = (token_steps.square().sum() * (tried.square() * w_energy).sum()
                     + row_steps.square().sum() * (x_energy / tried.square()).sum())
            if noise.item() < least:
                least, best = noise.item(), tried.detach()
            optimizer.zero_grad()
            noise.log().backward()
            optimizer.step()
    return best if w8a8_error(unseen, weights, best) < w8a8_error(unseen, weights, scales) else scales
