"""What `--offload N` would mean for a model on this machine, before it is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flyweight.checkpoint.summary import Summary
from flyweight.engine.capacity import Capacity
from flyweight.limit import offload_limit


@dataclass(frozen=True)
class OffloadPlan:
    """`layers` of `of` lie in the host's memory; two of them have a place on the GPU at a time."""

    layers: int
    of: int
    host_bytes: int
    freed_bytes: int  # of the GPU's memory
    bus_gb_s: float
    limit_tok_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(summary: Summary) -> int:
    return summary.layers or 0


def layer_bytes(summary: Summary) -> int:
    """Of one layer, as laid out for the kernels."""
    total = sum(group.memory for group in summary.groups if group.layers)
    return total // max(1, count(summary))


def plan(summary: Summary, machine: Capacity, layers: int, *, bus_gb_s: float) -> OffloadPlan:
    layers = min(layers, count(summary))
    each = layer_bytes(summary)
    moved = layers * each
    # of a mixture of experts a token reads few, but a whole layer comes over the bus
    resident = max(0, machine.read_bytes_per_token - moved)
    limit = offload_limit(
        resident_bytes=resident,
        streamed_bytes=moved,
        copy_gb_s=machine.copy_gb_s,
        bus_gb_s=bus_gb_s,
    )
    freed = max(0, moved - 2 * each)
    return OffloadPlan(layers, count(summary), moved, freed, round(bus_gb_s, 1), round(limit, 1))


def needed(summary: Summary, machine: Capacity, missing: int) -> int:
    """How many layers to move so that `missing` bytes become free."""
    each = max(1, layer_bytes(summary))
    return min(count(summary), math.ceil(missing / each) + 2)
