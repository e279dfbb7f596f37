"""Float8 (e4m3) weights: per channel or per tensor; activations per token at run time, or one static scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flyweight.errors import OptionError
from flyweight.quant.statistics import Statistics
from flyweight.tensors import FLOAT8, FLOAT8_MAX, Float8


@dataclass(frozen=True)
class FP8:
    scales: str = "channel"  # or "tensor"
    activation: str = "token"  # dynamic per token, "static" from calibration, or "none"

    def __post_init__(self) -> None:
        if self.scales not in ("channel", "tensor"):
            raise OptionError(f"fp8 scales are 'channel' or 'tensor', not {self.scales!r}")
        if self.activation not in ("token", "static", "none"):
            raise OptionError(f"fp8 activation is 'token', 'static' or 'none', not {self.activation!r}")


def fp8(weight: Tensor, settings: FP8, statistics: Statistics | None = None) -> Float8:
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True) if settings.scales == "channel" else weight.abs().amax().reshape(1, 1)
    scales = (largest / FLOAT8_MAX).clamp(min=1e-12)
    input_scale = None
    if settings.activation == "static":
        if statistics is None:
            raise OptionError("a static fp8 scale needs calibration samples")
        input_scale = (statistics.largest.amax() / FLOAT8_MAX).clamp(min=1e-12).reshape(1)
    values = (weight / scales).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return Float8(values, scales, settings.activation, input_scale=input_scale)


