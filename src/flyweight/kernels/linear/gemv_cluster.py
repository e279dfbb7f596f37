"""A linear of 3 to 16 rows with x in registers and half of its inputs in each of two CTAs: host
side of cuda/few.cu (Hopper).

`beside`: all kernels of the layer leave each other room on an SM. Then a norm before and
act(gate)·up after are fused, inputs need not come out even, and linears take turns to fetch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB, Gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.linear import gemv_plan
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemv_plan import RESERVED_BESIDE
from flyweight.kernels.linear.tiles import EPILOGUES, Matrix, Outline, TiledWeight
from flyweight.kernels.tuned import Ring

CLUSTER = 2
# that multiply, with 128 inputs each: fewer are no faster than other kernels on their own, and no
# more fit beside another kernel
LEAST_WARPS = 8
MOST_WARPS = 16
MOST_STAGES = 15  # a barrier of the hardware for each
# keeps two CTAs of a launch off an SM that is free early, as beside kernels that have one each
LONELY = 2 * KB
MANY_TILES = 12  # of a cluster: stages, not bytes, are the limit then


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    sets: int  # of 8 rows
    warps: int
    team: int  # warps that share a stage
    tiles: int  # of a cluster
    stages: int
    late: int  # stages of the first filling that are fetched when the inputs are there


def ring_for(
    matrix: Matrix, sets: int, tiles: int, device: Gpu, *, beside: bool = False
) -> Ring | None:
    numbers = tuned.of(device).formats[matrix.format.name]
    if sets == 1 and tiles > MANY_TILES and numbers.cluster_whole_ring:
        return numbers.cluster_whole_ring
    if sets == 1 and beside and numbers.cluster_layer_ring:
        return numbers.cluster_layer_ring
    return next((ring for ring in numbers.cluster_rings if ring.sets == sets), None)


def warps_for(matrix: Matrix, teams: int, *, beside: bool) -> int:
    """That multiply, in as few turns as there can be, some of them idle in the last one; not
    `beside` it is 0 where one would be: other kernels were compared with few.cu without idle warps.
    """
    groups = matrix.in_features // 128
    half = math.ceil(groups / CLUSTER)
    even = [] if groups % CLUSTER else range(MOST_WARPS, LEAST_WARPS - 1, -1)
    exact = next((warps for warps in even if half % warps == 0), 0)
    if not beside:
        return exact
    turns = math.ceil(half / MOST_WARPS)
    warps = math.ceil(half / turns)
    return exact if exact == warps else math.ceil(warps / teams) * teams


@functools.cache
def choose(matrix: Matrix, rows: int, device: Gpu, *, beside: bool = False) -> Choice | None:
    """None where inputs or outputs are no whole groups and tiles, or too many for one kernel beside
    another; not `beside` also where inputs do not come out even, or outputs are few.
    """
    outputs = matrix.out_features
    quantized = matrix.format.quantizes_input
    clusters = device.processors // CLUSTER
    few = outputs < 16 * clusters and not beside
    if matrix.in_features % 128 or outputs % 16 or few:
        return None
    sets = math.ceil(rows / 8)
    tiles = math.ceil(outputs / 16 / clusters)
    ring = ring_for(matrix, sets, tiles, device, beside=beside)
    if ring is None or not (warps := warps_for(matrix, ring.teams, beside=beside)):
        return None
    turns = math.ceil(matrix.in_features / 128 / CLUSTER / warps)
    if quantized and turns > 1:  # of x that waits in registers until its scale is known
        return None
    unit = 2 * matrix.format.block_bytes + (0 if quantized else 64)
    team = next(warps // teams for teams in range(ring.teams, 0, -1) if warps % teams == 0)
    owned = math.ceil(tiles / CLUSTER)
    x = CLUSTER * warps * 32 if sets == 1 else (sets - 1) * warps * 2048  # or what warps tell of it
    others = (
        x + (owned + (tiles if turns > 1 else 1) + 1) * sets * 512 + 32 * warps + 8 * owned + 128
    )
    rounds = ring.deep if turns > 1 else tiles
    limit = device.shared_beside(RESERVED_BESIDE)
    stages = min(rounds * warps // team, MOST_STAGES, (limit - others) // (team * unit + 16))
    late = min(ring.late * warps // team, stages - 1)
    # a stage for each team, and one to fetch ahead where there is more to fetch
    enough = stages * team > min(warps, (tiles * turns - 1) * warps)
    return Choice(sets, warps, team, tiles, stages, late) if enough else None


def unsupported_reason(
    weight: TiledWeight | Outline,
    rows: int,
    device: Gpu,
    *,
    norm: bool = False,
    beside: bool = False,
) -> str | None:
    """None, or why these rows do not go through few.cu."""
    if not device.has_warpgroups:
        return "needs Hopper's clusters"
    matrix = weight.matrix
    form = matrix.format
    fits = "gemv_cluster" in form.kernels and (
        matrix.group == 128 if form.grouped else not weight.static
    )
    most = 8 * max(
        (ring.sets for ring in tuned.of(device).formats[form.name].cluster_rings), default=0
    )
    around = norm or weight.interleaved
    if not fits or not 1 < rows <= most or (around and not (beside and takes_around(weight, rows))):
        return (
            "takes up to 16 rows of int4 and int8 in groups of 128, and 8 of W8A8 with a scale "
            "for each; a norm before or act(gate)·up after only 8 of bfloat16 where that pays"
        )
    if choose(matrix, rows, device, beside=beside) is None:
        return (
            f"{matrix.in_features} inputs and {matrix.out_features} outputs do not fit into whole "
            f"stages of pairs of CTAs"
        )
    return None


def takes_around(weight: TiledWeight | Outline, rows: int) -> bool:
    """Whether a norm before and act(gate)·up after can be fused: x times the norm's weights may be
    too large for float16.
    """
    return weight.matrix.format.grouped and rows <= 8 and weight.dtype == torch.bfloat16


def multiply(
    weight: TiledWeight,
    x: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    pdl: bool = True,
    beside: bool = False,
) -> Tensor:
    """x [rows, in], up to 16 rows → [rows, out] (half of it for an interleaved gate/up:
    act(gate) · up).
    """
    rows = x.shape[0]
    device = gpu.of(x.device)
    reason = unsupported_reason(weight, rows, device, norm=norm is not None, beside=beside)
    chosen = choose(weight.matrix, rows, device, beside=beside)
    if reason or chosen is None:
        raise ValueError(
            f"{rows} rows of {weight.in_features} inputs do not go through few.cu: {reason}"
        )
    out = weight.empty_result(rows, x.device) if out is None else out
    shared = device.shared_beside(RESERVED_BESIDE)
    kernel = jit.load(
        "few.cu",
        defines={
            **weight.format.defines(),
            **weight.type_defines,
            "KDIM": weight.in_features,
            "NDIM": weight.out_features,
            **({"NORM": 1} if norm is not None else {}),
            "EPILOGUE": EPILOGUES[weight.epilogue(residual)],
            "BIAS": int(weight.bias is not None),
            **({"BESIDE": 1} if beside else {}),
            "SETS": chosen.sets,
            **({} if weight.format.quantizes_input else gemv_plan.spread(rows)),
            "WARPS": chosen.warps,
            "TEAM": chosen.team,
            "ROUND": chosen.tiles,
            "STAGES": chosen.stages,
            "HELD": chosen.late,
            "SHARED_BYTES": shared,
        },
    ).kernel("few")
    # elsewhere the kernels around o and down have an SM each, and take no turns
    lonely = residual is not None and not beside
    tickets = None if lonely else workspace.current(x.device).tickets()
    kernel.launch(
        device.processors // CLUSTER * CLUSTER,
        32 * (chosen.warps + 2),
        (
            weight.weights,
            weight.records,
            weight.channel_scale,
            x,
            norm and norm.weight,
            weight.bias,
            residual,
            out,
            norm.epsilon if norm else 0.0,
            rows,
            tickets,
        ),
        shared=shared + (LONELY if lonely else 0),
        pdl=pdl,
        cluster=CLUSTER,
    )
    return out
