"""Prompts that begin in this step: all their keys are in this step's own tensors, and torch's
attention takes them as they are, neighbours in one call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN plans each length anew (tens of ms): only for lengths that come again; others take flash
# attention
CUDNN_MULTIPLE = 128
FLASH_WIDTH = 256  # the most that a head may have


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences that begin in this step: one call of torch's attention."""

    begin: int  # the first and the end of their tokens
    end: int
    length: int  # of the longest
    # int32 [sequences + 1], from `begin` on; None: they are of equal length
    starts: Tensor | None = None


def attend_run(query: Tensor, keys: Tensor, values: Tensor, run: Run, scale: float) -> Tensor:
    if run.starts is not None:
        return _attend_unequal(query, keys, values, run, scale)
    q, k, v = (
        x[run.begin : run.end].unflatten(0, (-1, run.length)).transpose(1, 2)
        for x in (query, keys, values)
    )
    way = _way(q, k, v)
    if way == SDPBackend.CUDNN_ATTENTION:
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, True, False, scale=scale
        )[0]
    elif way == SDPBackend.FLASH_ATTENTION:
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )[0]
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).reshape(run.end - run.begin, *query.shape[1:])


def takes_last(query: Tensor) -> bool:
    """Whether `attend_last` takes heads of that type and width."""
    width = query.shape[-1]
    sixteen = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and sixteen and width <= FLASH_WIDTH and width % 8 == 0


def attend_last(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens of one sequence, [heads, tokens, …] each; values may be
    narrower than keys. cuDNN takes whole prompts as they are, where it takes them. Flash attention
    takes equal widths alone, so values are filled up with zeros: torch's other ways are slower by
    more than these cost.
    """
    width = values.shape[-1]
    whole = query.shape[1] == keys.shape[1] and query.shape[1] % CUDNN_MULTIPLE == 0
    if whole and (out := _attend_by_cudnn(query, keys, values, scale)) is not None:
        return out
    filled = F.pad(values, (0, keys.shape[-1] - width))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query[None], keys[None], filled[None], 0.0, True, False, scale=scale
    )[0]
    return out[0, ..., :width]


_not_by_cudnn: set[tuple[torch.dtype, int, int]] = set()


def _attend_by_cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """None where it does not know such heads, on this GPU or in this version."""
    kind = (query.dtype, keys.shape[-1], values.shape[-1])
    if kind in _not_by_cudnn:
        return None
    try:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            query[None], keys[None], values[None], None, False, 0.0, True, False, scale=scale
        )[0][0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _not_by_cudnn.add(kind)
        return None


def _attend_unequal(query: Tensor, keys: Tensor, values: Tensor, run: Run, scale: float) -> Tensor:
    assert run.starts is not None
    q, k, v = (x[run.begin : run.end] for x in (query, keys, values))
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, run.starts, run.starts, run.length, run.length, 0.0, True, False, scale=scale
        )[0].contiguous()
    return torch.cat(
        [
            attend_run(q, k, v, Run(begin, end, end - begin), scale)
            for begin, end in itertools.pairwise(run.starts.tolist())
        ]
    )


_ways: dict[tuple[torch.dtype, bool, int, int, int], SDPBackend] = {}


def _way(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """The backend that torch chooses, asked once: to ask for some through its context costs more
    than to launch a layer.
    """
    if not q.is_cuda:
        return SDPBackend.MATH
    key = (q.dtype, q.shape[2] % CUDNN_MULTIPLE == 0, q.shape[1], k.shape[1], q.shape[3])
    if key not in _ways:
        wanted = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, *wanted] if key[1] else wanted, set_priority=True
        ):
            _ways[key] = SDPBackend(
                torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=key[2] != key[3])
            )
    return _ways[key]
