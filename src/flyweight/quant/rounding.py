"""Learned rounding: nudge every weight by up to half a step, and every scale a little, to match the
block's output.

Sign-SGD as AutoRound does: V moves by ±rate each step, the rate falling to zero; the rounding
itself passes gradients straight through. It starts from a finished solution (GPTQ's codes), not
from the nearest one, sees the inputs that the quantized model will give it and aims at the outputs
of the original model. The result is kept only if its loss over all samples is lower than at the
start.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flyweight.kernels import reference
from flyweight.models.attention import PromptStage
from flyweight.models.layer import Block
from flyweight.models.plan import Group
from flyweight.quant.cache import ActivationCache
from flyweight.quant.grid import stored
from flyweight.quant.statistics import matmul_precision
from flyweight.quant.work import WorkBlock, root_mean_square
from flyweight.tensors import IntGroup, QuantTensor, merge

TOKENS_TOGETHER = 1 << 14  # in one forward and backward pass on a GPU
# Attention whose gradients are the same every time.
SAME_GRADIENTS = functools.partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


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
    """Integer weights of siblings, row after row, with nudges [out, groups, size] and scale factors
    [out, groups, 1].

    W = (clamp(round(start / factor + nudge + zero)) − zero) · scale · factor. The gradient of W
    comes from the block's backward pass; what it means for nudges and factors is worked out here,
    in a fifth of the launches that autograd takes.
    """

    def __init__(self, tensors: Sequence[QuantTensor], weights: Sequence[Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if isinstance(tensor, IntGroup)]
        joined = merge(tensors)[0]
        assert isinstance(joined, IntGroup) and joined.g_idx is None
        self.steps = 2**joined.bits - 1
        groups = joined.groups
        self.scales = joined.scales.float()[..., None]
        middle = torch.full_like(self.scales, 2 ** (joined.bits - 1))
        self.zeros = middle if joined.zeros is None else joined.zeros.float()[..., None]
        codes = joined.values().float().unflatten(1, (groups, -1))
        ideal = torch.cat(list(weights)).unflatten(1, (groups, -1)) / self.scales + self.zeros
        # Where the solver moved away from the nearest code, start at the edge that is closest to
        # the original weight.
        self.start = codes + (ideal - codes).clamp(-0.45, 0.45) - self.zeros
        self.nudge = torch.zeros_like(self.start)
        self.factor = torch.ones_like(self.scales)
        self.weight: Tensor = torch.empty(0)

    def positions(self) -> Tensor:
        return torch.addcdiv(self.nudge + self.zeros, self.start, self.factor)

    def codes(self) -> Tensor:
        return self.positions().round_().clamp_(0, self.steps)

    def make(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] of the next pass, a leaf of its graph."""
        dense = (self.codes() - self.zeros).mul_(self.scales * self.factor).flatten(1).to(dtype)
        self.weight = dense.requires_grad_()
        return self.weight

    def move(self, rate: float, scale_rate: float) -> None:
        assert self.weight.grad is not None
        gradient = self.weight.grad.float().unflatten(1, self.start.shape[1:])
        positions = self.positions()
        rounded = positions.round()
        inside = (rounded >= 0) & (rounded <= self.steps)  # a clamped code does not feel its nudge
        gradient *= self.scales
        felt = gradient * inside
        # d W / d factor = (code − zero) · scale, less what the division inside the rounding takes
        # back
        by_factor = (gradient * (rounded.clamp_(0, self.steps) - self.zeros)).sub_(
            felt * self.start / self.factor
        )
        self.nudge.sub_(felt.sign_(), alpha=rate).clamp_(-0.5, 0.5)
        self.factor.sub_(by_factor.sum(-1, keepdim=True).sign_(), alpha=scale_rate).clamp_(
            0.8, 1.25
        )
        self.weight.grad = None

    def result(self) -> list[IntGroup]:
        dtype = self.tensors[0].scales.dtype
        scales = stored(self.scales * self.factor, dtype)[..., 0].to(dtype)
        sizes = [tensor.matrix_shape[0] for tensor in self.tensors]
        return [
            IntGroup.from_values(
                codes, part, tensor.zeros, bits=tensor.bits, group_size=tensor.group_size
            )
            for tensor, codes, part in zip(
                self.tensors,
                self.codes().int().flatten(1).split(sizes),
                scales.split(sizes),
                strict=True,
            )
        ]


