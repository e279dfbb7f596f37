"""The outputs of a weight in another order."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flyweight.tensors.base import Plain, QuantTensor
from flyweight.tensors.blocks import IntBlock
from flyweight.tensors.float4 import Float4
from flyweight.tensors.float8 import Float8
from flyweight.tensors.integer import Int8Channel, IntGroup, Sparse24
from flyweight.tensors.trellis import Trellis
from flyweight.tensors.vector import VectorQuant
from flyweight.values import has_values, known


def whole_blocks(order: Tensor, size: int | None) -> Tensor | None:
    """Which block comes at each place where blocks of `size` rows move as they are; else None."""
    if size is None or len(order) % size or not has_values(order):
        return None
    blocks = order.view(-1, size)
    kept = blocks[:, :1] + torch.arange(size, device=order.device)
    whole = bool(((blocks[:, :1] % size == 0) & (blocks == kept)).all())
    return blocks[:, 0] // size if whole else None


def _stays(order: Tensor, block: int) -> bool:
    """Whether every row stays in its block."""
    places = torch.arange(len(order), device=order.device)
    return known((order // block == places // block).all(), otherwise=True)


def float8_rows(weight: Tensor, order: Tensor) -> Tensor:
    """Torch takes no float8 by an index on every device."""
    return weight.view(torch.uint8)[order].view(weight.dtype)


def reorder_rows(tensor: QuantTensor, order: Tensor) -> QuantTensor:
    """Row i of the result is row order[i]. What several rows share (blocks of scales, vectors of a
    codebook) follows where they move together; else such a weight comes back dequantized.
    """
    if isinstance(tensor, Plain):
        return Plain(tensor.weight[order])
    if isinstance(tensor, IntGroup):
        zeros = None if tensor.zeros is None else tensor.zeros[order]
        return dataclasses.replace(
            tensor, codes=tensor.codes[order], scales=tensor.scales[order], zeros=zeros
        )
    if isinstance(tensor, IntBlock):
        return tensor.map(lambda part: part[order])
    if isinstance(tensor, Int8Channel):
        return dataclasses.replace(tensor, codes=tensor.codes[order], scales=tensor.scales[order])
    if isinstance(tensor, Float8) and tensor.block is None:
        shared = tensor.scales.shape[0] == 1
        scales = tensor.scales if shared else tensor.scales[order]
        return dataclasses.replace(tensor, weight=float8_rows(tensor.weight, order), scales=scales)
    if isinstance(tensor, Float8) and tensor.block is not None and _stays(order, tensor.block):
        return dataclasses.replace(tensor, weight=float8_rows(tensor.weight, order))
    if isinstance(tensor, Float8) and (blocks := whole_blocks(order, tensor.block)) is not None:
        return dataclasses.replace(
            tensor, weight=float8_rows(tensor.weight, order), scales=tensor.scales[blocks]
        )
    if isinstance(tensor, VectorQuant) and tensor.outlier_indices is None:
        vectors = whole_blocks(order, tensor.length)
        if vectors is not None:
            return dataclasses.replace(tensor, indices=tensor.indices[..., vectors, :])
    if isinstance(tensor, Float4):
        return Float4(tensor.codes[order], tensor.exponents[order])
    if isinstance(tensor, Sparse24):
        inner = reorder_rows(tensor.inner, order)
        assert isinstance(inner, IntGroup | Int8Channel)
        return dataclasses.replace(tensor, inner=inner, positions=tensor.positions[order])
    return Plain(tensor.dequantize()[order])


def scale_rows(tensor: QuantTensor, factors: Tensor) -> QuantTensor | None:
    """Row i times factors[i], powers of two that its scales take up without rounding. None where
    rows have no scales of their own.
    """
    by = factors.to(tensor.device)[:, None]
    if isinstance(tensor, Plain):
        return Plain(tensor.weight * by.to(tensor.weight))
    if isinstance(tensor, IntGroup | Int8Channel | Trellis):
        return dataclasses.replace(tensor, scales=tensor.scales * by.to(tensor.scales))
    if isinstance(tensor, IntBlock):
        mins = None if tensor.mins is None else tensor.mins * by.to(tensor.mins)
        return dataclasses.replace(tensor, scales=tensor.scales * by.to(tensor.scales), mins=mins)
    if isinstance(tensor, Float8) and tensor.block is None and tensor.scales.shape[0] > 1:
        return dataclasses.replace(tensor, scales=tensor.scales * by.to(tensor.scales))
    if isinstance(tensor, Sparse24):
        inner = scale_rows(tensor.inner, factors)
        assert isinstance(inner, IntGroup | Int8Channel)
        return dataclasses.replace(tensor, inner=inner)
    return None
