"""Attention of prompts on Hopper: host side of cuda/prefill_attention.cu.

`Units` is how the work is cut up, made once for a step and used by all its layers: whole prompts
are read from the step's own keys and values, chunks behind a cached prefix from pages; codes of 8
bits are made numbers of first, which takes far less than the attention to them. Scores are
in base 2, since rope scales q (`rope.attention_scales`). What stays with the kernels of
triton.py: sliding windows, rows too few to fill the GPU (which are cut along the cache
there), other head sizes, other GPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.tensor_map import tensor_map
from flyweight.transfer import upload

BOX = 16  # tokens that are copied at once out of a page
BASE_2 = math.log(2)  # the scale of scores that are in base 2
HELD_BYTES = 24 << 20  # keys and values that stay in L2 beside what streams through it


@dataclass(frozen=True)
class Tile:
    """Query rows of 64 · `warpgroups`, `keys` tokens of K and of V in each of `stages`. Others were
    slower.
    """

    keys: int = 128
    warpgroups: int = 2
    stages: int = 2


@dataclass(frozen=True)
class Heads:
    """What a layer's kernels depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tile: Tile = Tile()

    @property
    def rows(self) -> int:
        return 64 * self.tile.warpgroups

    @property
    def tokens(self) -> int:
        """Of a unit: its rows are those of all query heads that share a kv head."""
        return self.rows * self.kv_heads // self.heads

    @property
    def shared(self) -> int:
        """Bytes: two units' queries, the ring of keys and values, barriers, the two units."""
        return (
            4 * self.head_dim * (self.rows + self.tile.stages * self.tile.keys)
            + 32
            + 32 * self.tile.stages
            + 48
        )

    def kernel(self, page: int) -> jit.Kernel:
        return _kernel(self, page)


@functools.cache
def _kernel(heads: Heads, page: int) -> jit.Kernel:
    tile = heads.tile
    defines = {
        "FP16": int(heads.dtype == torch.float16),
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "HEAD_DIM": heads.head_dim,
        "KEYS": tile.keys,
        "WGS": tile.warpgroups,
        "STAGES": tile.stages,
        "PAGE": page,
        "BOX": BOX if page else tile.keys,
    }
    return jit.load("prefill_attention.cu", defines=defines).kernel("prefill_attention")


def takes(heads: Heads, device: torch.device, scale: float) -> bool:
    """Whether there is a kernel for these heads and scores, and it is wanted."""
    if device.type != "cuda" or scale != BASE_2 or heads.dtype == torch.float32:
        return False
    facts = gpu.of(device)
    return (
        facts.has_warpgroups
        and tuned.of(facts).steps.prefill_attention
        and heads.head_dim in (64, 128)
        and heads.heads // heads.kv_heads <= heads.rows
    )


@dataclass(frozen=True)
class Span:
    """New tokens of a sequence."""

    token: int  # the first of them in the step
    new: int
    length: int  # with those in the cache
    base: int  # its first token in the step, or its place in the block tables


@dataclass(frozen=True)
class Units:
    """Parts of prompts, longest first."""

    records: Tensor  # int32 [tiles, 4]: base, token, tokens, position
    section: int  # kv heads that are worked on at the same time
    page: int  # 0: keys and values follow each other, the step's own or those of `slots`
    slots: Tensor | None = None  # int64 [tokens]: where the cache has their codes

    @classmethod
    def cut(
        cls,
        spans: Sequence[Span],
        heads: Heads,
        page: int,
        device: torch.device,
        slots: Tensor | None = None,
    ) -> Units:
        records = [
            (
                span.base,
                span.token + first,
                min(heads.tokens, span.new - first),
                span.length - span.new + first,
            )
            for span in spans
            for first in range(0, span.new, heads.tokens)
        ]
        records.sort(key=lambda record: -(record[2] + record[3]))
        fitting = max(1, HELD_BYTES // (4 * heads.head_dim * sum(span.length for span in spans)))
        section = max(
            n for n in range(1, heads.kv_heads + 1) if heads.kv_heads % n == 0 and n <= fitting
        )
        found = upload(device, numpy.array(records, dtype=numpy.int32))[0]
        return cls(found, section, page, slots)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    units: Units,
    heads: Heads,
    tables: Tensor | None = None,
) -> None:
    """query and out [tokens, heads, head_dim]; keys and values [tokens, kv_heads, head_dim], or the
    cache's [blocks, block_size, kv_heads, head_dim] with its block tables.
    """
    box = (1, BOX if units.page else heads.tile.keys, 64)
    maps = [tensor_map(x.view(-1, *x.shape[-2:]).transpose(0, 1), box) for x in (keys, values)]
    groups = tensor_map(query, (heads.tokens, heads.heads // heads.kv_heads, 64))
    grid = min(gpu.of(query.device).processors, len(units.records) * heads.kv_heads)
    args = (
        groups,
        *maps,
        out,
        units.records,
        tables,
        workspace.current(query.device).counter("prefill units"),
        len(units.records),
        units.section,
    )
    heads.kernel(units.page).launch(grid, heads.rows * 2 + 128, args, shared=heads.shared, pdl=True)
