"""Embedding of the tokens that begin a decode step, and choice of those that end it: host side of
cuda/token.cu.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flyweight.kernels import jit

THREADS = 256


def _kernel(name: str, rows: Tensor) -> jit.Kernel:
    defines = {"FP16": int(rows.dtype == torch.float16), "WIDTH": rows.shape[1], "THREADS": THREADS}
    return jit.load("token.cu", defines=defines).kernel(name)


def embed(embedding: Tensor, tokens: Tensor, hidden: Tensor) -> None:
    """hidden [rows, width] = embedding[tokens]; widths are multiples of 8, tokens int64."""
    _kernel("embed", hidden).launch(len(tokens), THREADS, (embedding, tokens, hidden), pdl=True)


class GreedyChoice:
    """Greedy decoding on the device: the likeliest token of each row, and lengths that count it (0
    stays 0: padding).
    """

    def __init__(self, rows: int, device: torch.device):
        self.best = torch.zeros(rows, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        parts = math.ceil(logits.shape[1] / (8 * THREADS))
        args = (logits, tokens, lengths, self.best, self.arrived)
        _kernel("choose", logits).launch((parts, len(tokens)), THREADS, args, pdl=True)
