"""LoRA adapters over a model: read, checked against its plan, and stacked by slot for each linear.

The base weights stay as they are, quantized or not. A file may name the projections one by one
(q_proj, gate_proj) or, where a model's own files do, as one (qkv_proj, gate_up_proj).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flyweight.checkpoint.adapter import Adapter, LowRank, read_adapter
from flyweight.checkpoint.formats.fused import FUSED
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.kernels.dispatch import decoder_ops
from flyweight.kernels.linear.delta import Delta
from flyweight.models.plan import Group, LayerPlan, MlpPlan, ModelPlan


class Adapters:
    """`slots` is what a row of a step says for each name."""

    def __init__(self, adapters: Sequence[Adapter], plan: ModelPlan):
        self.adapters = list(adapters)
        self.slots = {one.name: slot for slot, one in enumerate(self.adapters)}
        for one in self.adapters:
            check_places(one, plan)

    @classmethod
    def read(cls, folders: Mapping[str, str | Path], plan: ModelPlan) -> Adapters:
        return cls([read_adapter(name, folder) for name, folder in folders.items()], plan)

    def delta(
        self,
        prefix: str,
        group: Group,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        order: Tensor | None = None,
    ) -> Delta | None:
        """What they add to one group of linears; None: nothing. `order` is that of its outputs,
        where it is not that of the files.
        """
        by_adapter = [dict(parts_of(one, prefix, group)) for one in self.adapters]
        ranks = [low.a.shape[0] for found in by_adapter for low in found.values()]
        if not ranks:
            return None
        rank = -(-max(ranks) // 8) * 8  # whole vectors of 16 bytes
        outputs = sum(group.sizes)
        size = (len(self.adapters), len(group.sizes), rank, group.in_features)
        a = torch.zeros(size, dtype=dtype)
        b = torch.zeros(len(self.adapters), rank, outputs, dtype=dtype)
        for slot, found in enumerate(by_adapter):
            for part, low in found.items():
                begin = sum(group.sizes[:part])
                count = low.a.shape[0]
                a[slot, part, :count] = low.a.to(dtype)
                scaled = (low.b.float() * low.scale).to(dtype)
                b[slot, :count, begin : begin + group.sizes[part]] = scaled.T
        b = b.to(device)
        if order is not None:
            b = b[..., order]
        return Delta(a.to(device), b, group.sizes, decoder_ops(device))


def link(deltas: Sequence[Delta | None]) -> None:
    """Tell each which is launched before it in a step: the order of the list, round and round."""
    there = [delta for delta in deltas if delta is not None]
    for index, delta in enumerate(there):
        delta.before = there[index - 1]


def check_places(adapter: Adapter, plan: ModelPlan) -> None:
    """Every module of an adapter has a linear of its shape, or the error names it."""
    left = set(adapter.modules)
    for layer in plan.layers:
        for group in adapted_groups(layer):
            parts = [part for part, _ in parts_of(adapter, layer.prefix, group)]
            if len(set(parts)) < len(parts):
                raise CheckpointError(
                    f"{adapter.folder}: {layer.prefix}{group.linears[0]} is adapted twice, by its "
                    "own name and as a part of a fused one"
                )
            left -= {layer.prefix + name for name in names_of(group)}
    if left:
        first = min(left)
        experts = " (experts take no adapters)" if ".experts." in first else ""
        raise UnsupportedError(
            f"{adapter.folder}: {first} has no place in this model{experts}: adapters of the "
            "projections of attention and of dense MLPs are supported"
        )


def adapted_groups(layer: LayerPlan) -> tuple[Group, ...]:
    """Not the second projections of latent attention: kv_b is taken into queries and outputs."""
    dense = layer.mlp.groups if isinstance(layer.mlp, MlpPlan) else ()
    return layer.qkv, layer.o, *dense


def names_of(group: Group) -> list[str]:
    """Those that a file may have for the linears of a group."""
    return [*group.linears, *fused_names(group)]


def fused_names(group: Group) -> list[str]:
    """The one name of all linears of a group, such as self_attn.qkv_proj."""
    parents = {name.rpartition(".")[0] for name in group.linears}
    parts = tuple(name.rpartition(".")[2] for name in group.linears)
    return [f"{parent}.{name}" for name, of in FUSED.items() if of == parts for parent in parents]


def parts_of(adapter: Adapter, prefix: str, group: Group) -> Iterator[tuple[int, LowRank]]:
    """(which of the group's linears, what is added to it)."""
    for name in fused_names(group):
        if (whole := adapter.modules.get(prefix + name)) is not None:
            check_shape(adapter, prefix + name, whole, (sum(group.sizes), group.in_features))
            begin = 0
            for part, size in enumerate(group.sizes):
                yield part, LowRank(whole.a, whole.b[begin : begin + size], whole.scale)
                begin += size
    for part, (name, size) in enumerate(zip(group.linears, group.sizes, strict=True)):
        if (low := adapter.modules.get(prefix + name)) is not None:
            check_shape(adapter, prefix + name, low, (size, group.in_features))
            yield part, low


def check_shape(adapter: Adapter, name: str, low: LowRank, shape: tuple[int, int]) -> None:
    found = (low.b.shape[0], low.a.shape[1])
    if found != shape:
        raise CheckpointError(
            f"{adapter.folder}: {name} is made for a weight of {list(found)}, and this model's is "
            f"{list(shape)}: the adapter belongs to another model"
        )
