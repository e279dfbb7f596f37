"""The decoder's ops on a CUDA device: the functions of `reference`, fused kernels where there are
some.

`dispatch.decoder_ops` returns this module where triton is installed. Whole sequences without a
cache (calibration, perplexity) keep the plain rope and torch's attention.
"""

from flyweight.kernels.attention.plan import plan_attention
from flyweight.kernels.attention.rope import attention_scales, rope_norm_write
from flyweight.kernels.attention.triton import paged_attention
from flyweight.kernels.reference import causal_attention, rope_rows, rotate, split_heads, write_kv
from flyweight.kernels.triton_ops import add_normed, gate, normalize, rms_norm, silu_mul

__all__ = [
    "add_normed",
    "attention_scales",
    "causal_attention",
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
