"""VPTQ linears of a layer's experts, of which a step needs a few that only the device knows.

The layouts of all experts lie stacked. Those that a step has chosen are copied side by side into
slots (`take`), each of which is then a linear like any other: a captured step copies other experts
when its tokens choose others, and no kernel has to look up where its codebook lies. The copy reads
and writes the chosen weights once more, which is less than it costs to launch their products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.vptq.layout import Layout
from flyweight.kernels.vptq.linear import VptqLinear
from flyweight.kernels.vptq.parts import Parts

ALIGNED = 16  # bytes at which kernels read


def stack(linears: Sequence[FusedLinear]) -> Parts | str:
    """One layout of all, whose tensors have the experts as their first axis, or why there is none.
    The linears' own become views of it.
    """
    found = [linear for linear in linears if isinstance(linear, VptqLinear)]
    if len(found) < len(linears):
        return "some expert is not in VPTQ"
    if len({tuple(_outline(part) for part in linear.parts) for linear in found}) > 1:
        return "the experts' codebooks are of several sizes"
    if any(part.sliced for part in found[0].parts):
        return "codebooks that are cut into slices have lists of other lengths in every expert"
    whole = []
    for number, part in enumerate(found[0].parts):
        tensors = {}
        for name, tensor in _tensors(part).items():
            if tensor.nbytes % ALIGNED:
                return f"{name} of one expert has {tensor.nbytes} bytes, no multiple of {ALIGNED}"
            tensors[name] = torch.stack([getattr(one.parts[number], name) for one in found])
        for expert, linear in enumerate(found):
            own = {name: tensor[expert] for name, tensor in tensors.items()}
            parts = list(linear.parts)
            parts[number] = dataclasses.replace(parts[number], **own)
            linear.parts = tuple(parts)
        whole.append(dataclasses.replace(part, **tensors))
    return tuple(whole)


def take(stacked: Parts, experts: Tensor, like: VptqLinear) -> list[VptqLinear]:
    """A linear for each of `experts`, int64 on the device; `like` is one of those that were
    stacked.
    """
    copies = []
    for part in stacked:
        tensors = _tensors(part)
        copies.append({name: one.index_select(0, experts) for name, one in tensors.items()})
    return [
        VptqLinear(
            tuple(
                dataclasses.replace(part, **{name: one[slot] for name, one in copy.items()})
                for part, copy in zip(like.parts, copies, strict=True)
            ),
            ops=like.ops,
        )
        for slot in range(len(experts))
    ]


def _tensors(part: Layout) -> dict[str, Tensor]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _outline(part: Layout) -> tuple[object, ...]:
    """What has to be alike: everything but the numbers in tensors."""
    values = [getattr(part, field.name) for field in dataclasses.fields(part)]
    return tuple(
        (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for value in values
    )