def learn_rounding(
    work: WorkBlock,
    inputs: ActivationCache,
    targets: ActivationCache,
    context: PromptStage,
    settings: Learning,
) -> tuple[float, float]:
    """Improve the integer weights of `work` in place; returns the relative output error before and
    after.
    """
    nudged = {
        group: Nudged(
            [work.quantized[name] for name in group.linears],
            [work.weights[name] for name in group.linears],
        )
        for group in work.groups
        if learnable([work.quantized[name] for name in group.linears])
    }
    before = output_error(work, inputs, targets, context, relative=settings.relative)
    if not nudged or settings.steps < 1:
        return before, before
    original = dict(work.quantized)
    with matmul_precision("high"), SAME_GRADIENTS():
        descend(work, nudged, inputs, targets, context, settings)
    for group, item in nudged.items():
        work.quantized |= dict(zip(group.linears, item.result(), strict=True))
    after = output_error(work, inputs, targets, context, relative=settings.relative)
    if not after < before:
        work.quantized = original
        after = before
    return before, after


def descend(
    work: WorkBlock,
    nudged: dict[Group, Nudged],
    inputs: ActivationCache,
    targets: ActivationCache,
    context: PromptStage,
    settings: Learning,
) -> None:
    """Sign-SGD on the nudges."""
    block = trainable(work)
    samples = inputs.samples
    generator = torch.Generator().manual_seed(settings.seed + work.index)
    rate = settings.rate or 1 / settings.steps
    together = max(1, TOKENS_TOGETHER // inputs[0].shape[1]) if work.device.type == "cuda" else 1
    for step in range(settings.steps):
        for group, item in nudged.items():
            block.linears[group.name].substitute(
                functools.partial(F.linear, weight=item.make(work.dtype))
            )
        picked = torch.randperm(len(samples), generator=generator)[: settings.batch].tolist()
        for begin in range(0, len(picked), together):  # memory is bounded by so many tokens
            some = [samples[place] for place in picked[begin : begin + together]]
            x, target = (
                torch.stack([cache.sample(place) for place in some]) for cache in (inputs, targets)
            )
            with torch.enable_grad():
                difference = block.forward(x, context).float() - target.float()
                (
                    difference / root_mean_square(target) if settings.relative else difference
                ).square().sum().backward()
        now = rate * (1 - step / settings.steps)
        for item in nudged.values():
            item.move(now, now * settings.scale_rate)


def learnable(siblings: Sequence[QuantTensor]) -> bool:
    """Integers that are alike, so that they can be taken as one weight."""
    return all(isinstance(tensor, IntGroup) for tensor in siblings) and len(merge(siblings)) == 1


def trainable(work: WorkBlock) -> Block:
    """The block with ops that gradients pass through."""
    block = work.build()
    block.use_ops(reference)
    return block


@torch.no_grad()
def output_error(
    work: WorkBlock,
    inputs: ActivationCache,
    targets: ActivationCache,
    context: PromptStage,
    *,
    relative: bool = False,
) -> float:
    """Relative squared error of the block's own contribution to the hidden state."""
    block = work.build()
    above = 0.0
    below = 0.0
    for i in range(len(inputs)):
        x = inputs[i].float()
        target = targets[i].float()
        sizes = root_mean_square(target) if relative else 1.0
        above += float(
            ((block.forward(inputs[i], context).float() - target) / sizes)
            .square()
            .sum(dtype=torch.float64)
        )
        below += float(((target - x) / sizes).square().sum(dtype=torch.float64))
    return above / max(below, 1e-30)
