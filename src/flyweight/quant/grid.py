"""Integer grids: where the 2^bits levels of each group of columns lie.

Conventions are those of compressed-tensors: symmetric scale = largest / ((2^bits − 1) / 2),
asymmetric ranges always hold zero. Scales are rounded to their stored dtype before any weight is,
so that no solver works with a scale that the file cannot hold. Searched ranges try shrunken ones
(and, symmetric, the mirrored grid −7…8 as a negative scale), then refit the scale to the codes by
least squares.

The least squared error is the right aim only where each column is weighted by its inputs. Without
them it cuts large weights, always towards zero: the outputs of a layer shrink, and the error of a
whole model grows although that of its weights falls. To the fourth power a cut weight counts more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.kernels.native import rounding
from flyweight.tensors import IntGroup

RANGES = {
    "minmax": "the whole range, as compressed-tensors does",
    "fourth": "the range with the least error of the weights to the fourth power",
    "importance": "the range with the least squared error, each column weighted by its mean square "
    "input",
}


@dataclass(frozen=True)
class Integers:
    """What an integer weight looks like. group_size −1 is one group per output channel."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    ranges: str = "minmax"
    mirrored: bool = True  # searched symmetric ranges may use negative scales
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise OptionError(f"bits must be 2 to 8, not {self.bits}")
        if self.group_size != -1 and self.group_size < 1:
            raise OptionError(
                "group_size must be positive, or -1 for one group per channel, not "
                f"{self.group_size}"
            )
        if self.ranges not in RANGES:
            raise OptionError(unknown("ranges", self.ranges, RANGES))

    def group_columns(self, columns: int) -> int:
        return columns if self.group_size == -1 else fit_group_size(self.group_size, [columns])


def fit_group_size(wanted: int, widths: list[int]) -> int:
    """The largest group size not above `wanted` that divides every width: 128 on widths 576 and
    1536 is 64.
    """
    size = wanted
    while size > 1 and any(width % size for width in widths):
        size //= 2
    return size if size >= 8 or wanted < 8 else -1


