"""A linear of 5 to 32 rows with x as it lies in memory: host side of cuda/stream.cu, and how it is cut.

One launch, two of which fit on an SM: weights arrive while the kernel before ends. `choose` takes a cluster of two, each with
half of the inputs, where x would otherwise be a large part of what an SM fetches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.kernels.gemv import BLOCK_BYTES, EPILOGUES, SHARED_LIMIT, Gemv, format_defines, processors, turns

KINDS = ("int4", "int8")
# For so many rows: warps that multiply, most tiles of each. Two kernels, with their LOADERS, have the registers of an SM.
SHAPES, LOADERS = {8: (12, 3), 16: (8, 3), 32: (12, 1)}, 2
SPANS = 8, 4  # steps of a tile that are fetched at once: the more, the less a loader has to do
X_ROOM, MOST_AHEAD = 53 * 1024, 4  # of shared memory for x; steps of x for each of those that warps take at once
HELD = 0.4  # of the ring, fetched when the inputs are there: see gemv.HELD


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    cluster: int
    tiles: int
    together: int  # of one warp
    step_warps: int  # steps at work at once
    ahead: int
    span: int
    slots: int
    held: int  # of them
    shared: int

    @property
    def warps(self) -> int:
        return math.ceil(self.tiles / self.together) * self.step_warps


@functools.cache
def choose(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int,
           cluster: int | None = None) -> Choice | None:
    """None where tiles are too many for one round, or groups too small."""
    if kind not in KINDS or not 1 < rows <= max(SHAPES) or (group % 128 and group < columns):
        return None
    padded = next(size for size in SHAPES if size >= rows)
    warps, most_tiles = SHAPES[padded]
    if cluster is None:
        both = [choose(kind, outputs, columns, group, rows, processors, count) for count in (1, 2)]
        fetched = 2 * padded * columns, math.ceil(outputs / 16) / processors * columns / 64 * BLOCK_BYTES[kind]
        return both[1] if both[1] and (2 * fetched[0] > fetched[1] or both[0] is None) else both[0]
    tiles, steps = math.ceil(math.ceil(outputs / 16) / (processors // cluster)), math.ceil(columns / 128)
    longest = math.ceil(steps / cluster)
    x = 4 * (padded + 1) * 64  # of a step
    cuts = [(math.ceil(tiles / together) * step_warps, together, step_warps) for together in range(1, most_tiles + 1)
            for step_warps in (4, 2, 1) if step_warps <= longest and 2 * step_warps * x <= X_ROOM]
    cuts = [cut for cut in cuts if cut[0] <= warps]
    if not cuts or steps < cluster:
        return None
    _, together, step_warps = max(cuts)  # the most warps at work
    together = math.ceil(tiles / math.ceil(tiles / together))
    ahead = max(2, min(MOST_AHEAD, X_ROOM // (x * step_warps), math.ceil(longest / step_warps)))
    others = x * step_warps * ahead + math.ceil(tiles / cluster) * padded * 64 * (cluster - 1) + (warps + 2) * padded * 4 + 512
    sums = step_warps * tiles * padded * 80  # of the warps, in the ring's place
    for span in SPANS:
        wanted = tiles * math.ceil(longest / span)
        slots = min(wanted, (SHARED_LIMIT - others) // (span * (2 * BLOCK_BYTES[kind] + 64) + 16))
        # warps with one x wait for each other in the middle of a slot: all tiles are there at once, and more on their way
        least = 2 * tiles if span > SPANS[-1] else tiles + LOADERS
        if slots >= min(wanted, least) and sums + others + 16 * slots <= SHARED_LIMIT:
            return Choice(padded, cluster, tiles, together, step_warps, ahead, span, slots, int(HELD * slots), SHARED_LIMIT)
    return None


@functools.cache
def kernel(kind: str, outputs: int, columns: int, group: int, fp16: bool, scale_fp16: bool, chosen: Choice, *, norm: bool,
           epilogue: str, bias: bool) -> jit.Kernel:
    return jit.load("stream.cu", defines={
        **format_defines(kind), "FP16": int(fp16), "SCALE_FP16": int(scale_fp16), "KDIM": columns, "NDIM": outputs,
        "GROUP": group, "NORM": int(norm), "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(bias), "ROWS": chosen.rows,
        "ROUND": chosen.tiles, "PER_WARP": chosen.together, "K_WARPS": chosen.step_warps, "SPAN": chosen.span,
        "AHEAD": chosen.ahead, "CLUSTER": chosen.cluster, "SLOTS": chosen.slots, "HELD": chosen.held,
        "SHARED_BYTES": chosen.shared}).kernel("stream")


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, chosen: Choice | None = None) -> Tensor:
    """x [rows, in], up to 32 rows → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, grid = x.shape[0], processors(x.device.index or 0)
    shape = (weight.kind, weight.out_features, weight.in_features, weight.group)
    chosen = chosen or choose(*shape, rows, grid)
    if chosen is None:
        raise ValueError(f"{rows} rows of {weight.in_features} inputs do not go through stream.cu as {weight.kind}")
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=x.device)
    epilogue = "silu" if weight.interleaved else "store" if residual is None else "residual"
    run = kernel(*shape, weight.dtype == torch.float16, weight.scale_fp16, chosen, norm=norm is not None, epilogue=epilogue,
                 bias=weight.bias is not None)
    # o and down may follow kernels that leave no room beside them: two of one launch must not gather on an SM that is free early
    shared = chosen.shared + (2048 if residual is not None else 0)
    run.launch(grid // chosen.cluster * chosen.cluster, 32 * (chosen.warps + LOADERS),
               (weight.weights, weight.records, x, norm, weight.bias, residual, out, float(epsilon), rows,
                turns(weight.kind, x.device)),
               shared=shared, pdl=pdl, cluster=chosen.cluster)
    return out
