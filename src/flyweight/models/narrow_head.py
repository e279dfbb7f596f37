"""A head in fewer bits than its file has, rounded as it is loaded (`--head int8`).

Every decode step reads the whole head, of a small model as much as a third of all weights, and most
files keep it in 16 bits. Rounded to the nearest with a scale for each group of inputs it needs no
calibration. Where the head is tied to the embedding both share the 8-bit table; four bits are the
head's alone, for too much would be lost of what a model reads.

A folder may ask for it (`SERVED` in its config.json): schemes of 4 bits and fewer do, because their
own rounding moves a model's predictions far more than an 8-bit head does. Its file keeps the head
as it was, for other engines and for `--head stored`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.models.layers import EMBEDDING, Weights
from flyweight.tensors import IntGroup, QuantTensor, merge

HEAD = "lm_head"
TIED = "tie_word_embeddings"
BITS = {"int8": 8, "int4": 4}
AS_STORED = "stored"
SERVED = "served_head"
GROUP_SIZES = (128, 64, 32)
AT_ONCE = 1 << 24  # weights that are rounded together: the copy in 32 bits stays small


def narrow_head(weights: Weights, head: str | None) -> Weights:
    """`weights`, with the head in the bits that `head` names (None: as the folder asks for)."""
    if head is None:
        head = weights.config.get(SERVED)
    if head in (None, AS_STORED):
        return weights
    if head not in BITS:
        raise OptionError(unknown("--head", str(head), [AS_STORED, *BITS]))
    return NarrowHead(weights, BITS[head])


class NarrowHead:
    """Weights as they are, but for the head."""

    def __init__(self, weights: Weights, bits: int):
        self.weights = weights
        self.bits = bits
        self.tied = bool(weights.config.get(TIED))
        self.shared = self.tied and bits == 8  # one table, of the embedding and of the head
        self.config: dict[str, Any] = weights.config | {TIED: self.shared}

    @property
    def folder(self) -> Any:
        return getattr(self.weights, "folder", None)

    @property
    def fingerprint(self) -> str | None:
        """Of the files and of this head; None of weights that are no files."""
        inner = getattr(self.weights, "fingerprint", None)
        return None if inner is None else f"{inner}\nhead of {self.bits} bits"

    def has(self, name: str) -> bool:
        if self.shared and name == f"{HEAD}.weight":  # a second copy, which `linear` has read
            return False
        return self.weights.has(name)

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(name)

    def linear(self, prefix: str) -> QuantTensor:
        if prefix != (EMBEDDING if self.shared else HEAD):
            return self.weights.linear(prefix)
        if self.tied and self.weights.has(f"{HEAD}.weight"):  # some tools write it a second time
            self.tensor(f"{HEAD}.weight")
        stored = self.weights.linear(EMBEDDING if self.tied else HEAD)
        if stored.bits_per_weight < self.bits + 1:  # scales included
            return stored
        return nearest(stored.dequantize(), self.bits)

    def check_used(self) -> None:
        self.weights.check_used()


def nearest(weight: Tensor, bits: int) -> QuantTensor:
    """weight [out, in] in groups: 8 bits around zero, 4 bits over the range of each group."""
    columns = weight.shape[1]
    size = next((size for size in GROUP_SIZES if columns % size == 0), columns)
    parts = weight.split(max(1, AT_ONCE // columns))
    (whole,) = merge([_rounded(part, bits, size) for part in parts])
    return whole


def _rounded(weight: Tensor, bits: int, size: int) -> IntGroup:
    grouped = weight.float().unflatten(-1, (-1, size))
    steps = 2**bits - 1
    if bits == 8:
        scales = (grouped.abs().amax(-1) / (steps / 2)).half()
        zeros = None
        middle: Tensor | float = 2.0 ** (bits - 1)
    else:
        low = grouped.amin(-1).clamp(max=0)
        scales = ((grouped.amax(-1).clamp(min=0) - low) / steps).half()
        middle = torch.round(-low / _divisor(scales)).clamp(0, steps)
        zeros = middle
        middle = middle[..., None]
    codes = torch.round(grouped / _divisor(scales)[..., None]) + middle
    return IntGroup.from_values(
        codes.clamp(0, steps).flatten(-2).int(), scales, zeros, bits=bits, group_size=size
    )


def _divisor(scales: Tensor) -> Tensor:
    """A group of zeros has the scale 0, and the codes of 0."""
    exact = scales.float()
    return torch.where(exact > 0, exact, torch.ones_like(exact))
