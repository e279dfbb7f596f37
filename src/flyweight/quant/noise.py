"""The noise that rounding is expected to make, as a function of the scales [in] that the weights'
columns get.

A rounding error is uniform over its step, hence independent of everything else: the outputs'
expected squared error is, but for a factor, the sum of squared steps times the energy that meets
them. That takes no product of matrices and has a gradient, so that every channel's scale can be
moved by itself, where AWQ chooses one exponent for all.

    Σ_(row, group) step² · Σ_(j in group) |x_j|² / s_j²,  step = range of the group's w_j · s_j
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flyweight.kernels.native import rounding

Noise = Callable[[Tensor], Tensor]  # scales [in] → expected squared error
Allowed = Callable[[Tensor], Tensor]  # scales → the nearest ones that the layer before can take
STEPS = 60
RATE = 0.05


def largest(sizes: Tensor, scales: Tensor) -> Tensor:
    """max over k of sizes[..., k] · scales[..., k], for scales [k] or [groups, k]. The gradient is
    that of the largest alone, where `amax` would make one of every number.
    """
    if rounding.takes(sizes):
        chosen, at = rounding.largest(sizes, scales.detach())
    else:
        at = (sizes * scales.detach()).argmax(-1)
        chosen = sizes.gather(-1, at[..., None])[..., 0]
        if scales.ndim == 2:
            at = at + torch.arange(len(scales), device=at.device) * scales.shape[1]
    return chosen * scales.flatten().index_select(0, at.flatten()).view_as(chosen)


def weight_noise(
    weight: Tensor, energy: Tensor, *, group_size: int, symmetric: bool = True
) -> Noise:
    """Of rounding `weight` [out, in] in groups of columns, where the inputs' squares sum to
    `energy` [in].
    """
    sizes = (weight.float().abs() if symmetric else weight.float()).unflatten(1, (-1, group_size))

    def noise(scales: Tensor) -> Tensor:
        shaped = scales.unflatten(0, (-1, group_size))
        ranges = largest(sizes, shaped)  # [out, groups]
        if not symmetric:
            ranges = ranges.clamp(min=0) + largest(-sizes, shaped).clamp(min=0)
        return (
            ranges.square().sum(0)
            * (energy / scales.square()).unflatten(0, (-1, group_size)).sum(-1)
        ).sum()

    return noise


class Least:
    """The candidate with the least error so far; of equal ones the first.

    The device chooses. A host that asked it for the error of each of thousands of candidates would
    wait for it as often, and for every other process of that device too.
    """

    def __init__(self, error: Tensor, *candidate: Tensor) -> None:
        self.error = error
        self.candidate = candidate

    def offer(self, error: Tensor, *candidate: Tensor) -> None:
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.candidate = tuple(
            torch.where(better, new, old)
            for new, old in zip(candidate, self.candidate, strict=True)
        )


def quietest(noise: Noise, scales: Tensor, allowed: Allowed, *, steps: int = STEPS) -> Tensor:
    """Scales near `scales` with the least noise that so many steps find."""
    exponents = allowed(scales).log().requires_grad_()
    optimizer = Adam(exponents, RATE)
    least = Least(scales.new_tensor(torch.inf), allowed(scales))
    with torch.enable_grad():
        for _ in range(steps):
            tried = allowed(exponents.exp())
            value = noise(tried)
            least.offer(value.detach(), tried.detach())
            (gradient,) = torch.autograd.grad(value.log(), exponents)
            optimizer.step(gradient)
    return least.candidate[0]


class Adam:
    """As torch.optim's, which is not asked: its first use imports two seconds of modules."""

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameter: Tensor, rate: float) -> None:
        self.parameter = parameter
        self.rate = rate
        self.mean = torch.zeros_like(parameter)
        self.square = torch.zeros_like(parameter)
        self.steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        self.steps += 1
        first, second = self.BETAS
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = self.square.sqrt().div_((1 - second**self.steps) ** 0.5).add_(self.EPSILON)
        self.parameter.addcdiv_(self.mean, size, value=-self.rate / (1 - first**self.steps))