@dataclass(frozen=True, eq=False)
class Grid:
    scales: Tensor  # float32 [rows, groups], values that the stored dtype holds exactly
    zeros: Tensor  # float32 [rows, groups], whole numbers
    settings: Integers
    group_size: int

    def expand(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point of every weight, [rows, columns]; of whole rows without a copy."""
        if self.scales.shape[1] == 1:
            return self.scales.expand(-1, self.group_size), self.zeros.expand(-1, self.group_size)
        return self.scales.repeat_interleave(self.group_size, 1), self.zeros.repeat_interleave(
            self.group_size, 1
        )

    def codes(self, weight: Tensor) -> Tensor:
        """Nearest codes, float32 [rows, columns]."""
        scales, zeros = self.expand()
        return torch.clamp(torch.round(weight / scales) + zeros, 0, 2**self.settings.bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        scales, zeros = self.expand()
        return (codes - zeros) * scales

    def tensor(self, codes: Tensor) -> IntGroup:
        zeros = None if self.settings.symmetric else self.zeros
        return IntGroup.from_values(
            codes.to(torch.int32),
            self.scales.to(self.settings.scale_dtype),
            zeros,
            bits=self.settings.bits,
            group_size=self.group_size,
        )


def stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as the file will hold them; never zero, so that an all-zero group stays zero instead
    of NaN.
    """
    info = torch.finfo(dtype)
    least = max(info.tiny * info.eps, 1e-30)
    rounded = scales.to(dtype).float()
    return torch.where(rounded.abs() < least, torch.full_like(rounded, least), rounded)


def ranged(low: Tensor, high: Tensor, settings: Integers) -> tuple[Tensor, Tensor]:
    """(scales, zeros) that span low…high (both hold zero)."""
    steps = 2**settings.bits - 1
    if settings.symmetric:
        scales = stored(torch.maximum(high, -low) / (steps / 2), settings.scale_dtype)
        return scales, torch.full_like(scales, 2 ** (settings.bits - 1))
    scales = stored((high - low) / steps, settings.scale_dtype)
    return scales, torch.clamp(torch.round(-low / scales), 0, steps)


def make_grid(weight: Tensor, settings: Integers, importance: Tensor | None = None) -> Grid:
    """Ranges of `weight` [rows, columns] by `settings.ranges`; `importance` [columns] weights the
    columns.
    """
    size = settings.group_columns(weight.shape[1])
    pieces = weight.float().unflatten(1, (-1, size))  # [rows, groups, size]
    low = pieces.amin(-1).clamp(max=0)
    high = pieces.amax(-1).clamp(min=0)
    scales, zeros = ranged(low, high, settings)
    if settings.ranges != "minmax":
        weights = None
        if settings.ranges == "importance" and importance is not None:
            weights = importance.float().unflatten(0, (-1, size))  # [groups, size]
            weights = (
                weights / weights.mean(-1, keepdim=True).clamp(min=1e-30) + 1e-4
            )  # dead columns still count a little
        scales, zeros = search(pieces, (scales, zeros), (low, high), settings, weights)
    return Grid(scales, zeros, settings, size)


def smallest_share(bits: int, least: float) -> float:
    """Of a range that is worth trying: `least` at 4 bits; at 8 hardly anything may clip, and tries
    are better spent near 1.
    """
    return max(least, 1 - 9 / 2**bits)


def search(
    pieces: Tensor,
    start: tuple[Tensor, Tensor],
    span: tuple[Tensor, Tensor],
    settings: Integers,
    weights: Tensor | None,
    steps: int = 24,
) -> tuple[Tensor, Tensor]:
    """Shrink the range step by step and keep, group by group, the one with the least error."""
    best_scales, best_zeros = start
    best = rounding_error(pieces, best_scales, best_zeros, settings, weights)
    largest = 2**settings.bits / (
        2**settings.bits - 1
    )  # beyond 1: the shorter side of a symmetric grid clips nothing
    least = smallest_share(settings.bits, 0.45)
    signs = (1, -1) if settings.symmetric and settings.mirrored else (1,)

    def keep_better(scales: Tensor, zeros: Tensor) -> None:
        nonlocal best, best_scales, best_zeros
        error = rounding_error(pieces, scales, zeros, settings, weights)
        better = error < best
        best = torch.where(better, error, best)
        best_scales = torch.where(better, scales, best_scales)
        best_zeros = torch.where(better, zeros, best_zeros)

    for share in torch.linspace(largest if settings.symmetric else 1.0, least, steps).tolist():
        scales, zeros = ranged(span[0] * share, span[1] * share, settings)
        for sign in signs:
            keep_better(scales * sign, zeros)
    for _ in range(2):
        keep_better(refit_scales(pieces, best_scales, best_zeros, settings, weights), best_zeros)
    return best_scales, best_zeros


def nearest(pieces: Tensor, scales: Tensor, zeros: Tensor, settings: Integers) -> Tensor:
    """Codes less their zero point, [rows, groups, size]."""
    rounded = torch.div(pieces, scales[..., None]).round_()
    if (
        settings.symmetric
    ):  # the same bounds everywhere, and numbers clamp several times faster than tensors
        middle = 2 ** (settings.bits - 1)
        return rounded.clamp_(-middle, middle - 1)
    return rounded.clamp_(-zeros[..., None], 2**settings.bits - 1 - zeros[..., None])


def rounding_error(
    pieces: Tensor, scales: Tensor, zeros: Tensor, settings: Integers, weights: Tensor | None
) -> Tensor:
    """Of each group [rows, groups]: squared and weighted, or to the fourth power without weights. A
    search calls this seventy times on every weight.
    """
    if rounding.takes(pieces):
        varied = None if settings.symmetric else zeros
        return rounding.rounding_error(pieces, scales, varied, weights, steps=2**settings.bits - 1)
    difference = nearest(pieces, scales, zeros, settings).mul_(scales[..., None]).sub_(pieces)
    difference.square_()
    return difference.mul_(difference if weights is None else weights).sum(-1)


def refit_scales(
    pieces: Tensor, scales: Tensor, zeros: Tensor, settings: Integers, weights: Tensor | None
) -> Tensor:
    """The least-squares scale of the codes that `scales` gives."""
    codes = nearest(pieces, scales, zeros, settings)
    weighted = codes if weights is None else codes * weights
    below = (weighted * codes).sum(-1)
    fitted = (weighted * pieces).sum(-1) / below.clamp(min=1e-30)
    return stored(torch.where(below > 0, fitted, scales), settings.scale_dtype)
