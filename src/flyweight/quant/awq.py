"""AWQ: scale up the input channels that matter before rounding, so that their share of the rounding
error falls.

s = mean|x|^r / mean|w|^(1−r), with r searched for the least error of the output; s is folded into
the layer before, and the float function stays the same. The best s is refined channel by channel
(noise.py) where that lowers the error. Then the range of every group is clipped where that lowers
the output error.

The output error of a linear is E·H·Eᵀ with H the second moments of its input, so no sample has to
be run through it; where a caller gives `judge` (the error of the whole attention or MLP output)
that decides instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyweight.quant.grid import (
    Grid,
    Integers,
    make_grid,
    rounding_error,
    smallest_share,
    stored,
)
from flyweight.quant.noise import Allowed, Least, quietest, weight_noise
from flyweight.quant.statistics import Statistics, quadratic
from flyweight.tensors import IntGroup

TRIED = 3  # clipped ranges of the least expected error whose true error is measured
RATIOS = tuple(i / 20 for i in range(20))
Judge = Callable[
    [Sequence[Tensor]], Tensor
]  # rounded weights of the siblings, in the original scale → output error


def awq_scales(
    loudness: Tensor,
    weights: Sequence[Tensor],
    ratio: float,
    group_size: int,
    *,
    use_weights: bool = True,
) -> Tensor:
    """Scales [in] for one ratio from how loud the inputs [in] are, normalized by √(largest ·
    smallest).
    """
    size = weights[0].shape[1] if group_size == -1 else group_size
    stacked = torch.cat([weight.float().abs() for weight in weights])
    pieces = stacked.unflatten(1, (-1, size))
    shares = (pieces / pieces.amax(-1, keepdim=True).clamp(min=1e-6)).flatten(1).mean(0)
    scales = loudness.clamp(min=1e-8).pow(ratio)
    if use_weights:
        scales = scales / (shares.pow(1 - ratio) + 1e-4)
    scales = scales.clamp(min=1e-4)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(torch.isfinite(scales), scales, torch.ones_like(scales)).clamp(
        min=1e-4, max=1e4
    )


def round_weight(weight: Tensor, settings: Integers, importance: Tensor | None = None) -> Tensor:
    grid = make_grid(weight, settings, importance)
    return grid.values(grid.codes(weight))


def output_error(
    statistics: Statistics,
    weights: Sequence[Tensor],
    settings: Integers,
    *,
    judge: Judge | None = None,
    compensated: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Scales → the output error of the weights that are scaled and then rounded.

    `compensated`: GPTQ follows and makes up for what errors have in common, so each column's own,
    weighted by its mean square input, is what counts.
    """
    weights = [weight.float() for weight in weights]
    hessian = statistics.hessian
    settings = dataclasses.replace(
        settings, ranges="minmax"
    )  # a range search inside another search would cost minutes

    def error(scales: Tensor) -> Tensor:
        rounded = [round_weight(weight * scales, settings) / scales for weight in weights]
        if judge is not None and not compensated:
            return judge(rounded)
        differences = torch.cat(rounded) - torch.cat(weights)
        if compensated:
            return (differences.square() * statistics.importance).sum(dtype=torch.float64)
        return ((differences @ hessian) * differences).sum(dtype=torch.float64)

    return error


def search_scales(
    statistics: Statistics,
    weights: Sequence[Tensor],
    settings: Integers,
    *,
    judge: Judge | None = None,
    allowed: Allowed = lambda scales: scales,
    compensated: bool = False,
    ratios: Sequence[float] = RATIOS,
) -> tuple[float, Tensor]:
    """(ratio, scales) with the least output error; leaving the weights as they are is always a
    candidate.

    `allowed` maps scales to the nearest ones that the layer before can take.
    """
    size = settings.group_columns(weights[0].shape[1])
    loudness = statistics.mean_absolute
    if compensated:
        loudness = statistics.importance.sqrt()
    error = output_error(statistics, weights, settings, judge=judge, compensated=compensated)
    ones = torch.ones(statistics.columns, device=weights[0].device)
    least = Least(error(ones), ones.new_zeros((), dtype=torch.float64), ones)
    for number, ratio in enumerate(ratios):
        for use_weights in (
            (True, False) if number % 2 else (True,)
        ):  # without the weights is rarely best: half as many tries
            scales = allowed(awq_scales(loudness, weights, ratio, size, use_weights=use_weights))
            least.offer(error(scales), torch.full_like(least.candidate[0], ratio), scales)
    if not compensated:
        noise = weight_noise(
            torch.cat(list(weights)),
            statistics.importance,
            group_size=size,
            symmetric=settings.symmetric,
        )
        refined = quietest(noise, least.candidate[1], allowed)
        least.offer(error(refined), least.candidate[0], refined)
    chosen, scales = least.candidate
    return float(chosen), scales


