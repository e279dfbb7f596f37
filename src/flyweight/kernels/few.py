"""A linear of 5 to 16 rows with x in registers and half of its inputs in each of two CTAs: host side of cuda/few.cu.

One launch, two of which fit on an SM: weights arrive while the kernel before ends.
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
CLUSTER, MOST_UNITS = 2, 16  # of 128 inputs, that the registers of a CTA hold
PER_WARP = {8: 1, 16: 2}  # units of a warp in a stage, for so many rows
HELD = 2  # stages of the ring that are fetched when the inputs are there: see gemv.HELD


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    units: int  # of 128 inputs, in a stage
    warps: int
    tiles: int  # of a cluster
    partials: int  # tiles whose sums have a place
    stages: int
    held: int  # of them
    shared: int
    probe: int = 0


@functools.cache
def choose(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int, per_warp: int | None = None) -> Choice | None:
    """None where inputs or outputs do not come out even, or are too many for one kernel beside another."""
    clusters = processors // CLUSTER
    if kind not in KINDS or not 1 < rows <= max(PER_WARP) or group != 128 or columns % (128 * CLUSTER) or outputs % 16 or outputs < 16 * clusters:
        return None
    padded = next(size for size in PER_WARP if size >= rows)
    per_warp, half = per_warp or PER_WARP[padded], columns // 128 // CLUSTER
    units = max((count for count in range(per_warp, MOST_UNITS + 1, per_warp) if half % count == 0), default=0)
    if units < MOST_UNITS // 2:
        return None
    tiles, warps = math.ceil(outputs / 16 / clusters), units // per_warp
    owned, partials = math.ceil(tiles / CLUSTER), 2 if units == half else tiles
    stage = units * (2 * BLOCK_BYTES[kind] + 64)
    others = (partials * warps + owned) * padded * 64 + 16 * partials + 8 * owned + (warps + 2) * padded * 4 + 16
    stages = min(tiles * half // units, (SHARED_LIMIT - others) // (stage + 16))
    return Choice(padded, units, warps, tiles, partials, stages, min(HELD, stages - 1), SHARED_LIMIT) if stages > 1 else None


@functools.cache
def kernel(kind: str, outputs: int, columns: int, fp16: bool, scale_fp16: bool, chosen: Choice, *, norm: bool, epilogue: str,
           bias: bool) -> jit.Kernel:
    return jit.load("few.cu", defines={
        **format_defines(kind), "FP16": int(fp16), "SCALE_FP16": int(scale_fp16), "KDIM": columns, "NDIM": outputs,
        "NORM": int(norm), "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(bias), "ROWS": chosen.rows, "UNITS": chosen.units, "WARPS": chosen.warps,
        "ROUND": chosen.tiles, "PARTIALS": chosen.partials, "STAGES": chosen.stages, "HELD": chosen.held,
        "SHARED_BYTES": chosen.shared, **({"PROBE": chosen.probe} if chosen.probe else {})}).kernel("few")


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, pdl: bool = True, chosen: Choice | None = None) -> Tensor:
    """x [rows, in], up to 16 rows → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up)."""
    rows, grid = x.shape[0], processors(x.device.index or 0)
    shape = (weight.kind, weight.out_features, weight.in_features)
    chosen = chosen or choose(*shape, weight.group, rows, grid)
    if chosen is None:
        raise ValueError(f"{rows} rows of {weight.in_features} inputs do not go through few.cu as {weight.kind}")
    if out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=x.device)
    epilogue = "silu" if weight.interleaved else "store" if residual is None else "residual"
    run = kernel(*shape, weight.dtype == torch.float16, weight.scale_fp16, chosen, norm=norm is not None,
                 epilogue=epilogue, bias=weight.bias is not None)
    # o and down may follow kernels that leave no room beside them: two of one launch must not gather on an SM that is free early
    shared = chosen.shared + (2048 if residual is not None else 0)
    run.launch(grid // CLUSTER * CLUSTER, 32 * (chosen.warps + 2),
               (weight.weights, weight.records, x, norm, weight.bias, residual, out, float(epsilon), rows, turns(weight.kind, x.device)),
               shared=shared, pdl=pdl, cluster=CLUSTER)
    return out
