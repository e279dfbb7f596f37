"""Float8 (e4m3) weights: per channel or per tensor; activations per token at run time, or one
static scale.

Three bits of mantissa make an error of 2.6 % of a weight whatever its size (int8 per channel: 1 %).
Between one power of two and the next the scale decides which weights come to lie where the steps
are coarse: the best of a few saves 3 to 5 % of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.errors import OptionError
from flyweight.quant.statistics import Statistics
from flyweight.tensors import FLOAT8, FLOAT8_MAX, Float8

SCALES = tuple(
    2 ** (k / 8) for k in (0, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)
)  # tried, times the one that just clips nothing
AT_ONCE = 1 << 24  # weights: the search holds several copies of what it looks at


@dataclass(frozen=True)
class FP8:
    scales: str = "channel"  # or "tensor"
    activation: str = "token"  # dynamic per token, "static" from calibration, or "none"

    def __post_init__(self) -> None:
        if self.scales not in ("channel", "tensor"):
            raise OptionError(f"fp8 scales are 'channel' or 'tensor', not {self.scales!r}")
        if self.activation not in ("token", "static", "none"):
            raise OptionError(
                f"fp8 activation is 'token', 'static' or 'none', not {self.activation!r}"
            )


def fp8(weight: Tensor, settings: FP8, statistics: Statistics | None = None) -> Float8:
    weight = weight.float()
    largest = (
        weight.abs().amax(1, keepdim=True)
        if settings.scales == "channel"
        else weight.abs().amax().reshape(1, 1)
    )
    scales = fit_scales(weight, (largest / FLOAT8_MAX).clamp(min=1e-12))
    input_scale = None
    if settings.activation == "static":
        if statistics is None:
            raise OptionError("a static fp8 scale needs calibration samples")
        input_scale = (statistics.largest.amax() / FLOAT8_MAX).clamp(min=1e-12).reshape(1)
    return Float8(nearest(weight, scales), scales, settings.activation, input_scale=input_scale)


def nearest(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight / scales).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def fit_scales(weight: Tensor, scales: Tensor) -> Tensor:
    """Multiples of `scales` ([out, 1] or [1, 1]) with the least squared error."""
    rows = max(1, AT_ONCE // weight.shape[1])

    def error(tried: Tensor) -> Tensor:
        parts = zip(weight.split(rows), tried.expand(weight.shape[0], 1).split(rows), strict=True)
        differences = ((nearest(part, scale).float() * scale).sub_(part) for part, scale in parts)
        found = torch.cat([difference.square_().sum(1, keepdim=True) for difference in differences])
        return found if len(tried) > 1 else found.sum().reshape(1, 1)

    best = scales
    least = torch.full_like(scales, torch.inf)
    for factor in SCALES:
        found = error(scales * factor)
        best = torch.where(found < least, scales * factor, best)
        least = torch.minimum(found, least)
    return best
