"""The decoder's ops on a CUDA device: the functions of `reference`, fused kernels where there are
some.

`dispatch.decoder_ops` returns this module where triton is installed. Whole sequences without a
cache (calibration, perplexity) keep the plain rope and torch's attention.
"""

import torch
from torch import Tensor

from flyweight.kernels import residual, triton_ops
from flyweight.kernels.attention.plan import plan_attention
from flyweight.kernels.attention.rope import attention_scales, rope_norm_write
from flyweight.kernels.attention.triton import paged_attention
from flyweight.kernels.gated_delta.prefill import delta_paged, delta_whole
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.reference import causal_attention, rope_rows, rotate, split_heads, write_kv
from flyweight.kernels.triton_ops import gate, normalize, rms_norm, silu_mul

__all__ = [
    "add_normed",
    "attention_scales",
    "causal_attention",
    "delta_paged",
    "delta_whole",
    "gate",
    "normalize",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope_norm_write",
    "rope_rows",
    "rotate",
    "silu_mul",
    "split_heads",
    "write_kv",
]


def add_normed(
    hidden: Tensor, y: Tensor, norm: Norm | None, *, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """hidden + scale · norm(y), into `out` where there is one; it may be `hidden`."""
    target = torch.empty_like(hidden) if out is None else out
    if residual.takes(hidden, y, target):
        return residual.add_normed(hidden, y, norm, scale=scale, out=target)
    return triton_ops.add_normed(hidden, y, norm, scale=scale, out=target)
