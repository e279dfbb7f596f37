"""The experts of a layer as one: host side of cuda/route.cu, experts.cu and experts_sum.cu,
and of gemm.cu or (where that has no matrix units) gemm_mma.cu over rows sorted by expert.

The weights of all experts lie stacked in tiles; the kernels find out on the device which of them a
step needs, so nothing waits for the host and a step can be captured. Few tokens (`expert_rows` of
tuned) go through experts.cu (few.py; one token of many experts: words.py), more through pack.cu and
the matrix product (many.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear import gemv_plan
from flyweight.kernels.linear.experts import few
from flyweight.kernels.linear.experts.many import many_rows
from flyweight.kernels.linear.experts.router import DeviceRouter
from flyweight.kernels.linear.experts.routing import Routed, Routing
from flyweight.kernels.linear.experts.stacked import joined_parts, stack, unsupported_reason
from flyweight.kernels.linear.experts.words import ByWords, empty_words
from flyweight.kernels.linear.fused import FusedLinear, Norm
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight

# more are done in turns: by then every expert has enough rows, and rows cost memory
TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class GroupedExperts:
    """act(gate) · up and down of every expert, the router before and the weighted sum after
    them.
    """

    gate_up: TiledWeight  # stacked
    down: TiledWeight
    router: DeviceRouter
    # gate/up and down of the expert that sees every token
    shared: tuple[FusedLinear, FusedLinear] | None = None
    words: Tensor | None = None  # of words.py

    @classmethod
    def make(
        cls,
        gate_up: Sequence[FusedLinear],
        down: Sequence[FusedLinear],
        *,
        router: Tensor,
        routing: Routing,
        shared_gate: Tensor | None = None,
        shared: tuple[FusedLinear, FusedLinear] | None = None,
        bias: Tensor | None = None,
    ) -> GroupedExperts | str:
        """Stack the experts' weights, or say why not."""
        if router.device.type != "cuda":
            return "no CUDA device"
        device = gpu.of(router.device)
        for linear in shared or ():
            if not isinstance(linear, TiledLinear) or linear.weight.order is not None:
                return "the shared expert's format has no kernel for few rows"
        for part in (gate_up, down):
            if reason := unsupported_reason(part, device):
                return reason
        if any(isinstance(one, TiledLinear) and not one.weight.interleaved for one in gate_up):
            return "the kernels do not know the experts' activation"
        rows = [router] if shared_gate is None else [router, shared_gate.float()]
        members = (gate_up, down)
        joined = joined_parts(shared, members, routing.chosen, device) if shared else 0
        first, second = (
            stack([one for one in part if isinstance(one, TiledLinear)], behind, joined)
            for part, behind in zip(members, shared or (None, None), strict=True)
        )
        ready = torch.zeros(1, dtype=torch.int32, device=router.device)
        chooser = DeviceRouter(torch.cat(rows), ready, routing, bias, joined)
        words = empty_words(len(chooser.weight), chooser.choices, router.device)
        return cls(first, second, chooser, shared, words)

    def few(self, tokens: int, device: Gpu) -> bool:
        """Whether experts.cu takes them."""
        most = tuned.of(device).formats[self.down.format.name].expert_rows
        if tokens not in gemv_plan.ROWS or tokens > most:
            return False
        return gemv_plan.fits(self.gate_up.matrix, tokens, device) and gemv_plan.fits(
            self.down.matrix, tokens, device
        )

    @property
    def by_words(self) -> bool:
        """Whether the first linear of one token makes the choice itself."""
        return self._words_plan(gpu.of(self.router.weight.device)) is not None

    def overlaps(self, tokens: int, device: Gpu) -> bool:
        """Whether kernels of such a step may begin early: with 8 tokens CTAs of experts.cu that
        begin early gather on some SMs, which takes longer than the overlap saves.
        """
        return (
            not self.few(tokens, device) or tokens <= tuned.of(device).steps.overlapping_expert_rows
        )

    def project(
        self, x: Tensor, out: Tensor | None = None, *, norm: Norm, lengths: Tensor | None = None
    ) -> Tensor:
        """x + experts(norm(x)), [tokens, hidden]; out may be x. Rows of length 0 are padding."""
        assert lengths is None or len(x) <= TOKENS_AT_ONCE
        norm = norm.folded
        device = gpu.of(x.device)
        out = torch.empty_like(x) if out is None else out
        if len(x) == 1 and (plan := self._words_plan(device)) is not None:
            self._by_words.project(x, out, plan, norm=norm)
            return out
        for part, end in zip(x.split(TOKENS_AT_ONCE), out.split(TOKENS_AT_ONCE), strict=True):
            routed = self.route(part, norm=norm, lengths=lengths)
            shared = None
            if self.shared is not None and not self.router.joins(routed):
                gate_up, down = self.shared
                gated = gate_up.project(part, norm=norm, activation=self.gate_up.activation)
                shared = down.project(gated)
            elif (plan := self._sum_plan(routed, device)) is not None:
                gated = few.few_rows(self.gate_up, part, routed, norm=norm)
                few.sum_rows(self.down, gated, routed, plan, residual=part, out=end)
                continue
            self.combine(self.multiply(part, routed, norm=norm), routed, part, end, shared=shared)
        return out

    def route(self, x: Tensor, *, norm: Norm, lengths: Tensor | None = None) -> Routed:
        """Which rows which expert gets; see `DeviceRouter`."""
        by_token = self.few(len(x), gpu.of(x.device))
        return self.router.route(x, norm=norm, by_token=by_token, lengths=lengths)

    def combine(
        self,
        y: Tensor,
        routed: Routed,
        residual: Tensor | None,
        out: Tensor,
        *,
        shared: Tensor | None = None,
    ) -> None:
        """out = residual + each token's experts by their shares (+ the shared one by its gate)."""
        self.router.combine(y, routed, residual, out, shared=shared)

    def multiply(self, x: Tensor, routed: Routed, *, norm: Norm | None) -> Tensor:
        """The experts' own answers [rows, hidden], in the places that the route gave them."""
        if routed.source is None:
            parts = self.router.parts(routed)
            gated = few.few_rows(self.gate_up, x, routed, norm=norm, parts=parts)
            return few.few_rows(self.down, gated, routed, per_slot=True, parts=parts)
        gated = many_rows(self.gate_up, x, routed, source=routed.source, norm=norm)
        return many_rows(self.down, gated, routed)

    @property
    def _by_words(self) -> ByWords:
        assert self.words is not None
        return ByWords(self.gate_up, self.down, self.router, self.words)

    def _words_plan(self, device: Gpu) -> gemv_plan.Plan | None:
        if self.words is None or not self.few(1, device):
            return None
        if self.shared is not None and not self.router.joined:
            return None
        return self._by_words.plan(device)

    def _sum_plan(self, routed: Routed, device: Gpu) -> gemv_plan.Plan | None:
        """How the second linear adds up the choices of one token; None: `combine` does."""
        if routed.source is not None or routed.tile > 1 or self.down.bias is not None:
            return None
        if self.router.joined > 1:
            return None
        return few.sum_plan(self.down.matrix, routed.shares.shape[1], device)
