"""Decode attention over the paged cache, norm, rope and KV write included: host side of
cuda/attention.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels import jit
from flyweight.kernels.linear.delta import AdaptedRow
from flyweight.kernels.linear.fused import PackedInput

RESIDENT = 16  # warps that an SM holds
# tokens worth a CTA of their own, for merging takes microseconds; results that can be merged
SHORTEST = 256
MOST_SPLITS = 64
CHUNK = 8  # rows of a step that may be of one sequence
COLUMNS = 8  # of a product on the matrix units: query heads that a CTA takes
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class HeadShape:
    """What the kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    page: int
    qk_norm: bool
    window: int | None = None
    eight_bits: bool = False  # the cache is one of codes
    soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    sinks: bool = False  # a logit for each head that takes its share of the softmax
    gated: bool = False  # a row of q, k and v has the gates of all results before it

    @property
    def bent(self) -> bool:
        return self.soft_cap is not None or self.sinks

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def items_of_kv_head(self) -> int:
        """CTAs that share out the query heads of a kv head."""
        return math.ceil(self.group / COLUMNS)

    @property
    def items(self) -> int:
        """Work items of a sequence, each of which can be cut into runs of tokens."""
        return self.kv_heads * self.items_of_kv_head

    @property
    def item_heads(self) -> int:
        """Query heads of an item; the last item of a kv head may have fewer, but has room for as
        many.
        """
        return math.ceil(self.group / self.items_of_kv_head)

    @property
    def width(self) -> int:
        """Of a row of q, k and v."""
        gates = self.heads if self.gated else 0
        return (gates + self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def defines(self) -> dict[str, int]:
        several = {"ITEMS": self.items_of_kv_head} if self.items_of_kv_head > 1 else {}
        bends = {"SOFT_CAP": self.soft_cap is not None, "SINKS": self.sinks, "GATED": self.gated}
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "ROTARY": self.rotary,
            "PAGE": self.page,
            "QK_NORM": int(self.qk_norm),
            "WINDOW": self.window or 0,
            **several,
            **{name: 1 for name, holds in bends.items() if holds},
        }

    def unsupported_reason(self) -> str | None:
        """None, or why this kernel cannot take such heads."""
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if self.page % 8:
            return f"a page of {self.page} tokens is not a multiple of 8"
        return None


def rope_pairs(cos: Tensor, sin: Tensor) -> Tensor:
    """Tables [positions, rotary / 2] as (cos, sin) pairs, the way the kernel reads them."""
    return torch.stack([cos.float(), sin.float()], dim=-1).contiguous()


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch for merging splits, shared by all layers; tickets are zero between launches."""

    scratch: Tensor
    tickets: Tensor
    splits: int

    @classmethod
    def make(
        cls, shape: HeadShape, sequences: int, device: torch.device, splits: int | None = None
    ) -> Workspace:
        splits = splits or choose_splits(sequences, shape.items, gpu.of(device).processors)
        states = sequences * shape.items * shape.item_heads * splits * (shape.head_dim + 4)
        tickets = torch.zeros(sequences * shape.items, dtype=torch.int32, device=device)
        return cls(torch.empty(states, device=device), tickets, splits)


def choose_warps(items: int, processors: int) -> int:
    """Of a CTA: so few that all items are resident at once, or else 8, which spare a merge."""
    return 8 if items <= RESIDENT // 8 * processors else 4


def choose_splits(sequences: int, items_of_sequence: int, processors: int) -> int:
    """As many CTAs as the GPU holds at once. Short contexts leave some idle."""
    items = sequences * items_of_sequence
    return max(
        1, min(MOST_SPLITS, RESIDENT // choose_warps(items, processors) * processors // items)
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """What attention reads of the running sequences, and where it works."""

    rope: Tensor  # of `rope_pairs`
    lengths: Tensor  # int32 [sequences]: the new token counted; 0 is padding
    tables: Tensor  # int32 [sequences, pages]
    # int32 [sequences]: how many rows just before are earlier tokens of the same sequence, up to
    # CHUNK − 1; None: every row is a sequence of its own
    before: Tensor | None = None
    # what an adapter adds to q, k and v, of a step of one row (qkv_attention.cu)
    adapted: AdaptedRow | None = None


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Weights of the norms of queries and keys, [head_dim] each."""

    query: Tensor | None = None
    key: Tensor | None = None
    epsilon: float = 1e-6


def eight_bit_defines(cache: KVStorage) -> dict[str, int]:
    """Of kernels that read or write a cache of 8-bit codes (kv8.cuh)."""
    return {} if cache.eight is None else {"KV8": cache.eight.format.number}


def eight_bit_arguments(cache: KVStorage) -> tuple[Tensor | float, ...]:
    if cache.eight is None:
        return ()
    fixed = cache.eight.fixed or (0.0, 0.0)
    return *cache.eight.scales, *fixed


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """What attention of one layer is, whatever its sequences are."""

    shape: HeadShape
    scale: float
    norms: HeadNorms = HeadNorms()
    sinks: Tensor | None = None  # [heads]
    beside: bool = False  # all kernels of the layer leave each other room on an SM

    @property
    def bend_arguments(self) -> tuple[Tensor | float | None, ...]:
        return (float(self.shape.soft_cap or 0), self.sinks) if self.shape.bent else ()


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    cache: KVStorage,
    rows: Rows,
    *,
    layer: AttentionLayer,
    workspace: Workspace,
    to: PackedInput | None = None,
) -> Tensor:
    """qkv [sequences, width] → out [sequences, heads · head_dim];
    writes the new K and V.

    `to`: results are the next linear's x, and written there instead of to `out`.
    """
    shape = layer.shape
    norms = layer.norms
    sequences = qkv.shape[0]
    count = gpu.of(qkv.device).processors
    # results of 8 warps would not fit into shared memory
    small = shape.item_heads * shape.head_dim > 1024
    warps = 4 if small else choose_warps(sequences * shape.items, count)
    defines = shape.defines | {
        "FP16": int(qkv.dtype == torch.float16),
        "WARPS": warps,
        "SHORTEST": SHORTEST,
        **eight_bit_defines(cache),
        **({} if rows.before is None else {"CHUNK": CHUNK}),
        **(to.defines if to else {}),
    }
    kernel = jit.load("attention.cu", defines=defines).kernel("attention")
    target, groups, more = (to.data, to.groups, to.arguments) if to else (out, 0, ())
    args = (
        qkv,
        norms.query,
        norms.key,
        rows.rope,
        rows.lengths,
        rows.tables,
        cache.keys,
        cache.values,
        target,
        workspace.scratch,
        workspace.tickets,
        float(norms.epsilon),
        float(layer.scale),
        rows.tables.shape[1],
        sequences,
        workspace.splits,
        groups,
        *(() if rows.before is None else (rows.before,)),
        *eight_bit_arguments(cache),
        *layer.bend_arguments,
        *more,
    )
    grid = max(sequences * shape.items * workspace.splits, count)
    kernel.launch(grid, 32 * warps, args, pdl=True)
    return out
