"""What captured decode steps read and write: rows of running sequences, and what flows from kernel
to kernel, in fixed places that every size of step uses the first rows of.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class StepRows:
    """The running sequences as a step sees them: one row each, or several where guesses are
    checked.
    """

    tokens: Tensor  # int64 [rows]
    lengths: Tensor  # int32 [rows]: the token counted; 0: nobody is here
    tables: Tensor  # int32 [rows, pages]
    # int32 [rows]: how many rows just before are of the same sequence; None: every row has its own
    before: Tensor | None = None
    adapters: Tensor | None = None  # int32 [rows]: their slots, where any are loaded
    states: Tensor | None = None  # int32 [rows]: slots of what layers without keys remember
