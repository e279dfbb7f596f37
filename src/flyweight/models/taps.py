"""Hidden states on the side: what a drafting head wants to see of a model's steps.

    place i < layers   what layer i gets
    place layers       what the last layer gives, before the final norm

A decoder without taps (`Decoder.taps` is None) writes nothing. With them every step leaves the
wanted states of its tokens side by side in one place, which a captured step can write to as well.
They hold until the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    def __init__(
        self,
        places: Sequence[int],
        width: int,
        *,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`rows`: tokens of the largest step that is captured; longer ones get memory
        of their own.
        """
        self.places = tuple(places)
        self.width = width
        self.fixed = torch.zeros(rows, len(self.places) * width, dtype=dtype, device=device)
        self.states = self.fixed[:0]  # [tokens of the latest step, places · width]

    def begin(self, hidden: Tensor) -> None:
        """A step of these tokens [..., width] follows."""
        count = hidden.shape[0]
        if hidden.dim() == 2 and count <= len(self.fixed):
            self.point(count)
        else:
            self.states = hidden.new_empty(*hidden.shape[:-1], self.fixed.shape[-1])

    def point(self, rows: int) -> None:
        """The latest step was a captured one of so many rows."""
        self.states = self.fixed[:rows]

    def take(self, place: int, hidden: Tensor) -> None:
        """The states at a place, if anybody wants them."""
        for i, wanted in enumerate(self.places):
            if wanted == place:
                self.states[..., i * self.width : (i + 1) * self.width].copy_(hidden)
