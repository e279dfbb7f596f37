"""Launches of trellis_search.cu, for the solver of trellises (quant/trellis_search.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit

CIRCLES = (32, 16, 8)  # that a CTA takes
MOST_WARPS = 16
OWN = 20  # the time of a CTA that its circles do not change, in circles
ROWS = 16  # overlaps of a product


def circles_at_once(count: int, processors: int) -> int:
    """How many circles a CTA takes: few where processors would have nothing to do."""
    return min(CIRCLES, key=lambda size: -(-count // (size * processors)) * (size + OWN))


def search(table: Tensor, pulls: Tensor, weights: Tensor, *, fresh: int, reach: int) -> Tensor:
    """States int64 [circles, steps] for `pulls` float16 [circles, steps, 4] and `weights` [steps,
    4]; `table` float16 [states, 4].
    """
    count, steps, _ = pulls.shape
    state = len(table).bit_length() - 1
    overlaps = 1 << state - fresh
    processors = gpu.of(pulls.device).multi_processor_count
    circles = circles_at_once(count, processors)
    warps = min(MOST_WARPS, overlaps // ROWS)
    defines = {
        "FP16": 1,
        "STATE": state,
        "FRESH": fresh,
        "STEPS": steps,
        "REACH": min(reach, steps - 1),
        "CIRCLES": circles,
        "WARPS": warps,
    }
    # A value v costs at least −(pull / 2)² / weight, in all steps of both ways around.
    sizes = (pulls.float().square() / (4 * weights.float())).sum((1, 2)) * 2 + 1
    ctas = min(-(-count // circles), 2 * processors)
    size = overlaps * circles
    kept = torch.empty(ctas * steps * size, device=pulls.device)
    states = torch.empty(count, steps, dtype=torch.int32, device=pulls.device)
    args = (table, pulls, weights, sizes, kept, states, count)
    kernel = jit.load("trellis_search.cu", defines=defines).kernel("search")
    kernel.launch(ctas, 32 * warps, args, shared=4 * size)
    return states.long()
