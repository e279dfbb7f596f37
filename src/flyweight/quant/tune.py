"""Tuning of the whole: what is not a code (scales, codebooks, norms) moves until the model predicts
what the original does.

    loss = KL(original ‖ quantized), the mean over calibration tokens

    forward    h₀ → block 0 → h₁ → … → hₙ        hidden states are kept, nothing else
    backward   … ← h₁ ← block i once more, with gradients; what it is made of moves at once

No gradient outlives its block: memory holds the packed weights, the hidden states of one batch and
one dense block. With `rounding` codes move too: each is a float32 with Adam's two averages (twelve
bytes a weight), is rounded wherever it is used, and gets the gradient of what it was rounded to.
Some samples are held out; the result is kept only if their loss falls.

`tune_block` does the same to one block alone, towards the output of the original's block, before
the blocks behind it are solved: those then see inputs that are nearer to the original's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm
from flyweight.models.attention import PromptStage
from flyweight.quant.cache import ActivationCache
from flyweight.quant.rounding import SAME_GRADIENTS, output_error, trainable
from flyweight.quant.statistics import matmul_precision
from flyweight.quant.work import WorkBlock, input_quantizer
from flyweight.tensors import IntGroup, QuantTensor, VectorQuant

ROWS = 1024  # tokens whose logits are held at a time
HELD_OUT = 16  # one sample of so many
FIELDS = {  # kind → what may move
    "int": ("scales",),
    "w8a8": ("scales",),
    "vptq": ("codebook", "residual", "outlier_codebook", "scale", "bias"),
}
BOOKS = ("codebook", "residual", "outlier_codebook", "bias")


@dataclass(frozen=True)
class Tuning:
    steps: int = 200
    batch: int = 8  # sequences in a step
    rate: float = 1e-3  # Adam's first step, as a share of the size of what moves
    rounding: float = 0.0  # how many steps of its grid a code can travel in all
    seed: int = 0


class Movable:
    """A tensor that is stored in some dtype, and its float32 move in units of its own size."""

    def __init__(self, stored: Tensor, *, alike: bool = False) -> None:
        """`alike`: entries that share one unit, their root mean square; else each has its own."""
        self.stored = stored
        self.start = stored.float()
        size = self.start.square().mean().sqrt()
        self.unit = size if alike else self.start.abs().clamp(min=1e-3 * float(size) + 1e-30)
        self.move = torch.zeros_like(self.start, requires_grad=True)

    def value(self) -> Tensor:
        return self.start + self.unit * self.move

    def result(self) -> Tensor:
        return self.value().detach().to(self.stored.dtype)


class Through(torch.autograd.Function):
    """Rounding that passes its gradient on."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Part:
    """One quantized weight with what may move in it; indices of vectors lie unpacked, eight bytes
    each.
    """

    def __init__(self, tensor: QuantTensor, *, rounding: bool) -> None:
        self.tensor = tensor
        self.moves = {
            name: Movable(getattr(tensor, name), alike=name in BOOKS)
            for name in FIELDS.get(tensor.kind, ())
            if getattr(tensor, name) is not None
        }
        self.codes: Tensor | None = None  # less their zero points [out, groups, size]
        self.indices = None
        self.moving = rounding and isinstance(tensor, IntGroup)
        if isinstance(tensor, IntGroup):
            codes = tensor.integers().unflatten(1, (tensor.groups, -1))
            if self.moving:
                self.codes = codes.float().requires_grad_()
            else:
                self.codes = codes.to(torch.int8 if tensor.bits < 8 else torch.int16)
        elif isinstance(tensor, VectorQuant):
            self.indices = tensor.split_indices()

    def zeros(self) -> Tensor:
        """[out, groups, 1] or a number for all."""
        assert isinstance(self.tensor, IntGroup)
        if self.tensor.zeros is None:
            return torch.tensor(2.0 ** (self.tensor.bits - 1), device=self.tensor.device)
        return self.tensor.zeros.float()[..., None]

    @torch.no_grad()
    def stay_inside(self) -> None:
        """A code beyond the edge of its grid would have to come back before it counts again."""
        assert isinstance(self.tensor, IntGroup) and self.codes is not None
        zeros = self.zeros()
        self.codes.clamp_(-zeros - 0.49, 2**self.tensor.bits - 1 - zeros + 0.49)

    def weight(self) -> Tensor:
        values = {name: field.value() for name, field in self.moves.items()}
        if isinstance(self.tensor, IntGroup) and self.tensor.g_idx is None:
            assert self.codes is not None
            codes = Through.apply(self.codes) if self.moving else self.codes
            return (codes * values["scales"][..., None]).flatten(1)
        tensor = dataclasses.replace(self.tensor, **values)
        return (
            tensor.decode(*self.indices)
            if isinstance(tensor, VectorQuant) and self.indices
            else tensor.dequantize()
        )

    @torch.no_grad()
    def result(self) -> QuantTensor:
        made = dataclasses.replace(
            self.tensor, **{name: field.result() for name, field in self.moves.items()}
        )
        if not self.moving:
            return made
        assert isinstance(made, IntGroup) and self.codes is not None
        return IntGroup.from_values(
            (self.codes.round() + self.zeros()).int().flatten(1),
            made.scales,
            made.zeros,
            bits=made.bits,
            group_size=made.group_size,
        )


