"""Tuning of the whole: what is not a code (scales, codebooks, norms) moves until the model predicts
what the original does.

    loss = KL(original ‖ quantized), the mean over calibration tokens

    forward    h₀ → block 0 → h₁ → … → hₙ        hidden states are kept, nothing else
    backward   … ← h₁ ← block i once more, with gradients; what it is made of moves at once

No gradient outlives its block: memory holds the packed weights, the hidden states of one batch and
one dense block (or the graphs of all blocks, where a GPU has room: then nothing is run again). With
`rounding` codes move too (movable.py). Some samples are held out; the result is kept only if their
loss falls. On a GPU a step is one launch (captured.py).

`tune_block` does the same to one block alone, towards the output of the original's block, before
the blocks behind it are solved: those then see inputs that are nearer to the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm
from flyweight.models.attention import PromptStage
from flyweight.quant.cache import ActivationCache
from flyweight.quant.captured import Captured
from flyweight.quant.movable import FIELDS, Movable, Part
from flyweight.quant.rounding import SAME_GRADIENTS, output_error, trainable
from flyweight.quant.statistics import matmul_precision
from flyweight.quant.work import WorkBlock, input_quantizer, root_mean_square

ROWS = 1024  # tokens whose logits are held at a time
HELD = 1  # bytes of a weight while scales move: its code
HELD_MOVING = 13  # and while codes do: a float32 and Adam's averages of it besides
HELD_OUT = 16  # one sample of so many
MOST_HELD_OUT = 64


@dataclass(frozen=True)
class Tuning:
    steps: int = 200
    batch: int = 8  # sequences in a step
    rate: float = 1e-3  # Adam's first step, as a share of the size of what moves
    rounding: float = 0.0  # how many steps of its grid a code can travel in all
    seed: int = 0
    floats: bool = False  # whether weights move that are not quantized yet
    relative: bool = False  # of one block: each token's error over the size of its hidden state


class TunedBlock:
    """A finished block whose weights are computed from what moves, at every call."""

    def __init__(
        self,
        work: WorkBlock,
        context: PromptStage,
        settings: Tuning,
        originals: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`originals`: weights that codes start near to, where they are known."""
        originals = originals or {}
        self.work = work
        self.context = context
        self.settings = settings
        self.parts = {
            name: Part(tensor, rounding=settings.rounding > 0, original=originals.get(name))
            for name, tensor in work.quantized.items()
            if tensor.kind in FIELDS
        }
        self.floats = {
            name: Movable(weight, alike=True)
            for name, weight in work.weights.items()
            if settings.floats and name not in work.quantized
        }
        self.norms = {
            norm.name: Movable(work.others[f"{norm.name}.weight"]) for norm in work.plan.norms
        }
        moving = [
            *self.norms.values(),
            *self.floats.values(),
            *(field for part in self.parts.values() for field in part.moves.values()),
        ]
        codes = [
            part.codes for part in self.parts.values() if part.moving and part.codes is not None
        ]
        on_gpu = work.device.type == "cuda"
        self.adam = torch.optim.Adam(
            [  # rates lie on the device, where a captured step reads them
                {"params": params, "lr": torch.zeros((), device=work.device)}
                for params in ([field.move for field in moving], codes)
                if params
            ],
            betas=(0.9, 0.95),
            fused=on_gpu,
            capturable=on_gpu,
        )

        self.block = trainable(work)
        for linear in self.block.linears.values():
            linear.substitute(None)  # their dense weights are made at every call
        work.unpacked.clear()

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.work.dtype
        for group in self.work.groups:
            self.block.linears[group.name].substitute(self.joined(group.linears))
        plain = dict(self.block.norms)
        for name, norm in self.norms.items():
            self.block.norms[name] = replace(plain[name], weight=norm.value().to(dtype))
        out = self.block.forward(x, self.context)
        # What stayed would hold this pass's graph, and with it the stream that gradients add up on.
        self.block.norms.update(plain)
        for linear in self.block.linears.values():
            linear.substitute(None)
        return out

    def joined(self, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
        weight = torch.cat([self.weight(name).to(self.work.dtype) for name in names])
        quantize_input = input_quantizer([self.work.quantized.get(name) for name in names])

        def run(x: Tensor) -> Tensor:
            seen = quantize_input(x.detach())
            return F.linear(x if seen is x else x + (seen - x).detach(), weight)

        return run

    def weight(self, name: str) -> Tensor:
        if name in self.parts:
            return self.parts[name].weight()
        return self.floats[name].value() if name in self.floats else self.work.dense(name)

    def backward(
        self, x: Tensor, gradient: Tensor, share: Tensor | float, *, y: Tensor | None = None
    ) -> Tensor:
        """The gradient of the input; parameters have moved by `share` of the first step's rate.
        Without `y`, what `forward` gave with its graph, the block runs once more.
        """
        if y is None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = self.forward(x)
        y.backward(gradient)
        self.move(share)
        assert x.grad is not None
        return x.grad

    def move(self, share: Tensor | float) -> None:
        """By the gradients that are there."""
        rates = (self.settings.rate, 2 * self.settings.rounding / self.settings.steps)
        for group, rate in zip(self.adam.param_groups, rates, strict=False):
            group["lr"].fill_(share * rate)
        self.adam.step()
        self.forget()
        for part in self.parts.values():
            if part.moving:
                part.stay_inside()

    def forget(self) -> None:
        self.adam.zero_grad()

    def finish(self) -> None:
        self.work.quantized |= {name: part.result() for name, part in self.parts.items()}
        self.work.weights |= {name: field.result() for name, field in self.floats.items()}
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

    def logits(self, hidden: Tensor) -> Tensor:
        return self.shape(F.linear(reference.normalize(hidden, self.norm), self.head))

    @torch.no_grad()
    def divergence(self, hidden: Tensor, wanted: Tensor) -> float:
        """Mean KL over tokens of hidden [sequences, tokens, size]."""
        total = torch.zeros((), device=hidden.device)
        for x, y in self.parts(hidden, wanted):
            found, target = (self.logits(part).float().log_softmax(-1) for part in (x, y))
            total += F.kl_div(found, target, reduction="sum", log_target=True)
        return float(total) / hidden[..., 0].numel()

    def gradient(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Of the mean KL by hidden. By logits it is the difference of the probabilities, so that
        nothing else of the vocabulary's size is made: such tensors take more time than a block.
        """
        count = hidden[..., 0].numel()
        parts = []
        for x, y in self.parts(hidden, wanted):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                logits = self.logits(x)
            pull = torch.softmax(logits.detach(), -1, dtype=torch.float32)
            pull.sub_(torch.softmax(self.logits(y), -1, dtype=torch.float32)).div_(count)
            logits.backward(pull.to(logits.dtype))
            assert x.grad is not None
            parts.append(x.grad)
        return torch.cat(parts).view_as(hidden)

    @staticmethod
    def parts(hidden: Tensor, wanted: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """ROWS tokens at a time."""
        return zip(*(x.flatten(0, 1).split(ROWS) for x in (hidden, wanted)), strict=True)


@torch.no_grad()
def tune_block(
    work: WorkBlock,
    inputs: ActivationCache,
    targets: ActivationCache,
    context: PromptStage,
    settings: Tuning,
) -> tuple[float, float]:
    """Improve one block in place, of which some or all is solved; returns its relative output error
    before and after.
    """
    relative = settings.relative
    before = output_error(work, inputs, targets, context, relative=relative)
    original = (dict(work.quantized), dict(work.others), dict(work.weights))
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
            if relative:
                gradient = (gradient / root_mean_square(wanted).square()).to(gradient.dtype)
            block.backward(x, gradient, 1 - step / settings.steps)
    block.finish()
    after = output_error(work, inputs, targets, context, relative=relative)
    if not after < before:
        work.quantized, work.others, work.weights = original
        after = before
    return before, after


class Chain:
    """Blocks one behind the other, from the embedding to the predictions."""

    def __init__(
        self, works: Sequence[WorkBlock], predictions: Predictions, context: PromptStage
    ) -> None:
        self.works = works
        self.predictions = predictions
        self.context = context

    def loss(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Of the works as they are, by batches of equal size or nearly so."""
        total, count = 0.0, 0
        for x, wanted in batches:
            for work in self.works:
                x = work.build().forward(x, self.context)
                work.unpacked.clear()
            total += len(x) * self.predictions.divergence(x, wanted)
            count += len(x)
        return total / count

    def step(
        self,
        blocks: Sequence[TunedBlock],
        x: Tensor,
        wanted: Tensor,
        share: Tensor | float,
        *,
        keep: bool,
    ) -> None:
        """One batch through all blocks and back; with `keep` the graphs of all of them are held,
        else each block runs once more on the way back.
        """
        passed = []
        for block in blocks:
            x = x.detach().requires_grad_(keep)
            with torch.set_grad_enabled(keep):
                y = block.forward(x)
            passed.append((x, y if keep else None))
            x = y
        gradient = self.predictions.gradient(x, wanted)
        for block in reversed(blocks):
            x, kept = passed.pop()
            gradient = block.backward(x, gradient, share, y=kept)


def graphs_fit(blocks: Sequence[TunedBlock], x: Tensor) -> bool:
    """Whether half of the device's free memory holds the graphs of all blocks at once."""
    if x.device.type != "cuda":
        return False
    with torch.enable_grad():
        before = torch.cuda.memory_allocated(x.device)
        y = blocks[0].forward(x.detach().requires_grad_())
        needed = len(blocks) * (torch.cuda.memory_allocated(x.device) - before)
        del y
    unused = torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
    return needed < (torch.cuda.mem_get_info(x.device)[0] + unused) / 2


def steps_of(chain: Chain, blocks: Sequence[TunedBlock], *, keep: bool) -> Callable[..., None]:
    """`chain.step` as (x, wanted, share) → nothing, captured where the host is not needed in it: it
    reads which experts tokens go to.
    """

    def step(x: Tensor, wanted: Tensor, share: Tensor) -> None:
        chain.step(blocks, x, wanted, share, keep=keep)

    def forget() -> None:
        for block in blocks:
            block.forget()

    if any(group.routed for work in chain.works for group in work.groups):
        return step
    return Captured(step, forget=forget)


@torch.no_grad()
def tune(
    chain: Chain,
    inputs: Callable[[int], Tensor],
    targets: Callable[[int], Tensor],
    samples: int,
    settings: Tuning,
    originals: Callable[[int], Mapping[str, Tensor]] = lambda index: {},
    listen: Callable[[int], None] = lambda step: None,
) -> dict[str, float]:
    """Improve a chain of finished blocks in place. `inputs` and `targets` give a sample's embedding
    and the original's last hidden state, `originals` what is known of a block's weights.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held_out = order[: min(samples // HELD_OUT, MOST_HELD_OUT)] or order
    used = order[len(held_out) :] or order
    works = chain.works
    untuned = [(dict(work.quantized), dict(work.others)) for work in works]

    def batch(picked: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([inputs(i) for i in picked]), torch.stack([targets(i) for i in picked])

    def loss() -> float:
        size = settings.batch
        parts = (held_out[begin : begin + size] for begin in range(0, len(held_out), size))
        return chain.loss(batch(part) for part in parts)

    before = loss()
    generator = torch.Generator().manual_seed(settings.seed)
    blocks = [
        TunedBlock(work, chain.context, settings, originals(i)) for i, work in enumerate(works)
    ]
    with matmul_precision("high"), SAME_GRADIENTS():
        run = steps_of(chain, blocks, keep=graphs_fit(blocks, batch(used[: settings.batch])[0]))
        for step in range(settings.steps):
            picked = torch.randperm(len(used), generator=generator)[: settings.batch].tolist()
            x, wanted = batch([used[i] for i in picked])
            run(x, wanted, torch.full((), 1 - step / settings.steps, device=x.device))
            listen(step + 1)
        del run  # and the memory of its graph
    for block in blocks:
        block.finish()
    after = loss()
    if not after < before:
        for work, (quantized, others) in zip(works, untuned, strict=True):
            work.quantized = quantized
            work.others = others
        after = before
    return {"before": before, "after": after}
