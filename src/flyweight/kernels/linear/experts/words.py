"""One token of many experts: the first linear makes the choice itself, since the last thread block
of `route` would take long.

route.cu leaves logits alone, experts.cu chooses by them and leaves its choice, and experts_sum.cu
empties both: words go once from SM to SM, with no counter between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear import gemv, gemv_plan
from flyweight.kernels.linear.experts import few
from flyweight.kernels.linear.experts.router import DeviceRouter
from flyweight.kernels.linear.experts.routing import THREADS, reserved
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiles import TiledWeight

# from which on all warps of a thread block choose: route.cu, choose.cuh
MANY_EXPERTS = 256
# that they list at most a warp of: choose.cuh
MOST_CHOSEN = 16


def empty_words(logits: int, choices: int, device: torch.device) -> Tensor:
    return torch.full((logits + 2 * choices,), -1, dtype=torch.int32, device=device).view(
        torch.float32
    )


@dataclass(frozen=True, eq=False)
class ByWords:
    """Experts of one token, by words."""

    gate_up: TiledWeight  # stacked
    down: TiledWeight
    router: DeviceRouter
    # float32 [logits + 2 · choices], each its own flag and all ones between steps: by which experts
    # and shares of one token go from kernel to kernel
    words: Tensor

    def plan(self, device: Gpu) -> gemv_plan.Plan | None:
        """How the second linear adds the choices up; None where `route` chooses better."""
        router = self.router
        routing = router.routing
        each = math.ceil(len(router.weight) / device.processors)
        if (
            not device.has_dependent_launch
            or routing.experts < MANY_EXPERTS
            or routing.chosen > MOST_CHOSEN
            or routing.groups > 1
            or router.joined > 1
            or self.down.bias is not None
            or router.ring(router.weight.shape[1], device) < each
        ):
            return None
        return few.sum_plan(self.down.matrix, router.choices, device)

    def project(self, x: Tensor, out: Tensor, plan: gemv_plan.Plan, *, norm: Norm) -> None:
        """out = x + experts(norm(x)), [1, hidden]."""
        device = gpu.of(x.device)
        router = self.router
        logits = self.words[: len(router.weight)]
        ring = router.ring(x.shape[1], device)
        own = {"LOGITS_ALONE": 1, "RING": ring}
        nothing = (None,) * 8  # of what `route` leaves besides
        kernel = jit.load("route.cu", defines=router.defines(x, 1, 1, 1) | own).kernel("route")
        shared = max((4 * ring + 2) * x.shape[1], reserved(device))
        given = (x, norm.weight, router.weight, logits)
        args = (*given, *nothing, None, router.bias, 1, norm.epsilon, router.routing.scale)
        kernel.launch((device.processors, 1), THREADS, args, shared=shared, pdl=True)
        gated = self._choose_and_multiply(x, norm=norm)
        sum_words(self.down, gated, self.words, router.choices, plan, residual=x, out=out)

    def _choose_and_multiply(self, x: Tensor, *, norm: Norm) -> Tensor:
        """experts.cu, of one token whose experts it finds out itself."""
        weight = self.gate_up
        router = self.router
        device = gpu.of(x.device)
        logits = self.words[: len(router.weight)]
        chosen = self.words[len(router.weight) :]
        # which share tiles out by themselves
        parts = (router.routing.chosen, int(router.joined))
        most = sum(math.ceil(n * weight.matrix.tiles / device.processors) for n in parts)
        linear = gemv_plan.fitting_plan(weight.matrix, 1, device, tiles=most)
        assert linear is not None
        out = weight.empty_result(router.choices, x.device)
        kernel = jit.load("experts.cu", defines=self._choosing(linear, device)).kernel("experts")
        args = (
            weight.weights,
            weight.records,
            weight.channel_scale,
            x,
            norm.weight,
            weight.bias,
            out,
            logits,
            chosen,
            router.bias,
            router.routing.scale,
            norm.epsilon,
        )
        kernel.launch(device.processors, linear.threads, args, shared=linear.shared, pdl=True)
        return out

    def _choosing(self, linear: gemv_plan.Plan, device: Gpu) -> dict[str, int]:
        """The defines of experts.cu that chooses."""
        weight = self.gate_up
        router = self.router
        defines = gemv.defines(weight, 1, linear, device, norm=True, epilogue=weight.epilogue(None))
        defines |= {"PER_SLOT": 0, "CHOOSES": 1, "JOINED": int(router.joined)}
        defines |= router.routing.defines | {"GATE": int(router.gated)}
        # inputs are there long before the choice
        defines["HELD"] = 0
        if router.bias is not None:
            defines["BIASED"] = 1
        return defines


def sum_words(
    weight: TiledWeight,
    x: Tensor,
    words: Tensor,
    choices: int,
    plan: gemv_plan.Plan,
    *,
    residual: Tensor,
    out: Tensor,
) -> None:
    """`sum_rows` where experts and shares are the last of `words`, and the logits the others."""
    device = gpu.of(x.device)
    inner = weight.in_features
    logits = len(words) - 2 * choices
    defines = gemv.defines(weight, 1, plan, device, norm=False, epilogue="residual")
    defines |= {"KDIM": choices * inner, "SLOT_BLOCKS": inner // 64, "CHOOSES": logits}
    kernel = jit.load("experts_sum.cu", defines=defines).kernel("experts_sum")
    arrived = workspace.current(x.device).bytes("experts arrived", 4)
    tables = (words[logits:], residual, out, None, words)
    args = (weight.weights, weight.records, x, *tables, arrived)
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)
