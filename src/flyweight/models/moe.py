"""Mixture of experts: a router in float32 sends each token to a few experts; a shared expert may see them all.

    out[t] = Σ over the chosen e of p[t, e] · down_e(silu(gate_e x) · up_e x)  (+ sigmoid(s · x) · shared expert)

Tokens are sorted by expert and each expert that has any runs once, so only the experts used are read. The products are
laid down by (token, choice) and summed over the choices: no atomics, the same bytes every time. Counting the tokens of
each expert brings the counts to the host once a layer; where kernels take all experts as one (`grouped`) nothing does.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight import gpu
from flyweight.checkpoint.names import ROUTER, SHARED_GATE
from flyweight.kernels import experts
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.models.layers import Linear, Weights, load_tensor

if TYPE_CHECKING:
    from flyweight.models.config import ModelConfig, MoeConfig

PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def members(moe: MoeConfig) -> list[tuple[str, int]]:
    """(name, width) of every expert of a layer, the shared one first."""
    shared = [("shared_expert", moe.shared_intermediate_size)] if moe.shared_intermediate_size else []
    return [*shared, *((f"experts.{i}", moe.intermediate_size) for i in range(moe.experts))]


def groups(moe: MoeConfig) -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, source, linears) as `decoder.Group` wants them: all gate/up first, then all down."""
    source = {"gate_up": "post_attention_layernorm", "down": ""}
    return [(f"{name}.{part}", source[part] or f"mlp.{name}.up_proj", tuple(f"mlp.{name}.{linear}" for linear in linears))
            for part, linears in PARTS.items() for name, _ in members(moe)]


def shapes(config: ModelConfig) -> dict[str, tuple[list[int], int, bool]]:
    """group: (outputs of each linear, inputs, whether there is a bias)"""
    assert config.moe is not None
    found: dict[str, tuple[list[int], int, bool]] = {}
    for name, width in members(config.moe):
        found[f"{name}.gate_up"] = [width] * 2, config.hidden_size, False
        found[f"{name}.down"] = [config.hidden_size], width, False
    return found


class Experts:
    """The MLP of one layer with experts; `linears` by group name."""

    def __init__(self, config: MoeConfig, linears: dict[str, Linear], *, router: Tensor, shared_gate: Tensor | None,
                 ops: ModuleType):
        self.config, self.linears, self.ops = config, linears, ops
        self.router = router  # float32 [experts, hidden]
        self.shared_gate = shared_gate  # [1, hidden]
        self.grouped: experts.Grouped | None = None
        self.why_not = self._group()  # why it is None

    @classmethod
    def load(cls, weights: Weights, config: ModelConfig, prefix: str, linears: dict[str, Linear], *, ops: ModuleType,
             device: torch.device | str, dtype: torch.dtype) -> Experts:
        moe, hidden = config.moe, config.hidden_size
        assert moe is not None
        router = load_tensor(weights, prefix + ROUTER, (moe.experts, hidden), device=device, dtype=torch.float32)
        gate = None
        if moe.shared_intermediate_size:
            gate = load_tensor(weights, prefix + SHARED_GATE, (1, hidden), device=device, dtype=dtype)
        return cls(moe, linears, router=router, shared_gate=gate, ops=ops)

    def _group(self) -> str | None:
        """Stack the experts' weights, or say why not."""
        if self.router.device.type != "cuda":
            return "no CUDA device"
        count = self.config.experts
        parts = [[self.linears[f"experts.{i}.{part}"].single for i in range(count)] for part in PARTS]
        shared = [self.linears[f"shared_expert.{part}"].single for part in PARTS] if self.shared_gate is not None else []
        if not all(isinstance(linear, CudaLinear) for linear in shared):
            return "the shared expert's format has no kernel for few rows"
        if reason := next(filter(None, (experts.why_not(part, self.router.device) for part in parts)), None):
            return reason
        rows = [self.router] if self.shared_gate is None else [self.router, self.shared_gate.float()]
        gate_up, down = (experts.stack(cast(list[CudaLinear], part)) for part in parts)
        ready = torch.zeros(1, dtype=torch.int32, device=self.router.device)
        self.grouped = experts.Grouped(gate_up, down, torch.cat(rows), ready, count, self.config.experts_per_token,
                                       self.config.normalize_weights)
        return None

    def fused(self, x: Tensor, out: Tensor | None = None, *, norm: Tensor, epsilon: float,
              lengths: Tensor | None = None) -> Tensor:
        """x + experts(norm(x)), [tokens, hidden], through the grouped kernels; out may be x. Rows of length 0 are padding."""
        assert self.grouped is not None and (lengths is None or len(x) <= experts.TOKENS_AT_ONCE)
        out = torch.empty_like(x) if out is None else out
        for part, end in zip(x.split(experts.TOKENS_AT_ONCE), out.split(experts.TOKENS_AT_ONCE), strict=True):
            route = self.grouped.route(part, norm=norm, epsilon=epsilon, lengths=lengths)
            shared = None if self.shared_gate is None else self.run("shared_expert", part, norm=norm, epsilon=epsilon)
            y = self.grouped.multiply(part, route, norm=norm, epsilon=epsilon)
            self.grouped.combine(y, route, part, end, shared=shared)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        out = self.routed(flat, *self.route(flat))
        if self.shared_gate is not None:
            out = out + F.linear(flat, self.shared_gate).sigmoid() * self.run("shared_expert", flat)
        return out.view_as(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares in float32 and experts, [tokens, chosen] each."""
        shares, chosen = F.linear(x.float(), self.router).softmax(-1).topk(self.config.experts_per_token, -1)
        return shares / shares.sum(-1, keepdim=True) if self.config.normalize_weights else shares, chosen

    def routed(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs by expert
        if gpu.is_pretended():  # nobody counts: all are the first one's
            return self.run("experts.0", x.repeat_interleave(chosen.shape[-1], 0)).view(*chosen.shape, -1).sum(1)
        counts = torch.bincount(chosen.flatten(), minlength=self.config.experts).tolist()
        products = x.new_empty(chosen.numel(), x.shape[-1])
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                pairs = order[begin : begin + count]
                products[pairs] = self.run(f"experts.{expert}", x[pairs // chosen.shape[-1]])
                begin += count
        return (products.view(*chosen.shape, -1) * shares.to(x.dtype)[..., None]).sum(1)

    def run(self, name: str, x: Tensor, *, norm: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
        """One expert; the norm only where its linears have one."""
        gate_up, down = (self.linears[f"{name}.{part}"] for part in PARTS)
        if isinstance(gate_up.single, CudaLinear) and isinstance(down.single, CudaLinear) and gate_up.watch is None:
            return down.single.fused(gate_up.single.fused(x, norm=norm, epsilon=epsilon))
        assert norm is None
        return down(self.ops.silu_mul(gate_up(x)))
