"""Few rows times a tiled weight, weights streaming through the matrix units once: host side of
cuda/gemv.cu.

Norm before, and bias, residual or act(gate)·up after, are fused: they are compile-time choices of
the launch. A launch has one CTA on every SM, so that all SMs offer the next kernel the same room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import dependent_launch, jit, tuned, workspace
from flyweight.kernels.linear import gemv_plan
from flyweight.kernels.linear.delta import AdaptedRow
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemv_plan import Plan, as_halves, fitting_plan
from flyweight.kernels.linear.tiles import ACTIVATIONS, EPILOGUES, Matrix, TiledWeight


@dataclass(frozen=True, eq=False)
class OneRow:
    """What one row may have besides: an adapter, gate and up for x, which `gated` multiplies, or
    gate and up for outputs, halves of the weight, which `apart` multiplies.
    """

    adapted: AdaptedRow | None = None
    gated: str | None = None
    apart: str | None = None


PLAIN_ROW = OneRow()


def kept_stages(weight: TiledWeight, rows: int, chosen: Plan, device: Gpu) -> int:
    """Stages behind those of the ring that warps fetch into registers, where launches overlap."""
    whole = weight.group % 64 == 0 or not weight.format.grouped  # a scale for each unit
    ready = rows == 1 and chosen.own_units and whole and dependent_launch.enabled
    return tuned.of(device).formats[weight.format.name].gemv_kept if ready else 0


def late_stages(matrix: Matrix, device: Gpu) -> int:
    """Stages of the first filling that are fetched only when the inputs are there."""
    numbers = tuned.of(device)
    found = numbers.formats[matrix.format.name].gemv_late_stages
    return numbers.gemv.late_stages if found is None else found


def tickets(
    weight: TiledWeight, rows: int, device: torch.device, *, beside: bool = False
) -> Tensor | None:
    """Where linears of a format find out whose turn it is to fetch weights; None where that does
    not pay. `beside`: all kernels of a layer leave each other room.
    """
    most = tuned.of(gpu.of(device)).formats[weight.format.name].ticket_rows
    turns = rows <= most or beside
    return workspace.current(device).tickets() if turns else None


def _prefetch(matrix: Matrix, chosen: Plan, device: Gpu) -> dict[str, int]:
    """Stages that a producer brings to L2 while the ring is full and x is not there."""
    size = chosen.stage_blocks * matrix.format.block_bytes
    stages = 0 if chosen.own_units else tuned.of(device).gemv.prefetch_bytes // size
    return {"PREFETCHED": stages} if stages else {}


def is_balanced(matrix: Matrix, device: Gpu) -> bool:
    """Whether CTAs get runs of stages rather than of tiles: where some would have a tile more than
    others, and that takes longer than handing sums over.
    """
    grid = device.processors
    tiles = matrix.tiles
    longest = math.ceil(tiles / grid) * grid / tiles
    return tiles >= grid and longest > tuned.of(device).gemv.balance_margin


def ends_apart(matrix: Matrix, rows: int, device: Gpu) -> bool:
    """Whether CTAs have whole pairs of tiles, one of gate and one of up, that end together."""
    if matrix.out_features % 32 or is_balanced(matrix, device):
        return False
    tiles = 2 * math.ceil(matrix.tiles / 2 / device.processors)
    found = fitting_plan(matrix, rows, device, tiles=tiles, lone_row=rows == 1)
    return found is not None and found.slots % 2 == 0


def defines(
    weight: TiledWeight,
    rows: int,
    chosen: Plan,
    device: Gpu,
    *,
    norm: bool,
    epilogue: str = "store",
) -> dict[str, int]:
    """What gemv.cuh is compiled for."""
    early = weight.early and rows == 1
    return {
        **weight.format.defines(symmetric=weight.symmetric),
        **weight.type_defines,
        "STATIC": int(weight.static),
        "KDIM": weight.in_features,
        "NDIM": weight.out_features,
        "ROWS": rows,
        "GROUP": weight.group,
        "NORM": int(norm),
        "EPILOGUE": EPILOGUES[epilogue],
        "BIAS": int(weight.bias is not None),
        "WARPS": chosen.warps,
        "STAGES": chosen.stages,
        "STAGE_BLOCKS": chosen.stage_blocks,
        "SHARED_BYTES": chosen.shared,
        "SLOTS": chosen.slots,
        "HELD": 0 if early else min(late_stages(weight.matrix, device), chosen.stages - 1),
        **({"IN_REGISTERS": 1} | gemv_plan.spread(rows) if chosen.in_registers else {}),
        **({"BESIDE": 1} if chosen.beside else {}),
        **({"PAIRED": 1} if chosen.paired else {}),
        **({"OWN_COPIES": 1, "OWN_UNITS": chosen.own_units} if chosen.own_units else {}),
        **({"HELD_INPUTS": 1} if chosen.held_inputs else {}),
        **_prefetch(weight.matrix, chosen, device),
        **({"AS_HALVES": 1} if as_halves(weight.matrix, rows) else {}),
        **({"INDEXED": 1} if weight.order is not None and rows == 1 else {}),
    }


def channels(weight: TiledWeight, rows: int) -> Tensor | None:
    """What the kernels get as scales of outputs, or (INDEXED) as places of inputs."""
    return weight.order if weight.order is not None and rows == 1 else weight.channel_scale


def multiply(
    weight: TiledWeight,
    x: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    pdl: bool = True,
    alone: bool = False,
    one: OneRow = PLAIN_ROW,
) -> Tensor:
    """x [rows, in], rows 1, 2, 4 or 8 → [rows, out] (half of it for an interleaved gate/up:
    act(gate) · up).
    """
    adapted = one.adapted
    rows = x.shape[0]
    device = gpu.of(x.device)
    pair = 2 if one.apart else 1  # tiles that end together
    if out is None:
        out = torch.empty(rows, weight.width // pair, dtype=weight.dtype, device=x.device)
    grid = device.processors
    balanced = is_balanced(weight.matrix, device)
    runs = weight.matrix.tiles // pair
    tiles = math.ceil(runs / grid) * pair + balanced
    more = adapted.shared_bytes(tiles) if adapted else 0
    chosen = fitting_plan(
        weight.matrix,
        rows,
        device,
        tiles=tiles,
        more=more,
        alone=alone,
        lone_row=rows == 1 and not adapted,
    )
    if chosen is None:
        raise ValueError(
            f"{rows} rows of {weight.in_features} inputs do not fit into shared memory"
        )
    flags = defines(
        weight,
        rows,
        chosen,
        device,
        norm=norm is not None,
        epilogue=one.apart or weight.epilogue(residual),
    )
    mail = None
    if balanced and not chosen.in_registers:
        flags["BALANCED"] = 1
        mail = workspace.current(x.device).mailbox(16 * rows * grid)
    # an adapter's warp leaves no registers for weights
    if kept := 0 if adapted or chosen.held_inputs else kept_stages(weight, rows, chosen, device):
        flags["KEPT"] = kept
    if one.gated is not None:
        flags["GATED_INPUT"] = ACTIVATIONS[one.gated]
    if one.apart is not None:
        flags["APART"] = 1
    if adapted is not None:
        flags |= adapted.defines(tiles, chosen.warps, min(runs, grid))
    kernel = jit.load("gemv.cu", defines=flags).kernel("gemv")
    args = (
        weight.weights,
        weight.records,
        channels(weight, rows),
        x,
        norm and norm.weight,
        weight.bias,
        residual,
        out,
        norm.epsilon if norm else 0.0,
        tickets(weight, rows, x.device),
        mail,
        *(adapted.arguments if adapted else ()),
    )
    threads = chosen.threads + 32 * (adapted is not None)
    kernel.launch(grid, threads, args, shared=chosen.shared, pdl=pdl)
    return out
