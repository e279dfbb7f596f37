"""Which kernels an engine will ask for, found out without a GPU and without weights.

The model is loaded and run as always, in a dry run: decode steps of every size, and passes with
every number of tokens that could need a kernel of its own. So nothing here repeats how kernels are
chosen. The trade-off: numbers of tokens that are padded alike are taken to need the same kernels,
which a test checks for every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.engine.limits import DEFAULTS
from flyweight.engine.loading import choose_dtype
from flyweight.engine.memory import CacheShape
from flyweight.engine.packed import SIZES as PASS_SIZES
from flyweight.gpu import Gpu
from flyweight.kernels import jit, tuned
from flyweight.kernels.dry_run import DEVICE, dry_run, real
from flyweight.kv_format import KVFormat
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.narrow_books import narrow_books
from flyweight.models.narrow_head import narrow_head
from flyweight.models.presets import PresetWeights
from flyweight.models.standard import has_experts, plan_of
from flyweight.tensors import QuantTensor, Sparse24

PAGE = 16  # tokens of a block of the KV cache: LLM's own default


@dataclass(frozen=True)
class Target:
    """A device, and an engine's options."""

    gpu: Gpu
    dtype: str | None = None  # None: the model's own
    sequences: int = DEFAULTS["cuda"]["max_num_seqs"]
    tokens: int = DEFAULTS["cuda"]["max_num_batched_tokens"]
    kv_format: KVFormat | None = None  # of the cache; None: the type of activations
    head: str | None = None  # its bits, as `--head` names them; None: as stored
    vptq_books: str | None = None  # as `--vptq-books` names them
    steps: tuple[int, ...] | None = None  # answers in a decode step; None: every number
    passes: tuple[int, ...] | None = None  # tokens of prompts in a step; None: every number

    def pass_sizes(self, step: int) -> list[int]:
        """Numbers of tokens that are run; `step`: between those of hundreds, where all count."""
        if self.passes is not None:
            return sorted({whole_pass(tokens) for tokens in self.passes})
        return row_counts(max(self.tokens, self.sequences), self.gpu, step)


def whole_pass(tokens: int) -> int:
    """With what a prompt alone is padded to for a captured pass."""
    return next((size for size in PASS_SIZES if size >= tokens), tokens)


class Read:
    """A checkpoint for a dry run: what is read of it is real, and so is what its values decide."""

    def __init__(self, checkpoint: Any):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.tied = ModelConfig.from_dict(self.config).tied_embeddings

    def has(self, name: str) -> bool:
        """A bias of zeros, or a tied head written a second time, is as good as none."""
        if not self.checkpoint.has(name) or (name == "lm_head.weight" and self.tied):
            return False
        return not name.endswith(".bias") or self._is_used(name)

    def _is_used(self, bias: str) -> bool:
        with real():
            return bool(self.checkpoint.tensor(bias).any())

    def tensor(self, name: str) -> Tensor:
        with real():
            found = self.checkpoint.tensor(name)
        return torch.empty(found.shape, dtype=found.dtype)

    def linear(self, prefix: str) -> QuantTensor:
        with real():
            found = Sparse24.find(self.checkpoint.linear(prefix))
        return found.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))

    def check_used(self) -> None:
        """Only some layers are read."""


def open_weights(model: str) -> PresetWeights | Read:
    if model.startswith("preset:"):
        _, name, *scheme = model.split(":")
        return PresetWeights(name, scheme[0] if scheme else "bf16")
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint

    with real():  # a GGUF file is mapped when it is opened
        return Read(Checkpoint(resolve(model)))


def layers_of(weights: PresetWeights | Read) -> list[int]:
    """The first of every kind of layer."""
    config = ModelConfig.from_dict(weights.config)
    plan = plan_of(config)
    kinds: dict[tuple[Any, ...], int] = {}
    for index in range(config.layers):
        parts: list[tuple[Any, ...]] = []
        if isinstance(weights, Read):
            prefix = f"model.layers.{index}."
            parts = sorted(
                (name.removeprefix(prefix), entry.dtype, entry.shape)
                for name, entry in weights.checkpoint.entries.items()
                if name.startswith(prefix)
            )
        dense = not has_experts(config, index)
        kinds.setdefault(
            (plan.layers[index].attention, plan.layers[index].delta, dense, *parts), index
        )
    return list(kinds.values())


