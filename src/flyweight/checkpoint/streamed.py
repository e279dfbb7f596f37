"""A checkpoint read straight onto a device: packed weights go there as they lie in the file and are
unpacked there.

Only one weight at a time exists outside its final layout, so the host needs no more memory than the
largest tensor (the mapped file is cache that the system may drop), and a GPU does in milliseconds
what unpacking takes seconds for on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint import formats
from flyweight.checkpoint.reader import Checkpoint
from flyweight.tensors import QuantTensor

# Parts that formats unpack, transpose or join. Small and rare ones (order of columns, masks,
# codebooks) follow later.
LARGE = frozenset(
    {"qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_zero_point", "weight"}
)


class Streamed:
    """`Checkpoint` with its large tensors on `device`; everything else is asked of the
    checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device):
        self.checkpoint, self.device = checkpoint, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def tensor(self, name: str) -> Tensor:
        tensor = self.checkpoint.tensor(name)
        return tensor.to(self.device) if name.rpartition(".")[2] in LARGE else tensor

    def linear(self, prefix: str) -> QuantTensor:
        return formats.read_linear(self.checkpoint.format, self, prefix)  # type: ignore[arg-type]
