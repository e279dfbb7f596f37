"""q/k norm, rope and KV write of prefill steps: host side of cuda/rope.cu, with the Triton op for
what it does not take.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.kernels import jit
from flyweight.kernels.attention.decode import eight_bit_arguments, eight_bit_defines
from flyweight.kernels.attention.prefill import BASE_2
from flyweight.kernels.linear.fused import Norm

HEADS_OF_A_LANE = 4  # at most


def attention_scales(scale: float) -> tuple[float, float]:
    """What rope multiplies q with, before it is rounded, and what is left to attention:
    prefill_attention.cu then has scores in base 2, and an instruction less for each of them.
    """
    return scale / BASE_2, BASE_2


@functools.cache
def _kernel(**defines: int) -> jit.Kernel:
    return jit.load("rope.cu", defines=defines).kernel("rope")


def rope_norm_write(
    qkv: Tensor,
    cache: KVStorage,
    slots: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: Norm | None,
    query_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q/k norm and rope in place, q scaled, K and V written to `slots` (a negative one is padding);
    returns views q, k, v of qkv, K and V as an 8-bit cache gives them back.

    qkv [tokens, heads + 2 · kv_heads, head_dim]; the norm's weight [heads + kv_heads,
    head_dim]; cos and sin from `reference.rope_rows`.
    """
    tokens, all_heads, size = qkv.shape
    kv_heads = cache.keys.shape[2]
    heads = all_heads - 2 * kv_heads
    half = cos.shape[-1] // 2
    # values of a lane, as rope.cu counts them
    each, *_ = (n for n in (8, 4, 2, 0) if n == 0 or half % n == size % n == 0)
    if not qkv.is_cuda or qkv.dtype == torch.float32 or not each or half > 32 * each:
        from flyweight.kernels import triton_ops  # late: a dry run needs no triton

        return triton_ops.rope_norm_write(
            qkv,
            cache,
            slots,
            cos=cos,
            sin=sin,
            norm=norm,
            query_scale=query_scale,
        )
    # rope_rows negates the sine of the first half of a row: both are read from the second half on
    args = (
        qkv,
        cos[..., half:],
        sin[..., half:],
        slots,
        None if norm is None else norm.weight,
        cache.keys,
        cache.values,
        tokens,
        qkv.stride(0),
        cos.stride(0),
        cache.keys.stride(1),
        0.0 if norm is None else float(norm.epsilon),
        float(query_scale),
        *eight_bit_arguments(cache),
    )
    if tokens:
        eight = eight_bit_defines(cache)
        kernel = _kernel(
            FP16=int(qkv.dtype == torch.float16),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=size,
            ROTARY=2 * half,
            QK_NORM=int(norm is not None),
            **(eight | {"PAGE": cache.block_size} if eight else {}),
        )
        lanes = 1 << (half // each - 1).bit_length()
        warps = math.ceil(all_heads / (32 // lanes * HEADS_OF_A_LANE))
        kernel.launch(math.ceil(tokens * warps / 4), 128, args, pdl=True)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
