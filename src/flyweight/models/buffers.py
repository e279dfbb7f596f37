"""What flows from kernel to kernel in captured decode steps: fixed places that every size of step
uses the first rows of.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    def __init__(self, rows: int, *, dtype: torch.dtype, device: torch.device):
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self._held: dict[tuple[str, int], Tensor] = {}

    def take(self, name: str, width: int, rows: int) -> Tensor:
        """[rows, width], made when first asked for: a step runs once before it is captured."""
        key = (name, width)
        if key not in self._held:
            self._held[key] = torch.zeros(self.rows, width, dtype=self.dtype, device=self.device)
        return self._held[key][:rows]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())
