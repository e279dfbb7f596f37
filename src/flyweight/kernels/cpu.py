"""y = x Wᵀ in float32 on a CPU: one weight in the layout that suits the number of rows.

One to three rows are bound by memory, and `torch.linear` reads the weight nearly at full speed; a weight with more
outputs than inputs is read faster column by column, so it is laid down that way where a measurement says so. From four
rows on torch first rearranges the weight, on every call; oneDNN can keep a rearranged copy. Measured on Sapphire Rapids,
all linears of a 135M model: 35 → 30 ms at 1 row (one core), and on two cores 108 → 64 ms at 8 rows, 136 → 71 at 12,
93 → 74 at 16, 293 → 284 at 128. The price is a second copy of the weight, made when first needed and only where memory
is plentiful.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 4  # from here on the copy is faster
SMALL = 1 << 18  # weights that stay in a core's own cache gain nothing
MANY_ROWS = 256  # from here on the rearranging costs nothing next to the arithmetic


class CpuLinear:
    def __init__(self, weight: Tensor):
        tall = weight.shape[0] > weight.shape[1] and weight.numel() >= SMALL
        self.weight = by_columns(weight) if tall and columns_pay() else weight  # [out, in], in one order or the other
        self.packed: Tensor | None = None
        self.tried = False

    def __call__(self, x: Tensor) -> Tensor:
        if not FEW_ROWS <= x.numel() // x.shape[-1] < MANY_ROWS:
            return F.linear(x, self.weight)
        if not self.tried:
            self.tried = True
            if packing_pays() and memory_available() > 4 * self.weight.nbytes:
                self.packed = pack(self.weight.contiguous())
        return F.linear(x, self.weight) if self.packed is None else run_packed(x, self.packed)


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 2 * FEW_ROWS)


def run_packed(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def by_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


@functools.cache
def columns_pay() -> bool:
    """Measured once for one row, on more weights than a cache holds at a time."""
    weights, x = [torch.randn(3072, 576) for _ in range(6)], torch.randn(1, 576)
    others = [by_columns(weight) for weight in weights]
    return _seconds(lambda: [F.linear(x, other) for other in others]) < 0.95 * _seconds(
        lambda: [F.linear(x, weight) for weight in weights])


@functools.cache
def packing_pays() -> bool:
    """Measured once, on a small weight: CPUs and builds of torch differ. False where torch lacks these ops."""
    weight, x = torch.randn(1024, 1024), torch.randn(2 * FEW_ROWS, 1024)
    try:
        packed = pack(weight)
        torch.testing.assert_close(run_packed(x, packed), F.linear(x, weight), rtol=1e-4, atol=1e-3)
    except (AttributeError, RuntimeError, AssertionError):
        return False
    return _seconds(lambda: run_packed(x, packed)) < _seconds(lambda: F.linear(x, weight))


def _seconds(work: Callable[[], object]) -> float:
    """The fastest of seven runs: the least disturbed one."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def memory_available() -> float:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return float("inf")
