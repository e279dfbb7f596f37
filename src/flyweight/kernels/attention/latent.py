"""Decode steps of latent attention over its compressed cache: host side of cuda/latent.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.gpu import KB
from flyweight.kernels import jit
from flyweight.kernels.attention.decode import Rows
from flyweight.kernels.linear.fused import Norm

SHORTEST = 32  # tokens worth a CTA of their own: one tile
MOST_SPLITS = 64  # that release merges
TOGETHER = 16  # heads of a CTA of attend
STEP_ROWS = 8  # rows of a CTA of absorb and release
RESIDENT = 2  # CTAs of attend on an SM
TILE = 32  # tokens of attend in shared memory, twice
PADDING = 8  # numbers that keep rows there in different banks


@dataclass(frozen=True)
class LatentShape:
    """What the kernels are compiled for."""

    heads: int
    plain: int
    rank: int
    rope: int
    value: int
    page: int

    @property
    def groups(self) -> int:
        """CTAs that share out the heads."""
        return -(-self.heads // TOGETHER)

    @property
    def width(self) -> int:
        """Of a row of the cache."""
        return self.rank + self.rope

    @property
    def shared(self) -> int:
        """Bytes that attend takes: queries, two tiles, scores."""
        return 2 * (TOGETHER + 2 * TILE) * (self.width + PADDING) + 4 * TOGETHER * (TILE + PADDING)

    @property
    def state(self) -> int:
        """Floats that a run leaves: sums, maxima and sums of weights."""
        return TOGETHER * (self.rank + 2)

    def defines(self, dtype: torch.dtype) -> dict[str, int]:
        return {
            "FP16": int(dtype == torch.float16),
            "HEADS": self.heads,
            "PLAIN": self.plain,
            "RANK": self.rank,
            "ROPE": self.rope,
            "VALUE": self.value,
            "PAGE": self.page,
            "SHORTEST": SHORTEST,
        }

    def unsupported_reason(self, device: gpu.Gpu) -> str | None:
        """None, or why the kernels cannot take such heads there."""
        for name, size, multiple in (
            ("kv_lora_rank", self.rank, 64),
            ("qk_nope_head_dim", self.plain, 32),
            ("qk_rope_head_dim", self.rope, 32),
            ("v_head_dim", self.value, 32),
        ):
            if size % multiple:
                return f"latent attention: {name} {size} is no multiple of {multiple}"
        if self.shared > device.shared_most:
            return f"latent attention takes {self.shared} bytes of shared memory"
        return None


def choose_splits(rows: int, groups: int, processors: int) -> int:
    """As many CTAs as the GPU holds at once. Short contexts leave some idle."""
    return max(1, min(MOST_SPLITS, RESIDENT * processors // (rows * groups)))


@dataclass(frozen=True, eq=False)
class Workspace:
    """What lies between the kernels, shared by all layers."""

    inside: Tensor  # [rows, heads, width]: queries in the space of cached rows
    states: Tensor  # float32: of every run
    splits: int

    @classmethod
    def make(
        cls,
        shape: LatentShape,
        rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        splits: int | None = None,
    ) -> Workspace:
        splits = splits or choose_splits(rows, shape.groups, gpu.of(device).processors)
        inside = torch.zeros(rows, shape.heads, shape.width, dtype=dtype, device=device)
        states = torch.zeros(rows * shape.groups * splits * shape.state, device=device)
        return cls(inside, states, splits)


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """What attention of one layer is, whatever its sequences are."""

    shape: LatentShape
    scale: float
    norm: Norm  # of what is cached
    keys: Tensor  # [heads, plain, rank]
    values: Tensor  # [heads, value, rank]


def latent_attention(
    queries: Tensor,
    latents: Tensor,
    out: Tensor,
    cache: KVStorage,
    rows: Rows,
    *,
    layer: LatentLayer,
    workspace: Workspace,
) -> Tensor:
    """queries [rows, heads · (plain + rope)] and latents [rows, rank + rope], as they come out of
    their linears (parts of longer rows, maybe) → out [rows, heads · value]; writes the rows of the
    new tokens.
    """
    shape = layer.shape
    count = len(queries)
    device = gpu.of(queries.device)
    kernels = jit.load("latent.cu", defines=shape.defines(queries.dtype))
    blocks = -(-count // STEP_ROWS)
    width = rows.tables.shape[1]
    # The linears around have half of an SM each and want every SM alike: see route.cu.
    filled = device.processors if blocks == 1 else 1
    reserved = device.shared_least + 2 * KB if blocks == 1 else 0
    kernels.kernel("absorb").launch(
        (max(shape.heads * (shape.rank // 64) + 1 + shape.groups, filled), blocks),
        256,
        (
            queries,
            latents,
            layer.norm.weight,
            layer.keys,
            rows.rope,
            rows.lengths,
            rows.tables,
            cache.keys,
            workspace.inside,
            float(layer.norm.epsilon),
            queries.stride(0),
            latents.stride(0),
            width,
            count,
        ),
        shared=reserved,
        pdl=True,
    )
    splits = workspace.splits
    log2_e = 1.4426950408889634  # scores are in base 2
    args = (workspace.inside, cache.keys, rows.lengths, rows.tables, workspace.states)
    kernels.kernel("attend").launch(
        max(count * shape.groups * splits, device.processors),
        128,
        (*args, float(layer.scale * log2_e), width, count, splits),
        shared=shape.shared,
        pdl=True,
    )
    kernels.kernel("release").launch(
        (max(shape.heads * (shape.value // 32), filled), blocks),
        256,
        (workspace.states, layer.values, rows.lengths, out, count, splits),
        shared=reserved,
        pdl=True,
    )
    return out
