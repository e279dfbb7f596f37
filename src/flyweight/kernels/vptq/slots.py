"""VPTQ linears of a layer's experts, of which a step needs a few that only the device knows.

The layouts of all experts lie stacked. Those that a step has chosen are copied side by side into
slots (`take`), each of which is then a linear like any other: a captured step copies other experts
when its tokens choose others, and no kernel has to look up where its codebook lies. The copy reads
and writes the chosen weights once more, which is less than it costs to launch their products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels.linear.fused import FusedLinear, Segments
from flyweight.kernels.vptq.layout import Layout
from flyweight.kernels.vptq.linear import VptqLinear
from flyweight.kernels.vptq.parts import Parts

ALIGNED = 16  # bytes at which kernels read
WORDS = ALIGNED // 4


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """The same linear of all experts."""

    segments: tuple[Parts, ...]  # tensors have the experts as their first axis
    like: FusedLinear  # one expert's

    @classmethod
    def of(cls, linears: Sequence[FusedLinear]) -> Stacked | str:
        """Or why there is none. The linears' own weights become views of it."""
        segments = []
        for members in zip(*(linear.segments for linear in linears), strict=False):
            found = stack(members)
            if isinstance(found, str):
                return found
            segments.append(found)
        if any(len(linear.segments) != len(segments) for linear in linears):
            return "the experts have other numbers of parts"
        return cls(tuple(segments), linears[0])

    def take(self, experts: Tensor) -> list[FusedLinear]:
        """A linear for each of `experts`, int64 on the device."""
        taken: list[list[VptqLinear]] = []
        for stacked, like in zip(self.segments, self.like.segments, strict=True):
            assert isinstance(like, VptqLinear)
            taken.append(take(stacked, experts, like))
        if len(taken) == 1:
            return list(taken[0])
        return [Segments(parts) for parts in zip(*taken, strict=True)]


def stack(linears: Sequence[FusedLinear]) -> Parts | str:
    """One layout of all, whose tensors have the experts as their first axis, or why there is none.
    The linears' own become views of it.
    """
    found = [linear for linear in linears if isinstance(linear, VptqLinear)]
    if len(found) < len(linears):
        return "some expert is not in VPTQ"
    _pad_lists(found)
    if len({tuple(_outline(part) for part in linear.parts) for linear in found}) > 1:
        return "the experts' codebooks are of several sizes"
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
            parts[number] = _with(parts[number], own)
            linear.parts = tuple(parts)
        whole.append(_with(part, tensors))
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
                _with(part, {name: one[slot] for name, one in copy.items()})
                for part, copy in zip(like.parts, copies, strict=True)
            ),
            ops=like.ops,
        )
        for slot in range(len(experts))
    ]


def _pad_lists(linears: Sequence[VptqLinear]) -> None:
    """Codebooks in slices have lists of items, of other lengths in every expert. `offsets` say
    where each ends, so that nobody reads what is appended to either.
    """
    pad = torch.nn.functional.pad
    for number in range(min(len(linear.parts) for linear in linears)):
        parts = [linear.parts[number] for linear in linears]
        longest = max(len(part.stream) for part in parts)
        for linear, part in zip(linears, parts, strict=True):
            if part.offsets is None:
                continue
            stream = pad(part.stream, (0, 0, 0, longest - len(part.stream)))
            offsets = pad(part.offsets, (0, -len(part.offsets) % WORDS))
            own = list(linear.parts)
            own[number] = dataclasses.replace(part, stream=stream, offsets=offsets)
            linear.parts = tuple(own)


def _tensors(part: Layout) -> dict[str, Tensor]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _with(part: Layout, tensors: dict[str, Any]) -> Layout:
    return dataclasses.replace(part, **tensors)


def _outline(part: Layout) -> tuple[object, ...]:
    """What has to be alike: everything but the numbers in tensors."""
    values = [getattr(part, field.name) for field in dataclasses.fields(part)]
    return tuple(
        (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for value in values
    )
