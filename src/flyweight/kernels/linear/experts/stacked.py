"""The weights of all experts of a layer as one, and which of them can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flyweight.gpu import Gpu
from flyweight.kernels.linear.experts.many import takes_tile
from flyweight.kernels.linear.experts.routing import TILES
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight

STACKED = ("weights", "records", "channel_scale", "bias")


def stack(linears: Sequence[TiledLinear]) -> TiledWeight:
    """One weight of all; the linears' own become views of it, each copy being freed as the next is
    made.
    """
    first = linears[0].weight
    stacked = {}
    for name in STACKED:
        if (part := getattr(first, name)) is None:
            continue
        stacked[name] = part.new_empty(len(linears), *part.shape)
        del part
        for i, linear in enumerate(linears):
            stacked[name][i].copy_(getattr(linear.weight, name))
            linear.weight = dataclasses.replace(linear.weight, **{name: stacked[name][i]})
    return dataclasses.replace(first, **stacked)


def unsupported_reason(linears: Sequence[FusedLinear], device: Gpu) -> str | None:
    """None, or why these experts' linears (all gate/up, or all down) cannot be one."""
    scheme = set()
    for linear in linears:
        if not isinstance(linear, TiledLinear) or linear.weight.order is not None:
            return "some expert's format has no kernel for few rows"
        weight = linear.weight
        scheme.add(
            (
                weight.format,
                weight.group,
                weight.dtype,
                weight.scale_fp16,
                weight.activation,
                weight.symmetric,
                weight.bias is None,
            )
        )
        if weight.out_features % 16 or weight.static:
            return (
                "an expert has a scale of its own for the input, or outputs that are no multiple "
                "of 16"
            )
    if len(scheme) > 1:
        return "the experts of a layer have more than one scheme"
    if any(not takes_tile(weight, tile, device) for tile in TILES):
        return (
            f"{weight.in_features} inputs in groups of {weight.group} do not fit into whole stages"
        )
    return None


def joins(shared: FusedLinear, members: Sequence[FusedLinear], device: Gpu) -> bool:
    """Whether the linear of a shared expert can be stacked behind those of the others."""
    if unsupported_reason([*members, shared], device):
        return False
    shapes = {
        (one.weight.in_features, one.weight.out_features, one.weight.interleaved)
        for one in (shared, members[0])
        if isinstance(one, TiledLinear)
    }
    return len(shapes) == 1
