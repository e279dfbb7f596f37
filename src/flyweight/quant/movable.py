"""What may move in a quantized weight while a block or a whole model is tuned: its scales or books,
and, where it is asked for, the codes of integers.

A code that moves is a float32 with Adam's two averages (twelve bytes a weight). It is rounded
wherever it is used, and gets the gradient of what it was rounded to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flyweight.tensors import IntGroup, QuantTensor, Trellis, VectorQuant

FIELDS = {  # kind → what may move
    "int": ("scales",),
    "w8a8": ("scales",),
    "trellis": ("scales",),
    "vptq": ("codebook", "residual", "outlier_codebook", "scale", "bias"),
}
START = 0.45  # how far from its place a code starts at most
EDGE = 0.49  # how far it may leave the grid: it still rounds to the last one
BOOKS = ("codebook", "residual", "outlier_codebook", "bias")


class Movable:
    """A tensor that is stored in some dtype, and its float32 move in units of its own size."""

    def __init__(self, stored: Tensor, *, alike: bool = False) -> None:
        """`alike`: entries that share one unit, their root mean square; else each has its own."""
        self.stored = stored
        self.start = stored.float()
        size = self.start.square().mean().sqrt()
        self.unit = size if alike else self.start.abs().clamp(min=1e-3 * float(size) + 1e-30)
        self.move = torch.zeros_like(self.start, requires_grad=True)

    def value(self) -> Tensor:
        return self.start + self.unit * self.move

    def result(self) -> Tensor:
        return self.value().detach().to(self.stored.dtype)


class Through(torch.autograd.Function):
    """Rounding that passes its gradient on."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Part:
    """One quantized weight with what may move in it; indices of vectors lie unpacked, eight bytes
    each.
    """

    def __init__(
        self, tensor: QuantTensor, *, rounding: bool, original: Tensor | None = None
    ) -> None:
        """A code that moves starts where the weight of the `original` lies, as near to it as it
        can without becoming another one.
        """
        self.tensor = tensor
        self.moves = {
            name: Movable(getattr(tensor, name), alike=name in BOOKS)
            for name in FIELDS.get(tensor.kind, ())
            if getattr(tensor, name) is not None
        }
        self.codes: Tensor | None = None  # less their zero points [out, groups, size]
        self.indices = None
        self.moving = rounding and isinstance(tensor, IntGroup)
        if isinstance(tensor, IntGroup):
            codes = tensor.integers().unflatten(1, (tensor.groups, -1))
            if self.moving:
                self.codes = codes.float()
                if original is not None:
                    self.move_towards(original)
                self.codes.requires_grad_()
            else:
                self.codes = codes.to(torch.int8 if tensor.bits < 8 else torch.int16)
        elif isinstance(tensor, Trellis):
            self.codes = tensor.values()
        elif isinstance(tensor, VectorQuant):
            self.indices = tensor.split_indices()

    def zeros(self) -> Tensor | float:
        """[out, groups, 1] or a number for all."""
        assert isinstance(self.tensor, IntGroup)
        if self.tensor.zeros is None:
            return 2.0 ** (self.tensor.bits - 1)
        return self.tensor.zeros.float()[..., None]

    def move_towards(self, original: Tensor) -> None:
        assert isinstance(self.tensor, IntGroup) and self.codes is not None
        scales = self.tensor.scales.float()[..., None]
        wanted = original.float().unflatten(1, (self.tensor.groups, -1)) / scales
        self.codes += (wanted - self.codes).clamp(-START, START)

    @torch.no_grad()
    def stay_inside(self) -> None:
        """A code beyond the edge of its grid would have to come back before it counts again."""
        assert isinstance(self.tensor, IntGroup) and self.codes is not None
        zeros = self.zeros()
        self.codes.clamp_(-zeros - EDGE, 2**self.tensor.bits - 1 - zeros + EDGE)

    def weight(self) -> Tensor:
        values = {name: field.value() for name, field in self.moves.items()}
        if isinstance(self.tensor, IntGroup) and self.tensor.g_idx is None:
            assert self.codes is not None
            codes = Through.apply(self.codes) if self.moving else self.codes
            return (codes * values["scales"][..., None]).flatten(1)
        if isinstance(self.tensor, Trellis):
            assert self.codes is not None
            return self.tensor.scaled(self.codes, values["scales"])
        tensor = dataclasses.replace(self.tensor, **values)
        return (
            tensor.decode(*self.indices)
            if isinstance(tensor, VectorQuant) and self.indices
            else tensor.dequantize()
        )

    @torch.no_grad()
    def result(self) -> QuantTensor:
        made = dataclasses.replace(
            self.tensor, **{name: field.result() for name, field in self.moves.items()}
        )
        if not self.moving:
            return made
        assert isinstance(made, IntGroup) and self.codes is not None
        return IntGroup.from_values(
            (self.codes.round() + self.zeros()).int().flatten(1),
            made.scales,
            made.zeros,
            bits=made.bits,
            group_size=made.group_size,
        )
