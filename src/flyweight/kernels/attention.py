"""Decode attention over the paged cache, norm, rope and KV write included: host side of cuda/attention.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.engine.batch import KVStorage
from flyweight.kernels import jit

CLUSTER = 8  # splits that merge through distributed shared memory, on Hopper


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
        return None


def rope_pairs(cos: Tensor, sin: Tensor) -> Tensor:
    """Tables [positions, rotary / 2] as (cos, sin) pairs, the way the kernel reads them."""
    return torch.stack([cos.float(), sin.float()], dim=-1).contiguous()


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch for splits beyond one cluster, shared by all layers; tickets are zero between launches."""

    scratch: Tensor
    tickets: Tensor

    @classmethod
    def make(cls, shape: HeadShape, sequences: int, splits: int, device: torch.device | str) -> Workspace:
        states = sequences * shape.heads * max(1, splits // CLUSTER) * (shape.head_dim + 2)
        return cls(torch.empty(states, device=device), torch.zeros(sequences * shape.kv_heads, dtype=torch.int32, device=device))


def choose_splits(sequences: int, kv_heads: int, context: int, processors: int) -> int:
    """Enough CTAs to fill the GPU, but no split shorter than 32 tokens; one cluster where that is enough."""
    wanted = min(max(1, 2 * processors // (sequences * kv_heads)), max(1, context // 32))
    return max(CLUSTER, wanted // CLUSTER * CLUSTER) if torch.cuda.get_device_capability()[0] >= 9 else wanted


def decode_attention(qkv: Tensor, out: Tensor, cache: KVStorage, *, shape: HeadShape, norms: tuple[Tensor, Tensor] | None,
                     rope: Tensor, lengths: Tensor, tables: Tensor, workspace: Workspace, splits: int, epsilon: float,
                     scale: float, warps: int = 4, pdl: bool = True) -> Tensor:
    """qkv [sequences, (heads + 2 · kv_heads) · head_dim] → out [sequences, heads · head_dim]; writes the new K and V.

    lengths int32 [sequences] count the new token; tables int32 [sequences, pages]. A sequence of length 0 is padding.
    """
    hopper = torch.cuda.get_device_capability(qkv.device)[0] >= 9
    cluster = CLUSTER if hopper else 1
    defines = {
        "FP16": int(qkv.dtype == torch.float16), "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim,
        "ROTARY": shape.rotary, "PAGE": shape.page, "QK_NORM": int(shape.qk_norm), "WINDOW": shape.window or 0, "WARPS": warps,
        "CLUSTER": cluster,
    }
    kernel = jit.load("attention.cu", defines=defines).kernel("attention")
    state = shape.group * (shape.head_dim + 2)
    shared = 4 * (shape.group * shape.head_dim + 2 * shape.head_dim + (warps + 1) * state) + 16
    query_norm, key_norm = norms or (None, None)
    args = (qkv, query_norm, key_norm, rope, lengths, tables, cache.keys, cache.values, out, workspace.scratch, workspace.tickets,
            float(epsilon), float(scale), tables.shape[1])
    kernel.launch((splits, shape.kv_heads, qkv.shape[0]), 32 * warps, args, shared=shared, pdl=pdl,
                  cluster=cluster if hopper else None)
    return out
