"""Codebooks of VPTQ in bytes, rounded as they are loaded (`--vptq-books`).

One row of VPTQ waits for shared memory, which serves entries of bytes twice as fast as those of 16
bits (kernels/cuda/vptq_bytes.cu). So on a GPU, whose kernels alone gain by it, bytes are the rule
for codebooks of the shape that those take; experts have kernels of their own and stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.kernels.vptq.layout import takes_byte_books
from flyweight.models.layers import Weights
from flyweight.tensors import QuantTensor, VectorQuant

IN_BYTES, AS_STORED = "int8", "stored"
EXPERTS = ".experts."


def narrow_books(weights: Weights, books: str | None, device: torch.device) -> Weights:
    """`weights`, with codebooks as `books` names them (None: in bytes on a GPU)."""
    if books not in (None, IN_BYTES, AS_STORED):
        raise OptionError(unknown("--vptq-books", str(books), [IN_BYTES, AS_STORED]))
    wanted = books or (IN_BYTES if device.type == "cuda" else AS_STORED)
    return weights if wanted == AS_STORED else NarrowBooks(weights, device, asked=books is not None)


class NarrowBooks:
    """Weights as they are, but for codebooks that a kernel reads in bytes."""

    def __init__(self, weights: Weights, device: torch.device, *, asked: bool):
        self.weights = weights
        self.asked = asked
        self.count = 0
        self.device = device  # where every item is looked at: on a host it would take minutes
        self.config: dict[str, Any] = weights.config

    @property
    def folder(self) -> Any:
        return getattr(self.weights, "folder", None)

    @property
    def fingerprint(self) -> str | None:
        """Of the files and of these books; None of weights that are no files."""
        inner = getattr(self.weights, "fingerprint", None)
        return None if inner is None else f"{inner}\ncodebooks in bytes"

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(name)

    def linear(self, prefix: str) -> QuantTensor:
        found = self.weights.linear(prefix)
        if not isinstance(found, VectorQuant) or EXPERTS in prefix or not takes_byte_books(found):
            return found
        self.count += 1
        return found.to(self.device).in_bytes()

    def check_used(self) -> None:
        self.weights.check_used()
        if self.asked and not self.count:
            raise OptionError(
                f"--vptq-books {IN_BYTES} is for VPTQ weights, vectors of 8 with up to 8,192 + 256 "
                "entries and no outliers, and this model has none: leave it out"
            )
