"""What a gated DeltaNet layer is to the kernels: its sizes, its small weights, and where its rows
of a step find and leave their states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flyweight.batch import StateShape

NORM_EPSILON = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """A projected token is [q | k | v | z | b | a]: queries and keys of the key heads, values and
    gates of the value heads, and two numbers for each value head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # tokens that the convolution sees

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.keys + self.outputs

    @property
    def projected(self) -> int:
        return self.channels + self.outputs + 2 * self.value_heads

    @property
    def sharing(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def state(self) -> StateShape:
        return StateShape(self.value_heads, self.key_dim, self.value_dim, self.channels, self.width)


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """All that is no linear, in float32."""

    shape: DeltaShape
    conv: Tensor  # [width, channels], the newest token's last
    decay: Tensor  # [value_heads]: −exp(A_log)
    step_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    epsilon: float

    def to(self, device: torch.device) -> DeltaWeights:
        return replace(
            self,
            conv=self.conv.to(device),
            decay=self.decay.to(device),
            step_bias=self.step_bias.to(device),
            norm=self.norm.to(device),
        )
