"""The decoder's ops in a dry run: those of `cuda_ops` that launch kernels of jit.py as they are, of
the others only shapes.

What Triton would compile is left out: it keeps a cache of its own, and needs the GPU.
"""

from typing import Any

from torch import Tensor

from flyweight.batch import Batch, KVStorage, StateStorage
from flyweight.kernels import residual
from flyweight.kernels.attention.prefill import Heads, takes
from flyweight.kernels.attention.rope import attention_scales, rope_norm_write
from flyweight.kernels.gated_delta.shape import DeltaWeights
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.reference import rope_rows

__all__ = [
    "add_normed",
    "attention_scales",
    "delta_paged",
    "gate",
    "normalize",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope_norm_write",
    "rope_rows",
]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x


def normalize(x: Tensor, norm: Norm) -> Tensor:
    return x


def add_normed(
    hidden: Tensor, y: Tensor, norm: Norm | None, *, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    out = hidden if out is None else out
    if residual.takes(hidden, y, out):
        residual.add_normed(hidden, y, norm, scale=scale, out=out)
    return out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.chunk(2, dim=-1)[0]


def delta_paged(
    projected: Tensor, cache: StateStorage, batch: Batch, weights: DeltaWeights
) -> Tensor:
    return projected[:, : weights.shape.outputs]


def plan_attention(*args: Any) -> None:
    pass


def paged_attention(
    query: Tensor, cache: KVStorage, plan: None, *, scale: float, new: Any, bend: Any = None
) -> Tensor:
    heads = Heads(query.shape[1], cache.keys.shape[2], query.shape[2], query.dtype)
    if bend is None and takes(heads, query.device, scale):
        for page in (0, cache.block_size) if cache.eight is None else (0,):
            heads.kernel(page)
    return query
