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

MOST_CHOICES = 32  # of a token: cuda/route.cu
STACKED = ("weights", "records", "channel_scale", "bias")


def stack(
    linears: Sequence[TiledLinear], shared: FusedLinear | None = None, parts: int = 0
) -> TiledWeight:
    """One weight of all; the linears' own become views of it, each copy being freed as the next is
    made. `shared` lies behind them, as large as `parts` of them.
    """
    first = linears[0].weight
    behind = [shared] if parts and isinstance(shared, TiledLinear) else []
    stacked = {}
    for name in STACKED:
        if (part := getattr(first, name)) is None:
            continue
        count = len(linears)
        stacked[name] = part.new_empty(count + parts, *part.shape)
        del part
        places = [*stacked[name][:count], *([stacked[name][count:]] if behind else [])]
        for linear, place in zip([*linears, *behind], places, strict=True):
            own = getattr(linear.weight, name)
            view = place.view(own.shape)
            view.copy_(own)
            del own
            linear.weight = dataclasses.replace(linear.weight, **{name: view})
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


def joined_parts(
    shared: Sequence[FusedLinear],
    members: Sequence[Sequence[FusedLinear]],
    chosen: int,
    device: Gpu,
) -> int:
    """As how many experts the linears of the shared one (gate/up, down) count, stacked behind those
    of the others; 0: they cannot lie there. Where kernels overlap of themselves a larger shared
    expert hides the route, so it stays apart.
    """
    if any(
        unsupported_reason([*part, one], device) for one, part in zip(shared, members, strict=True)
    ):
        return 0
    weights = [one.weight for one in (*shared, *(part[0] for part in members))]  # type: ignore[attr-defined]
    gate_up, down, own_gate_up, own_down = weights
    parts: int = down.in_features // own_down.in_features
    fits = (
        gate_up.interleaved == own_gate_up.interleaved
        and gate_up.in_features == own_gate_up.in_features
        and gate_up.out_features == parts * own_gate_up.out_features
        and down.out_features == own_down.out_features
        and down.in_features == parts * own_down.in_features
    )
    if not fits or parts == 1:
        return int(fits)
    cut = (
        down.channel_scale is None
        and down.bias is None
        and own_down.in_features % max(64, own_down.group) == 0
        and chosen + parts <= MOST_CHOICES
    )
    return parts if cut and not device.has_dependent_launch else 0