def row_counts(most: int, gpu: Gpu, step: int = 64) -> list[int]:
    """Numbers of rows that between them ask for every kernel: the last of each class that is padded
    alike, and both sides of every border of `tuned`. `step`: between those of hundreds of rows.
    """
    classes = [*range(1, 17), 32, 48, *range(64, 1024, step), *range(1024, most, 256), most]
    borders = {
        route.rows for numbers in tuned.of(gpu).formats.values() for route in numbers.routes
    } | {17, 33, 65}
    return sorted(
        {
            rows
            for rows in (*classes, *borders, *(border - 1 for border in borders))
            if 0 < rows <= most
        }
    )


def run_steps(decoder: Decoder, target: Target) -> None:
    """Decode steps of every size, where they are captured."""
    from flyweight.engine.graphs import DecodeGraphs, unsupported_reason
    from flyweight.engine.rows import Rows
    from flyweight.engine.speculation.shared_rows import SIZES as SHARED_SIZES
    from flyweight.engine.speculation.shared_rows import SharedRows

    if unsupported_reason(decoder, PAGE) is not None:
        return
    # neighbours hand over to each other
    kinds, decoder.blocks = decoder.blocks, decoder.blocks * min(2, decoder.config.layers)
    caches, pages = (
        make_caches(decoder, target.kv_format),
        -(-decoder.config.context_length // PAGE),
    )
    rows = Rows(
        target.sequences,
        pages=pages,
        vocabulary=decoder.config.vocab_size,
        device=decoder.device,
        states=0 if decoder.config.state_layers else None,
    )
    steps = DecodeGraphs(decoder, caches, rows)
    with decoder.active():
        for size in padded_steps(steps.sizes, target.steps):
            steps.step(size).launch()
            steps.step(size).advance()
        if target.steps is None:  # where guesses are checked
            shared = DecodeGraphs(decoder, caches, SharedRows(rows), sizes=SHARED_SIZES)
            for size in shared.sizes:
                shared.step(size).launch()
        if rows.sampler is not None:
            rows.sampler.prepare(decoder.dtype, torch.float32)
    decoder.blocks = kinds


def padded_steps(sizes: Sequence[int], asked: Sequence[int] | None) -> list[int]:
    """Of the captured sizes those that so many answers run as."""
    if asked is None:
        return list(sizes)
    return sorted({next(size for size in sizes if size >= count) for count in asked})


def run_pass(decoder: Decoder, tokens: int, kv_format: KVFormat | None = None) -> None:
    """A pass of prompts, and as many rows of logits as it may be asked for."""
    zeros = torch.zeros(tokens, dtype=torch.int64, device=decoder.device)
    batch = Batch(
        zeros,
        zeros,
        zeros,
        zeros[None].int(),
        [0, tokens],
        [tokens],
        zeros,
        states=torch.zeros(1, 7, dtype=torch.int32, device=decoder.device),
    )
    decoder.logits(decoder.hidden(batch, make_caches(decoder, kv_format)))


def make_caches(decoder: Decoder, kv_format: KVFormat | None = None) -> list[KVStorage]:
    """One for all layers of a kind."""
    config = decoder.config
    shape = CacheShape.of(config, decoder.dtype, kv_format)
    return shape.shared(-(-config.context_length // PAGE), PAGE, decoder.device, slots=1)


def load(
    model: str, dtype: str | None, head: str | None = None, vptq_books: str | None = None
) -> Decoder:
    """With one layer of each kind."""
    weights = open_weights(model)
    return Decoder.load(
        narrow_books(narrow_head(weights, head), vptq_books, torch.device(DEVICE)),
        device=DEVICE,
        dtype=choose_dtype(dtype, weights.config, DEVICE),
        layers=layers_of(weights),
    )


def wanted_by(model: str, target: Target, *, part: int = 0, parts: int = 1) -> set[jit.Wanted]:
    """What this process has asked for so far, the model's kernels included, or one of several parts
    of them.
    """
    with dry_run(target.gpu):
        decoder = load(model, target.dtype, target.head, target.vptq_books)
        if part == 0:
            run_steps(decoder, target)
        # where the tiles of experts grow depends on how many there are
        step = 64 if decoder.config.moe is None else 8
        for tokens in target.pass_sizes(step)[part::parts]:
            run_pass(decoder, tokens, target.kv_format)
        for answers in target.steps or ():  # a pass that ends so many prompts
            hidden = torch.empty(answers, decoder.config.hidden_size, dtype=decoder.dtype)
            decoder.logits(hidden.to(DEVICE))
    return jit.wanted
