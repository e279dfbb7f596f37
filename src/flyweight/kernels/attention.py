"""Decode attention over the paged cache, norm, rope and KV write included: host side of cuda/attention.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels import jit, vptq_rows
from flyweight.kernels.gemm import Packed
from flyweight.kernels.gemv import processors

RESIDENT = 16  # warps that an SM holds
SHORTEST, MOST_SPLITS = 256, 64  # tokens worth a CTA of their own, for merging takes microseconds; results that can be merged


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

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def supported(self) -> str | None:
        """None, or why this kernel cannot take such heads."""
        if self.head_dim not in (64, 128, 256):
            return f"head_dim {self.head_dim} is not 64, 128 or 256"
        if self.group > 8:
            return f"{self.group} query heads share a kv head; at most 8 fit into registers"
        if self.page % 8:
            return f"a page of {self.page} tokens is not a multiple of 8"
        return None


def rope_pairs(cos: Tensor, sin: Tensor) -> Tensor:
    """Tables [positions, rotary / 2] as (cos, sin) pairs, the way the kernel reads them."""
    return torch.stack([cos.float(), sin.float()], dim=-1).contiguous()


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch for the merging of splits, shared by all layers; tickets are zero between launches."""

    scratch: Tensor
    tickets: Tensor

    @classmethod
    def make(cls, shape: HeadShape, sequences: int, splits: int, device: torch.device | str) -> Workspace:
        states = sequences * shape.heads * splits * (shape.head_dim + 4)
        return cls(torch.empty(states, device=device), torch.zeros(sequences * shape.kv_heads, dtype=torch.int32, device=device))


def choose_warps(items: int, processors: int) -> int:
    """Of a CTA: so few that all items are resident at once, or else 8, which spare a merge."""
    return 8 if items <= RESIDENT // 8 * processors else 4


def choose_splits(sequences: int, kv_heads: int, processors: int) -> int:
    """As many CTAs as the GPU holds at once. Short contexts leave some idle."""
    items = sequences * kv_heads
    return max(1, min(MOST_SPLITS, RESIDENT // choose_warps(items, processors) * processors // items))


def decode_attention(qkv: Tensor, out: Tensor, cache: KVStorage, *, shape: HeadShape, norms: tuple[Tensor, Tensor] | None,
                     rope: Tensor, lengths: Tensor, tables: Tensor, workspace: Workspace, splits: int, epsilon: float,
                     scale: float, to: Packed | vptq_rows.Packed | None = None, pdl: bool = True) -> Tensor:
    """qkv [sequences, (heads + 2 · kv_heads) · head_dim] → out [sequences, heads · head_dim]; writes the new K and V.

    lengths int32 [sequences] count the new token; tables int32 [sequences, pages]. A sequence of length 0 is padding.
    `to`: results are the next linear's x, and written there instead of to `out`.
    """
    sequences, count = qkv.shape[0], processors(qkv.device.index or 0)
    small = shape.group * shape.head_dim > 1024  # results of 8 warps would not fit into shared memory
    warps = 4 if small else choose_warps(sequences * shape.kv_heads, count)
    defines = {
        "FP16": int(qkv.dtype == torch.float16), "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim,
        "ROTARY": shape.rotary, "PAGE": shape.page, "QK_NORM": int(shape.qk_norm), "WINDOW": shape.window or 0, "WARPS": warps,
        "SHORTEST": SHORTEST, **(to.defines if to else {}),
    }
    kernel = jit.load("attention.cu", defines=defines).kernel("attention")
    query_norm, key_norm = norms or (None, None)
    target, groups = (to.data, to.groups) if to else (out, 0)
    vectors = (to.parts[0].affine, to.sums) if isinstance(to, vptq_rows.Packed) else ()
    args = (qkv, query_norm, key_norm, rope, lengths, tables, cache.keys, cache.values, target, workspace.scratch,
            workspace.tickets, float(epsilon), float(scale), tables.shape[1], sequences, splits, groups, *vectors)
    kernel.launch(max(sequences * shape.kv_heads * splits, count), 32 * warps, args, pdl=pdl)
    return out
