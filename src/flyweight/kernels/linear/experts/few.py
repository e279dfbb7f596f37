"""Experts of few tokens: experts.cu (every token meets every expert in use), and experts_sum.cu,
which adds up the choices of one token as its second linear makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.linear import gemv, gemv_plan
from flyweight.kernels.linear.experts.routing import Routed
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiles import Matrix, TiledWeight

# how much longer the longest run of tiles may be where the choices of a token are added up at once
UNEVEN = 1.1
# of all choices together, where they are: every CTA converts them all
MOST_INPUTS = 8192


def few_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    *,
    norm: Norm | None = None,
    per_slot: bool = False,
    parts: Mapping[str, int] = MappingProxyType({}),
) -> Tensor:
    """experts.cu. x [tokens, in] for all experts, or (`per_slot`) [rows, in], each its own.
    `parts`: of a shared expert that is several choices (`DeviceRouter.parts`).
    """
    rows = routed.tile
    device = gpu.of(x.device)
    plan = gemv_plan.fitting_plan(weight.matrix, rows, device, tiles=16, lone_row=rows == 1)
    assert plan is not None
    out = weight.empty_result(routed.rows, x.device)
    defines = gemv.defines(
        weight, rows, plan, device, norm=norm is not None, epilogue=weight.epilogue(None)
    )
    defines |= {"PER_SLOT": int(per_slot), **parts}
    kernel = jit.load("experts.cu", defines=defines).kernel("experts")
    args = (
        weight.weights,
        weight.records,
        weight.channel_scale,
        x,
        norm and norm.weight,
        weight.bias,
        out,
        routed.expert_of,
        routed.tiles,
        norm.epsilon if norm else 0.0,
    )
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)
    return out


@functools.cache
def sum_plan(matrix: Matrix, choices: int, device: Gpu) -> gemv_plan.Plan | None:
    """Of experts_sum.cu; None where it cannot do it, or would share tiles out less evenly."""
    form = matrix.format
    inner = matrix.in_features
    longest = math.ceil(matrix.tiles / device.processors)
    even = choices * matrix.tiles / device.processors
    if (
        not device.has_dependent_launch
        or not form.grouped
        or form.floats
        or inner % max(64, matrix.group)
        or choices * inner > MOST_INPUTS
        or longest * choices > UNEVEN * math.ceil(even)
    ):
        return None
    numbers = tuned.of(device)
    wanted = gemv_plan.Wanted(
        longest,
        numbers.formats[form.name].gemv_warps,
        stage_bytes=inner // 64 * form.block_bytes,
        slots=max(1, min(longest, numbers.gemv.slots)),
    )
    joined = dataclasses.replace(matrix, in_features=choices * inner)
    found = gemv_plan.plan_beside(joined, 1, wanted, device)
    return found if found and found.stage_blocks * 64 == inner else None


def sum_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    plan: gemv_plan.Plan,
    *,
    residual: Tensor,
    out: Tensor,
) -> None:
    """experts_sum.cu: x [choices, in] of one token → out = residual + the sum by shares."""
    device = gpu.of(x.device)
    inner = weight.in_features
    defines = gemv.defines(weight, 1, plan, device, norm=False, epilogue="residual")
    defines |= {"KDIM": len(x) * inner, "SLOT_BLOCKS": inner // 64}
    kernel = jit.load("experts_sum.cu", defines=defines).kernel("experts_sum")
    args = (
        weight.weights,
        weight.records,
        x,
        routed.shares,
        residual,
        out,
        routed.expert_of,
        routed.tiles,
        workspace.current(x.device).bytes("experts arrived", 4),
    )
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)
