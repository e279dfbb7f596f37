"""Mixture of experts: a router in float32 sends each token to a few experts; a shared expert may
see them all.

    out[t] = Σ over the chosen e of p[t, e] · down_e(act(gate_e x) · up_e x)  (+ σ(s · x) · shared
    expert)

Tokens are sorted by expert and each expert that has any runs once, so only the experts used are
read. The products are laid down by (token, choice) and summed over the choices: no atomics, the
same bytes every time. Counting the tokens of each expert brings the counts to the host once a
layer; where kernels take all experts as one (`grouped`) nothing does.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight import gpu
from flyweight.kernels.linear.experts.grouped import GroupedExperts
from flyweight.kernels.linear.experts.routing import Routing
from flyweight.kernels.linear.fused import Norm
from flyweight.models.buffers import Buffers
from flyweight.models.layers import Linear, Weights, load_tensor
from flyweight.models.mlp import GatedMlp
from flyweight.models.plan import ExpertsPlan, Group, LayerPlan, RouterPlan
from flyweight.values import has_values


class Router:
    def __init__(self, plan: RouterPlan, weight: Tensor, bias: Tensor | None = None):
        self.plan = plan
        self.weight = weight  # float32 [experts, hidden]
        self.bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares in float32 and experts, [tokens, chosen] each."""
        plan = self.plan
        logits = F.linear(x.float(), self.weight)
        if plan.kind == "chosen_softmax":
            best, chosen = (logits if self.bias is None else logits + self.bias).topk(
                plan.chosen, -1
            )
            shares = best.softmax(-1)
        elif plan.kind == "sigmoid":
            scores = logits.sigmoid()
            judged = scores if self.bias is None else scores + self.bias
            chosen = self._best_groups(judged).topk(plan.chosen, -1).indices
            shares = scores.gather(-1, chosen)
        else:
            shares, chosen = self._best_groups(logits.softmax(-1)).topk(plan.chosen, -1)
        if plan.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares if plan.scale == 1 else shares * plan.scale, chosen

    def _best_groups(self, scores: Tensor) -> Tensor:
        """−∞ for experts outside the best groups: those whose two best experts have the largest
        sums, or (softmax) whose best one is the largest.
        """
        plan = self.plan
        if plan.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (plan.groups, -1))
        sums = grouped.topk(2 if plan.kind == "sigmoid" else 1, -1).values.sum(-1)
        best = sums.topk(plan.chosen_groups, -1).indices
        seen = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best, True)
        return grouped.masked_fill(~seen[..., None], -torch.inf).flatten(-2)


def routing_of(plan: RouterPlan) -> Routing:
    """As the kernels know it: the softmax of the chosen logits is that of all, made to add up to
    1.
    """
    return Routing(
        plan.experts,
        plan.chosen,
        plan.normalize or plan.kind == "chosen_softmax",
        sigmoid=plan.kind == "sigmoid",
        groups=plan.groups,
        chosen_groups=plan.chosen_groups,
        scale=plan.scale,
    )


