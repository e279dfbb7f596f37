"""Learned rounding: nudge every weight by up to half a step, and every scale a little, to match the block's output.

Sign-SGD as AutoRound does: V moves by ±rate each step, the rate falling to zero; the rounding itself passes gradients
straight through. It starts from a finished solution (GPTQ's codes), not from the nearest one, sees the inputs that the
quantized model will give it and aims at the outputs of the original model. The result is kept only if its loss over
all samples is lower than at the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import reference
from flyweight.models.decoder import Block, Context
from flyweight.quant.grid import stored
from flyweight.quant.work import WorkBlock, root_mean_square
from flyweight.tensors import IntGroup

TOKENS_TOGETHER = 1 << 14  # in one forward and backward pass on a GPU


@dataclass(frozen=True)
class Learning:
    steps: int = 200
    batch: int = 8  # sequences in a step
    rate: float = 0.0  # 0: one over the number of steps
    scale_rate: float = 0.2  # of the rate of the nudges
    seed: int = 0
    relative: bool = False  # each token's error over the size of its hidden state


def straight_round(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


class Nudged:
    """One integer weight with its nudges V [out, in] and scale factors [out, groups]."""

    def __init__(self, tensor: IntGroup, weight: Tensor) -> None:
        self.tensor, self.steps = tensor, 2**tensor.bits - 1
        groups = tensor.group_of_column()
        self.groups, self.scales = groups, tensor.scales.float()
        zeros = torch.full_like(self.scales, 2 ** (tensor.bits - 1)) if tensor.zeros is None else tensor.zeros.float()
        self.zeros = zeros[:, groups]
        codes = tensor.values().float()
        ideal = weight / self.scales[:, groups] + self.zeros
        # Where the solver moved away from the nearest code, start at the edge that is closest to the original weight.
        self.start = codes + (ideal - codes).clamp(-0.45, 0.45) - self.zeros
        self.nudge = torch.zeros_like(self.start, requires_grad=True)
        self.factor = torch.ones_like(self.scales, requires_grad=True)

    def codes(self, round_to: Callable[[Tensor], Tensor]) -> Tensor:
        position = self.start / self.factor[:, self.groups] + self.zeros + self.nudge
        return torch.clamp(round_to(position), 0, self.steps)

    def weight(self) -> Tensor:
        return (self.codes(straight_round) - self.zeros) * (self.scales * self.factor)[:, self.groups]

    @torch.no_grad()
    def move(self, rate: float, scale_rate: float) -> None:
        assert self.nudge.grad is not None and self.factor.grad is not None
        self.nudge -= rate * self.nudge.grad.sign()
        self.nudge.clamp_(-0.5, 0.5)
        self.factor -= scale_rate * self.factor.grad.sign()
        self.factor.clamp_(0.8, 1.25)
        self.nudge.grad = self.factor.grad = None

    @torch.no_grad()
    def result(self) -> IntGroup:
        scales = stored(self.scales * self.factor, self.tensor.scales.dtype).to(self.tensor.scales.dtype)
        made = IntGroup.from_values(self.codes(torch.round).int(), scales, self.tensor.zeros, bits=self.tensor.bits,
                                    group_size=self.tensor.group_size)
        return dataclasses.replace(made, g_idx=self.tensor.g_idx)


def learn_rounding(work: WorkBlock, inputs: Sequence[Tensor], targets: Sequence[Tensor], context: Context,
                   settings: Learning) -> tuple[float, float]:
    """Improve the integer weights of `work` in place; returns the relative output error before and after."""
    nudged = {name: Nudged(tensor, work.weights[name]) for name, tensor in work.quantized.items() if isinstance(tensor, IntGroup)}
    before = output_error(work, inputs, targets, context, relative=settings.relative)
    if not nudged or settings.steps < 1:
        return before, before
    original = dict(work.quantized)
    block = trainable(work, nudged)
    generator = torch.Generator().manual_seed(settings.seed + work.index)
    rate = settings.rate or 1 / settings.steps
    sequences = [(i, row) for i in range(len(inputs)) for row in range(inputs[i].shape[0])]
    together = max(1, TOKENS_TOGETHER // inputs[0].shape[1]) if work.device.type == "cuda" else 1
    for step in range(settings.steps):
        picked = torch.randperm(len(sequences), generator=generator)[: settings.batch].tolist()
        for begin in range(0, len(picked), together):  # memory is bounded by so many tokens
            some = [sequences[place] for place in picked[begin : begin + together]]
            x, target = (torch.stack([cache[i][row] for i, row in some]) for cache in (inputs, targets))
            with torch.enable_grad():
                difference = block.forward(x, context).float() - target.float()
                (difference / root_mean_square(target) if settings.relative else difference).square().sum().backward()
        now = rate * (1 - step / settings.steps)
        for item in nudged.values():
            item.move(now, now * settings.scale_rate)
    work.quantized.update({name: item.result() for name, item in nudged.items()})
    after = output_error(work, inputs, targets, context, relative=settings.relative)
    if not after < before:
        work.quantized = original
        after = before
    return before, after


def trainable(work: WorkBlock, nudged: dict[str, Nudged]) -> Block:
    """The block with weights that are computed from nudges at every call, and ops that gradients pass through."""
    block = work.build()
    block.ops = reference
    if block.experts is not None:
        block.experts.ops = reference
    for group in work.groups:
        parts = [nudged.get(name) or work.quantized[name].dequantize(work.dtype) for name in group.linears]
        if any(isinstance(part, Nudged) for part in parts):
            block.linears[group.name].single = joined(parts, work.dtype)
    return block


def joined(parts: Sequence[Nudged | Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        weights = [part.weight().to(dtype) if isinstance(part, Nudged) else part for part in parts]
        return F.linear(x, torch.cat(weights))

    return run


@torch.no_grad()
def output_error(work: WorkBlock, inputs: Sequence[Tensor], targets: Sequence[Tensor], context: Context, *,
                 relative: bool = False) -> float:
    """Relative squared error of the block's own contribution to the hidden state."""
    block, above, below = work.build(), 0.0, 0.0
    for i in range(len(inputs)):
        x, target = inputs[i].float(), targets[i].float()
        sizes = root_mean_square(target) if relative else 1.0
        above += float(((block.forward(inputs[i], context).float() - target) / sizes).square().sum(dtype=torch.float64))
        below += float(((target - x) / sizes).square().sum(dtype=torch.float64))
    return above / max(below, 1e-30)