def clip(weight: Tensor, statistics: Statistics, settings: Integers, *, steps: int = 10) -> Grid:
    """A grid whose ranges are cut where the output error of the row, e·H·eᵀ, gets smaller.

    Groups go one after the other, each with the errors of all others as they are then: what is
    clipped shrinks, and where inputs have a mean, shrinking adds up from group to group while
    rounding cancels out. A group's own error would not see that.

    That error takes products with H for each candidate, so only those are measured whose errors,
    each column's weighted with its mean square input, are least: `TRIED` for each group.
    """
    start = make_grid(weight, settings, statistics.importance)
    weight = weight.float()
    tries = likeliest(weight, start, statistics.importance, steps)
    hessian = statistics.hessian
    error = start.values(start.codes(weight)) - weight  # [rows, in]
    scales = start.scales.clone()
    zeros = start.zeros.clone()
    for group in range(scales.shape[1]):
        columns = slice(group * start.group_size, (group + 1) * start.group_size)
        own = hessian[columns, columns]
        pull = error.new_zeros(1)  # of the other groups
        if scales.shape[1] > 1:
            pull = error @ hessian[:, columns] - error[:, columns] @ own

        def cost(difference: Tensor, own: Tensor = own, pull: Tensor = pull) -> Tensor:
            return quadratic(difference, own) + 2 * (pull * difference).sum(1)

        least = cost(error[:, columns])
        for tried in tries:
            piece = part(tried, group)
            difference = piece.values(piece.codes(weight[:, columns])) - weight[:, columns]
            found = cost(difference)
            better = found < least
            least = torch.where(better, found, least)
            error[:, columns] = torch.where(better[:, None], difference, error[:, columns])
            scales[:, group] = torch.where(better, piece.scales[:, 0], scales[:, group])
            zeros[:, group] = torch.where(better, piece.zeros[:, 0], zeros[:, group])
    return Grid(scales, zeros, settings, start.group_size)


def likeliest(weight: Tensor, start: Grid, importance: Tensor, steps: int) -> list[Grid]:
    """`TRIED` grids of ranges cut by so many shares, of each group those with the least expected
    error.
    """
    size, settings = start.group_size, start.settings
    pieces = weight.unflatten(1, (-1, size))
    weights = importance.unflatten(0, (-1, size))
    shares = torch.linspace(1, smallest_share(settings.bits, 0.55), steps).tolist()[1:]
    candidates = [cut(start, share) for share in shares]
    expected = torch.stack(
        [rounding_error(pieces, one.scales, one.zeros, settings, weights) for one in candidates]
    )
    scales, zeros = (
        torch.stack([getattr(one, name) for one in candidates]) for name in ("scales", "zeros")
    )
    return [
        Grid(scales.gather(0, picked)[0], zeros.gather(0, picked)[0], settings, size)
        for picked in expected.argsort(0)[:TRIED, None]
    ]


def part(grid: Grid, group: int) -> Grid:
    """One group of it."""
    only = slice(group, group + 1)
    return dataclasses.replace(grid, scales=grid.scales[:, only], zeros=grid.zeros[:, only])


def cut(grid: Grid, share: float) -> Grid:
    """The same grid over so much of its range; of zero points both ends move in together."""
    scales = stored(grid.scales * share, grid.settings.scale_dtype)
    zeros = grid.zeros
    if not grid.settings.symmetric:
        low = -grid.zeros * grid.scales * share
        zeros = torch.clamp(torch.round(-low / scales), 0, 2**grid.settings.bits - 1)
    return Grid(scales, zeros, grid.settings, grid.group_size)


def awq_round(
    weight: Tensor, statistics: Statistics, settings: Integers, *, clipped: bool = True
) -> IntGroup:
    """The rounding that follows the scaling: clipped ranges, nearest codes."""
    grid = (
        clip(weight, statistics, settings)
        if clipped
        else make_grid(weight, settings, statistics.importance)
    )
    return grid.tensor(grid.codes(weight.float()))