class Experts:
    """The MLP of one layer with experts."""

    def __init__(
        self,
        plan: ExpertsPlan,
        linears: dict[str, Linear],
        *,
        router: Router,
        shared_gate: Tensor | None,
        ops: ModuleType,
    ):
        self.plan = plan
        self.ops = ops
        self.router = router
        self.shared_gate = shared_gate  # [1, hidden]
        self.members = [GatedMlp(one, linears) for one in plan.experts]
        self.shared = GatedMlp(plan.shared, linears) if plan.shared else None
        found = self._group()
        self.grouped = None if isinstance(found, str) else found
        self.ungrouped = found if isinstance(found, str) else None  # why

    @classmethod
    def load(
        cls,
        weights: Weights,
        layer: LayerPlan,
        linears: dict[str, Linear],
        *,
        ops: ModuleType,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Experts:
        plan = layer.mlp
        assert isinstance(plan, ExpertsPlan)
        router = plan.router
        hidden = layer.hidden_size
        prefix = layer.prefix
        weight = load_tensor(
            weights,
            prefix + router.weight,
            (router.experts, hidden),
            device=device,
            dtype=torch.float32,
        )
        bias = gate = None
        if router.bias is not None:
            bias = load_tensor(
                weights, prefix + router.bias, (router.experts,), device=device, dtype=torch.float32
            )
        if plan.shared_gate is not None:
            gate = load_tensor(
                weights, prefix + plan.shared_gate, (1, hidden), device=device, dtype=dtype
            )
        return cls(plan, linears, router=Router(router, weight, bias), shared_gate=gate, ops=ops)

    def _group(self) -> GroupedExperts | str:
        """All experts as one, or why not."""
        plan = self.plan.router
        shared = (self.shared.gate_up.fused, self.shared.down.fused) if self.shared else None
        return GroupedExperts.make(
            [one.gate_up.fused for one in self.members],
            [one.down.fused for one in self.members],
            router=self.router.weight,
            routing=routing_of(plan),
            bias=self.router.bias,
            shared_gate=self.shared_gate,
            shared=shared,
        )

    @property
    def router_nbytes(self) -> int:
        """Of the weights that choose experts, and the shared expert's share."""
        gate = 0 if self.shared_gate is None else self.shared_gate.numel() * torch.float32.itemsize
        return self.router.weight.nbytes + gate

    @property
    def first_group(self) -> Group | None:
        """None: no single group's output becomes the layer's."""
        return None

    @property
    def uncaptured_reason(self) -> str | None:
        return (
            self.ungrouped
            and f"the tokens of each expert are counted on the host: {self.ungrouped}"
        )

    def use_ops(self, ops: ModuleType) -> None:
        self.ops = ops

    def overlaps(self, rows: int) -> bool:
        return self.grouped is None or self.grouped.overlaps(
            rows, gpu.of(self.router.weight.device)
        )

    @property
    def waits_for_choices(self) -> bool:
        """Whether kernels of one token wait for each other's words, while memory is idle."""
        return self.grouped is not None and self.grouped.by_words

    @property
    def watched(self) -> bool:
        return any(
            one.gate_up.watch is not None or one.down.watch is not None for one in self.members
        )

    def project(
        self,
        hidden: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None,
        residual: Tensor | None,
        buffers: Buffers | None = None,
        lengths: Tensor | None = None,
        adapters: Tensor | None = None,
        beside: bool = False,
    ) -> Tensor:
        """residual + experts(norm(hidden)); rows of length 0 are padding. Experts have no adapters:
        loading refuses them. Nor do their kernels leave others room.
        """
        if (
            self.grouped is not None
            and norm is not None
            and residual is hidden
            and not self.watched
        ):
            flat = hidden.reshape(-1, hidden.shape[-1])
            target = None if out is None else out.view(-1, out.shape[-1])
            return self.grouped.project(flat, target, norm=norm, lengths=lengths).view(hidden.shape)
        y = self(hidden if norm is None else self.ops.normalize(hidden, norm))
        if residual is not None:
            return torch.add(y, residual, out=out)
        return y if out is None else out.copy_(y)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        out = self.routed(flat, *self.router(flat))
        if self.shared is not None:
            found = self.shared(flat)
            out = out + (
                found
                if self.shared_gate is None
                else F.linear(flat, self.shared_gate).sigmoid() * found
            )
        return out.view_as(x)

    def routed(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        if not has_values(chosen):  # nobody counts: all are the first one's
            return (
                self.members[0](x.repeat_interleave(chosen.shape[-1], 0))
                .view(*chosen.shape, -1)
                .sum(1)
            )
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.plan.router.experts).tolist()
        products = x.new_empty(chosen.numel(), x.shape[-1])
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                pairs = order[begin : begin + count]
                products[pairs] = self.members[expert](x[pairs // chosen.shape[-1]])
                begin += count
        return (products.view(*chosen.shape, -1) * shares.to(x.dtype)[..., None]).sum(1)
