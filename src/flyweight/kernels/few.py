"""A linear of 5 to 16 rows with x in registers and half of its inputs in each of two CTAs: host side of cuda/few.cu."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.gemv import BLOCK_BYTES, EPILOGUES, QUANTIZED, SHARED_LIMIT, Gemv, format_defines, processors, turns

CLUSTER = 2
LEAST_WARPS, MOST_WARPS = 8, 16  # that multiply, with 128 inputs each; no more fit beside another kernel
MOST_STAGES = 15  # a barrier of the hardware for each
LONELY = 2 << 10  # bytes that keep two CTAs of a launch off an SM that is free early, as beside kernels that have one each


@dataclass(frozen=True)
class Ring:
    """Of stages. A round is one tile for all warps."""

    teams: int  # of warps that share a stage: small stages are full sooner
    held: int  # rounds that are fetched when the inputs are there: see gemv.HELD
    deep: int = 0  # rounds where inputs come in turns: a step is slower if more of the next linear's weights come ahead


# By format and sets of 8 rows
RINGS = {("int4", 1): Ring(2, 3, 4), ("int4", 2): Ring(2, 1, 4), ("int8", 1): Ring(2, 1, 3), ("int8", 2): Ring(4, 0, 3),
         ("w8a8", 1): Ring(4, 0)}
MOST_ROWS = {kind: 8 * sets for kind, sets in RINGS}  # the last of a format has the most
MANY_TILES, WHOLE = 12, Ring(1, 2, 4)  # of a cluster: stages, not bytes, are the limit then


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    sets: int  # of 8 rows
    warps: int
    team: int  # warps that share a stage
    tiles: int  # of a cluster
    stages: int
    held: int  # of the first filling, that are fetched when the inputs are there


@functools.cache
def choose(kind: str, outputs: int, columns: int, processors: int, rows: int = 8) -> Choice | None:
    """None where inputs or outputs do not come out even, or are too many for one kernel beside another."""
    clusters, half = processors // CLUSTER, columns // 128 // CLUSTER
    warps = max((count for count in range(LEAST_WARPS, MOST_WARPS + 1) if half % count == 0), default=0)
    if columns % (128 * CLUSTER) or not half or not warps or outputs % 16 or outputs < 16 * clusters:
        return None
    sets, turns, tiles = math.ceil(rows / 8), half // warps, math.ceil(outputs / 16 / clusters)
    if (kind, sets) not in RINGS or (kind in QUANTIZED and turns > 1):  # of x that waits in registers until its scale is known
        return None
    ring = WHOLE if (kind, sets) == ("int4", 1) and tiles > MANY_TILES else RINGS[kind, sets]
    unit = 2 * BLOCK_BYTES[kind] + (0 if kind in QUANTIZED else 64)
    team = next(warps // teams for teams in range(ring.teams, 0, -1) if warps % teams == 0)
    owned, x = math.ceil(tiles / CLUSTER), CLUSTER * warps * 32 if kind in QUANTIZED else (sets - 1) * warps * 2048
    others = x + (owned + (tiles if turns > 1 else 1) + 1) * sets * 512 + 32 * warps + 8 * owned + 128
    rounds = ring.deep if turns > 1 else tiles
    stages = min(rounds * warps // team, MOST_STAGES, (SHARED_LIMIT - others) // (team * unit + 16))
    held = min(ring.held * warps // team, stages - 1)
    return Choice(sets, warps, team, tiles, stages, held) if stages * team > warps else None


def why_not(weight: Gemv, rows: int, device: torch.device, *, norm: bool = False) -> str | None:
    """None, or why these rows do not go through few.cu."""
    if gpu.capability(device)[0] != 9:
        return "needs Hopper's clusters"
    fits = {"int4": weight.group == 128, "int8": weight.group == 128, "w8a8": not weight.static}.get(weight.kind, False)
    if not fits or weight.interleaved or norm or not 1 < rows <= MOST_ROWS[weight.kind]:
        return ("takes up to 16 rows of int4 and int8 in groups of 128, and 8 of W8A8 with a scale for each, "
                "without a norm before or silu·mul after")
    if choose(weight.kind, weight.out_features, weight.in_features, processors(device.index or 0), rows) is None:
        return f"{weight.in_features} inputs and {weight.out_features} outputs do not fit into whole stages of pairs of CTAs"
    return None


@functools.cache
def kernel(kind: str, outputs: int, columns: int, fp16: bool, scale_fp16: bool, chosen: Choice, *, epilogue: str,
           bias: bool) -> jit.Kernel:
    return jit.load("few.cu", defines={
        **format_defines(kind), "FP16": int(fp16), "SCALE_FP16": int(scale_fp16), "KDIM": columns, "NDIM": outputs,
        "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(bias), "SETS": chosen.sets, "WARPS": chosen.warps, "TEAM": chosen.team,
        "ROUND": chosen.tiles, "STAGES": chosen.stages, "HELD": chosen.held, "SHARED_BYTES": SHARED_LIMIT}).kernel("few")


def multiply(weight: Gemv, x: Tensor, out: Tensor | None = None, *, residual: Tensor | None = None, pdl: bool = True) -> Tensor:
    """x [rows, in], up to 16 rows → [rows, out]."""
    rows, grid, shape = x.shape[0], processors(x.device.index or 0), (weight.kind, weight.out_features, weight.in_features)
    reason, chosen = why_not(weight, rows, x.device), choose(*shape, grid, rows)
    if reason or chosen is None:
        raise ValueError(f"{rows} rows of {weight.in_features} inputs do not go through few.cu: {reason}")
    out = torch.empty(rows, weight.out_features, dtype=weight.dtype, device=x.device) if out is None else out
    run = kernel(*shape, weight.dtype == torch.float16, weight.scale_fp16, chosen, bias=weight.bias is not None,
                 epilogue="store" if residual is None else "residual")
    tickets = turns("few.cu", rows, x.device) if residual is None else None  # o and down have kernels around that take no turns
    run.launch(grid // CLUSTER * CLUSTER, 32 * (chosen.warps + 2),
               (weight.weights, weight.records, weight.channel_scale, x, weight.bias, residual, out, rows, tickets),
               shared=SHARED_LIMIT + (LONELY if residual is not None else 0), pdl=pdl, cluster=CLUSTER)
    return out