class TunedBlock:
    """A finished block whose weights are computed from what moves, at every call."""

    def __init__(self, work: WorkBlock, context: PromptStage, settings: Tuning) -> None:
        self.work = work
        self.context = context
        self.settings = settings
        self.parts = {
            name: Part(tensor, rounding=settings.rounding > 0)
            for name, tensor in work.quantized.items()
            if tensor.kind in FIELDS
        }
        self.norms = {
            norm.name: Movable(work.others[f"{norm.name}.weight"]) for norm in work.plan.norms
        }
        moving = [
            *self.norms.values(),
            *(field for part in self.parts.values() for field in part.moves.values()),
        ]
        groups = [{"params": [field.move for field in moving]}]
        codes = [part.codes for part in self.parts.values() if part.moving]
        if codes:
            groups.append({"params": codes})
        self.adam = torch.optim.Adam(
            groups, lr=settings.rate, betas=(0.9, 0.95), fused=work.device.type == "cuda"
        )

        self.block = trainable(work)
        for linear in self.block.linears.values():
            linear.substitute(None)  # their dense weights are made at every call
        work.unpacked.clear()

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.work.dtype
        for group in self.work.groups:
            self.block.linears[group.name].substitute(self.joined(group.linears))
        for name, norm in self.norms.items():
            before = self.block.norms[name]
            self.block.norms[name] = replace(before, weight=norm.value().to(dtype))
        out = self.block.forward(x, self.context)
        for linear in self.block.linears.values():
            linear.substitute(None)
        return out

    def joined(self, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
        dense = [
            self.parts[name].weight() if name in self.parts else self.work.dense(name)
            for name in names
        ]
        weight = torch.cat([part.to(self.work.dtype) for part in dense])
        quantize_input = input_quantizer([self.work.quantized.get(name) for name in names])

        def run(x: Tensor) -> Tensor:
            seen = quantize_input(x.detach())
            return F.linear(x if seen is x else x + (seen - x).detach(), weight)

        return run

    def backward(self, x: Tensor, gradient: Tensor, share: float) -> Tensor:
        """The gradient of the input; parameters have moved by `share` of the first step's rate."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            self.forward(x).backward(gradient)
        self.move(share)
        assert x.grad is not None
        return x.grad

    def move(self, share: float) -> None:
        """By the gradients that are there."""
        rates = (self.settings.rate, 2 * self.settings.rounding / self.settings.steps)
        for group, rate in zip(self.adam.param_groups, rates, strict=False):
            group["lr"] = rate * share
        self.adam.step()
        self.adam.zero_grad()
        for part in self.parts.values():
            if part.moving:
                part.stay_inside()

    def finish(self) -> None:
        self.work.quantized |= {name: part.result() for name, part in self.parts.items()}
        self.work.others |= {f"{name}.weight": field.result() for name, field in self.norms.items()}


class Predictions:
    """Final norm and head: how far the predictions from one hidden state are from those of the
    other.
    """

    def __init__(
        self, norm: Norm, head: Tensor, shape: Callable[[Tensor], Tensor] = lambda logits: logits
    ) -> None:
        self.norm = norm
        self.head = head
        self.shape = shape  # what a family does to its logits

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        logits = F.linear(reference.normalize(hidden, self.norm), self.head).float()
        return torch.log_softmax(self.shape(logits), -1)

    def divergence(
        self, hidden: Tensor, wanted: Tensor, *, gradient: bool
    ) -> tuple[float, Tensor | None]:
        """(mean KL over tokens, its gradient by hidden [sequences, tokens, size])"""
        total = 0.0
        parts = []
        count = hidden[..., 0].numel()
        for x, y in zip(
            hidden.flatten(0, 1).split(ROWS), wanted.flatten(0, 1).split(ROWS), strict=True
        ):
            x = x.detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                loss = (
                    F.kl_div(
                        self.log_probabilities(x),
                        self.log_probabilities(y),
                        reduction="sum",
                        log_target=True,
                    )
                    / count
                )
            total += float(loss.detach())
            if gradient:
                loss.backward()
                parts.append(x.grad)
        return total, torch.cat(parts).view_as(hidden) if gradient else None


@torch.no_grad()
def tune_block(
    work: WorkBlock,
    inputs: ActivationCache,
    targets: ActivationCache,
    context: PromptStage,
    settings: Tuning,
) -> tuple[float, float]:
    """Improve one solved block in place; returns its relative output error before and after."""
    before = output_error(work, inputs, targets, context)
    original = (dict(work.quantized), dict(work.others))
    block = TunedBlock(work, context, settings)
    samples = inputs.samples
    generator = torch.Generator().manual_seed(settings.seed + work.index)
    with matmul_precision("high"), SAME_GRADIENTS():
        for step in range(settings.steps):
            picked = torch.randperm(len(samples), generator=generator)[: settings.batch].tolist()
            x, wanted = (
                torch.stack([cache.sample(samples[i]) for i in picked])
                for cache in (inputs, targets)
            )
            gradient = block.forward(x) - wanted  # of half the squared error
            block.backward(x, gradient, 1 - step / settings.steps)
    block.finish()
    after = output_error(work, inputs, targets, context)
    if not after < before:
        work.quantized, work.others = original
        after = before
    return before, after


@torch.no_grad()
def tune(
    works: Sequence[WorkBlock],
    inputs: Callable[[int], Tensor],
    targets: Callable[[int], Tensor],
    samples: int,
    predictions: Predictions,
    context: PromptStage,
    settings: Tuning,
    listen: Callable[[int], None] = lambda step: None,
) -> dict[str, float]:
    """Improve finished blocks in place. `inputs` and `targets` give a sample's embedding and the
    original's last hidden state.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held_out = order[: samples // HELD_OUT] or order
    used = order[len(held_out) :] or order
    originals = [(dict(work.quantized), dict(work.others)) for work in works]

    def batch(picked: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([inputs(i) for i in picked]), torch.stack([targets(i) for i in picked])

    def loss() -> float:
        """On the samples that are held out."""
        total = 0.0
        for begin in range(0, len(held_out), settings.batch):
            picked = held_out[begin : begin + settings.batch]
            x, wanted = batch(picked)
            for work in works:
                x = work.build().forward(x, context)
                work.unpacked.clear()
            total += len(picked) * predictions.divergence(x, wanted, gradient=False)[0]
        return total / len(held_out)

    before = loss()
    generator = torch.Generator().manual_seed(settings.seed)
    blocks = [TunedBlock(work, context, settings) for work in works]
    with matmul_precision("high"), SAME_GRADIENTS():
        for step in range(settings.steps):
            picked = [
                used[i]
                for i in torch.randperm(len(used), generator=generator)[: settings.batch].tolist()
            ]
            x, wanted = batch(picked)
            hidden = [x]
            for block in blocks:
                hidden.append(block.forward(hidden[-1]))
            gradient = predictions.divergence(hidden.pop(), wanted, gradient=True)[1]
            for block in reversed(blocks):
                assert gradient is not None
                gradient = block.backward(hidden.pop(), gradient, 1 - step / settings.steps)
            listen(step + 1)
    for block in blocks:
        block.finish()
    after = loss()
    if not after < before:
        for work, (quantized, others) in zip(works, originals, strict=True):
            work.quantized = quantized
            work.others = others
        after = before
    return {"before": before, "after": after}
