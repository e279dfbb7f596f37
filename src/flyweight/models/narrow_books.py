"""Codebooks of VPTQ in bytes, rounded as they are loaded (`--vptq-books`).

One row of VPTQ waits for shared memory, which serves entries of bytes twice as fast as those of 16
bits (kernels/cuda/vptq_bytes.cu). Codebooks of the shape that this kernel takes are rounded where
it is asked for; experts have kernels of their own and stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.kernels.vptq.choose_layout import takes_byte_books
from flyweight.models.layers import Weights
from flyweight.tensors import QuantTensor, VectorQuant

IN_BYTES, AS_STORED = "int8", "stored"
EXPERTS = ".experts."


def narrow_books(weights: Weights, books: str | None, device: torch.device) -> Weights:
    """`weights`, with codebooks as `books` names them (None: as stored)."""
    if books not in (None, IN_BYTES, AS_STORED):
        raise OptionError(unknown("--vptq-books", str(books), [IN_BYTES, AS_STORED]))
    return NarrowBooks(weights, device) if books == IN_BYTES else weights


class NarrowBooks:
    """Weights as they are, but for codebooks that a kernel reads in bytes."""

    def __init__(self, weights: Weights, device: torch.device):
        self.weights = weights
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
        if not self.count:
            raise OptionError(
                f"--vptq-books {IN_BYTES} is for VPTQ weights, vectors of 8 with up to 8,192 + 256 "
                "entries and no outliers, and this model has none: leave it out"
            )
