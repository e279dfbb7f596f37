"""The block loop: one decoder block in memory at a time, each calibrated on what the quantized blocks before it give.

    tokens → embedding → [block 0] → [block 1] → …
                            │ 1. transforms   smoothing and scale search on the float block, folded into its weights
                            │ 2. solvers      group by group (q/k/v → o → gate/up → down), each seeing the ones before
                            │                 it already quantized
                            │ 3. learning     rounding tuned on the whole block's output (where the recipe asks for it)
                            └ 4. save, then run the quantized block over all samples: input of the next
    → predictions              5. tuning         scales and norms of all blocks together (where the recipe asks for it)

A finished block is a file (`store.py`). Resuming runs the finished blocks over the samples again instead of storing
activations; the arithmetic is the same, so the bytes are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.errors import ResourceError
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import GROUPS, Block, Context, Group, Whole
from flyweight.quant.awq import Judge, output_error, search_scales
from flyweight.quant.cache import ActivationCache, Budget
from flyweight.quant.recipe import Layer, Recipe
from flyweight.quant.rounding import Learning, learn_rounding
from flyweight.quant.smoothquant import refine, search_alpha, smooth_scales, w8a8_error
from flyweight.quant.solve import solve_group
from flyweight.quant.statistics import NonFiniteError, Statistics, layer_error
from flyweight.quant.store import BlockStore, FinishedBlock
from flyweight.quant.tune import Predictions, Tuning, tune
from flyweight.quant.work import WorkBlock
from flyweight.tensors import QuantTensor

FEWEST_TOKENS = 32  # an expert that fewer calibration tokens reached is rounded to nearest
JUDGED_TOKENS = 4096  # tokens on which the scale search runs attention and MLP
SMOOTHED_TOKENS = 16384  # tokens of all samples that smoothing looks at: what is loud in a few of them decides


@dataclass(frozen=True)
class Event:
    """What the live view is told: a layer solved, a block finished or run again after resuming, a step of tuning done."""

    kind: str
    block: int
    blocks: int
    layer: str = ""
    error: float = 0.0
    seconds: float = 0.0


Listener = Callable[[Event], None]


def block_name(index: int) -> str:
    return f"block-{index:04}"


def tuned_name(index: int) -> str:
    return f"tuned-{index:04}"


@contextlib.contextmanager
def reproducible(*, fast: bool) -> Iterator[None]:
    """Deterministic kernels; `fast` lets float32 products of half-precision models use TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    memory: Any = torch.utils.deterministic
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # every byte that is read was written
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
        memory.fill_uninitialized_memory = fill


@contextlib.contextmanager
def memory_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"{where}: out of memory; finished blocks are kept: run again with --resume and a smaller --batch or "
                            "fewer samples") from error
    except RuntimeError as error:
        if "not enough memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise ResourceError(f"{where}: out of memory; finished blocks are kept: --resume with fewer samples") from error


class Loop:
    """Everything that stays the same from block to block."""

    def __init__(self, source: Any, recipe: Recipe, store: BlockStore, *, config: ModelConfig, tables: tuple[Tensor, Tensor],
                 ops: Any, device: torch.device, dtype: torch.dtype, stored: torch.dtype, seed: int, budget: Budget,
                 accept: Callable[[str, QuantTensor], None], listen: Listener) -> None:
        self.source, self.recipe, self.store, self.config = source, recipe, store, config
        self.tables, self.ops, self.device, self.dtype, self.stored = tables, ops, device, dtype, stored
        self.seed, self.budget, self.accept, self.listen = seed, budget, accept, listen
        self.hidden = ActivationCache(device, budget, store.folder, "hidden")
        # Learning and tuning aim at the original model, which therefore runs beside the quantized one.
        self.original = ActivationCache(device, budget, store.folder, "original") if recipe.follows_original else None
        self.context: Context | None = None

    def begin(self, tokens: Tensor, embedding: Tensor, *, batch: int) -> None:
        """Embed the samples [samples, length], `batch` at a time."""
        self.context = Whole(tokens.shape[1], self.tables, self.ops)
        for begin in range(0, len(tokens), batch):
            x = torch.nn.functional.embedding(tokens[begin : begin + batch], embedding).to(self.dtype)
            self.hidden.append(x)
            if self.original is not None:
                self.original.append(x)

    def run(self, blocks: int) -> list[FinishedBlock]:
        """Quantize the first `blocks` blocks; those that are on disk are only run."""
        done = []
        for index in range(blocks):
            name, started = block_name(index), time.perf_counter()
            with memory_errors(f"layer {index}"):
                if self.store.has(name):
                    finished, kind = self.store.load(name), "resumed"
                    work = WorkBlock.restore(finished, self.config, index, device=self.device, dtype=self.dtype)
                else:
                    work, kind = self.load(index), "finished"
                    finished = work.finished(self.quantize(work))
                    for linear, tensor in finished.linears.items():
                        self.accept(f"model.layers.{index}.{linear}", tensor)
                    self.store.save(name, finished)
                if self.context is not None:
                    self.advance(index, work)
            # Only what the writer needs to know is kept in memory.
            meta = {linear: tensor.map(lambda t: t.to("meta")) for linear, tensor in finished.linears.items()}
            done.append(FinishedBlock(meta, {}, finished.report))
            self.listen(Event(kind, index, blocks, seconds=time.perf_counter() - started))
        return done

    def load(self, index: int) -> WorkBlock:
        return WorkBlock.load(self.source, self.config, index, device=self.device, dtype=self.dtype)

    def advance(self, index: int, work: WorkBlock) -> None:
        """Both streams of activations move on to the next block."""
        assert self.context is not None
        if self.original is not None:
            block = self.load(index).build()
            for i in range(len(self.original)):
                self.original[i] = block.forward(self.original[i], self.context)
        block = work.build()
        for i in range(len(self.hidden)):
            x = block.forward(self.hidden[i], self.context)
            if not bool(torch.isfinite(x).all()):
                raise NonFiniteError(f"layer {index} gives NaN or infinity in {self.dtype}; finished blocks are kept: try "
                                     "--dtype float32 or bfloat16")
            self.hidden[i] = x

    def tune(self, tokens: Tensor, embedding: Tensor) -> None:
        """All finished blocks together; the results lie beside them and stand in their place."""
        count, head = self.config.layers, "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"
        if self.store.has(tuned_name(count - 1)):
            return
        assert self.original is not None and self.context is not None
        original, places = self.original, self.original.samples
        works = [WorkBlock.restore(self.store.load(block_name(i)), self.config, i, device=self.device, dtype=self.dtype)
                 for i in range(count)]
        norm, weight = (self.source.tensor(name).to(self.device, self.dtype) for name in ("model.norm.weight", head))
        settings = Tuning(self.recipe.tune_steps, self.recipe.tune_batch, self.recipe.tune_rate, self.recipe.tune_rounding,
                          seed=self.seed)
        facts = tune(works, lambda i: torch.nn.functional.embedding(tokens[i], embedding).to(self.device, self.dtype),
                     lambda i: original.sample(places[i]), len(tokens), context=self.context, settings=settings,
                     predictions=Predictions(norm, weight, self.config.epsilon),
                     listen=lambda step: self.listen(Event("tuned", step, settings.steps)))
        for i, work in enumerate(works):
            self.store.save(tuned_name(i), work.finished(facts))

    # -- one block --------------------------------------------------------------------------------------------

    def quantize(self, work: WorkBlock) -> dict[str, Any]:
        """Fill work.quantized; returns the report of the block."""
        report: dict[str, Any] = {"layers": {}}
        if self.recipe.smooth is not None or self.recipe.scale_search:
            report["scales"] = self.transform(work)
        float_weights = {name: weight.clone() for name, weight in work.weights.items()} if self.recipe.learn_steps else {}
        # Experts of a layer are calibrated in one pass: all gate/up, then all down.
        for _, stage in itertools.groupby(work.groups, key=lambda group: group.name.rpartition(".")[2]):
            self.solve(work, list(stage), report["layers"])
        if self.recipe.learn_steps and self.original is not None:
            work.weights |= float_weights
            report["learned"] = self.learn(work)
        return report

    def layers(self, work: WorkBlock, group: Group) -> list[Layer]:
        return [self.recipe.layer_for(f"model.layers.{work.index}.{name}") for name in group.linears]

    def solve(self, work: WorkBlock, stage: list[Group], report: dict[str, Any]) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # stages need pieces of other sizes: what the last one left would only add up
        found: dict[str, Statistics] = {}
        needing = [group for group in stage if self.recipe.sparse
                   or any(layer.needs_statistics for layer in self.layers(work, group))]
        if self.context is not None and needing:
            found = work.statistics(self.hidden, self.context, needing, relative=self.recipe.relative)
        for group in stage:
            self.solve_group(work, group, found.pop(group.name, None), report)

    def solve_group(self, work: WorkBlock, group: Group, statistics: Statistics | None, report: dict[str, Any]) -> None:
        layers, started, facts = self.layers(work, group), time.perf_counter(), {}
        if statistics is not None and group.routed:
            facts = {"tokens": statistics.tokens}
            if statistics.tokens < FEWEST_TOKENS:
                statistics = Statistics.uniform(statistics.columns, self.device)
        weights = [work.weights[name] for name in group.linears]
        solved = solve_group(weights, layers, statistics, dtype=self.stored, sparse=self.recipe.sparse, seed=self.seed)
        hessian = None if statistics is None else statistics.hessian
        for name, weight, tensor in zip(group.linears, weights, solved, strict=True):
            work.quantized[name] = tensor
            error = layer_error(weight, tensor.dequantize(), hessian)
            report[name] = {"error": error, "bits_per_weight": tensor.bits_per_weight} | facts
            self.listen(Event("layer", work.index, self.config.layers, name, error, time.perf_counter() - started))

    def learn(self, work: WorkBlock) -> dict[str, float]:
        assert self.original is not None and self.context is not None
        targets = ActivationCache(self.device, self.budget, self.store.folder, "target")
        block = self.load(work.index).build()
        for x in self.original:
            targets.append(block.forward(x, self.context))
        settings = Learning(self.recipe.learn_steps, self.recipe.learn_batch, self.recipe.learn_rate, seed=self.seed,
                            relative=self.recipe.relative)
        before, after = learn_rounding(work, self.hidden, targets, self.context, settings)
        targets.close()
        return {"before": before, "after": after}

    # -- transforms -------------------------------------------------------------------------------------------

    def transform(self, work: WorkBlock) -> dict[str, Any]:
        """Smoothing, then scale search, group by group; statistics follow by arithmetic instead of another pass."""
        assert self.context is not None
        tokens = len(self.hidden.samples) * self.hidden[0].shape[1]
        every = max(1, tokens // SMOOTHED_TOKENS) if self.recipe.smooth == "search" else 0
        samples = Samples(JUDGED_TOKENS, every=every)
        # Experts and router share one norm, and a factor taken out of it would have to go into all of them: left alone.
        groups = GROUPS if work.groups is GROUPS else GROUPS[:2]
        statistics = work.statistics(self.hidden, self.context, groups, see=samples.keep)
        report: dict[str, Any] = {}
        for group in groups:
            if any(layer.solver == "keep" for layer in self.layers(work, group)):
                continue
            entry: dict[str, Any] = {}
            if self.recipe.smooth is not None:
                entry["alpha"] = self.smooth(work, group, statistics, samples)
            if self.recipe.scale_search:
                entry["ratio"] = self.scale(work, group, statistics, samples)
            report[group.name] = entry
        return report

    def smooth(self, work: WorkBlock, group: Group, statistics: dict[str, Statistics], samples: Samples) -> float:
        weights, found, layers = [work.weights[name] for name in group.linears], statistics[group.name], self.layers(work, group)
        sizes = (found.largest, found.importance.sqrt())
        if self.recipe.smooth == "search" and layers[0].activations == "int8":
            x = samples.spread(group)
            alpha, scales = search_alpha(w8a8_error(x[::4], weights), sizes, weights)
            scales = refine(x, weights, scales, largest=found.largest, tokens=found.tokens,
                            allowed=lambda s: work.allowed(group, s))
        elif self.recipe.smooth == "search":
            error = output_error(found, weights, layers[0].integers(self.stored), judge=self.judge(work, group, samples))
            alpha, scales = search_alpha(lambda s: error(work.allowed(group, s)), sizes, weights)
        elif group.source.endswith("norm"):  # the published method smooths what follows a norm
            alpha = float(self.recipe.smooth or 0)
            scales = smooth_scales(found.largest, weights, alpha)
        else:
            return 0.0
        self.fold(work, group, scales, statistics, samples)
        return alpha

    def scale(self, work: WorkBlock, group: Group, statistics: dict[str, Statistics], samples: Samples) -> float:
        weights = [work.weights[name] for name in group.linears]
        settings = self.layers(work, group)[0].integers(self.stored)
        compensated = any(layer.solver == "gptq" for layer in self.layers(work, group))
        judge = None if compensated else self.judge(work, group, samples)
        ratio, scales = search_scales(statistics[group.name], weights, settings, judge=judge, compensated=compensated,
                                      allowed=lambda s: work.allowed(group, s))
        self.fold(work, group, scales, statistics, samples)
        return ratio

    def fold(self, work: WorkBlock, group: Group, scales: Tensor, statistics: dict[str, Statistics], samples: Samples) -> None:
        scales = work.fold(group, work.allowed(group, scales))
        statistics[group.name] = statistics[group.name].scaled(scales)
        samples.scale(group, scales)

    def judge(self, work: WorkBlock, group: Group, samples: Samples) -> Judge | None:
        """The error of attention's or the MLP's output, for groups whose own output is not yet it."""
        assert self.context is not None
        context, block = self.context, work.build()
        outputs: dict[str, Callable[[Block, Tensor], Tensor]] = {
            "qkv": lambda b, x: b.attention(x, context),
            "gate_up": lambda b, x: b.mlp(x),
        }
        if group.name not in outputs:
            return None
        run, inputs = outputs[group.name], samples.batches(group)
        wanted = [run(block, x) for x in inputs]

        def judge(weights: Any) -> float:
            work.swap(block, group, weights)
            return sum(float((run(block, x) - y).float().square().sum(dtype=torch.float64))
                       for x, y in zip(inputs, wanted, strict=True))

        return judge


class Samples:
    """Inputs of every group, for searches that need them and not just their moments.

    The first tokens in whole sequences, and one in `every` of all tokens (0: none).
    """

    def __init__(self, tokens: int, *, every: int) -> None:
        self.tokens, self.every = tokens, every
        self.kept: dict[str, list[Tensor]] = {group.name: [] for group in GROUPS}
        self.some: dict[str, list[Tensor]] = {group.name: [] for group in GROUPS}

    def keep(self, group: Group, x: Tensor) -> None:
        have = sum(part.shape[0] * part.shape[1] for part in self.kept[group.name])
        rows = min(x.shape[0], -(-(self.tokens - have) // x.shape[1]))
        if have < self.tokens:
            self.kept[group.name].append(x[:rows].clone())
        if self.every:
            self.some[group.name].append(x.flatten(0, 1)[:: self.every].clone())

    def batches(self, group: Group) -> list[Tensor]:
        return self.kept[group.name]

    def spread(self, group: Group) -> Tensor:
        return torch.cat(self.some[group.name]).float()

    def scale(self, group: Group, scales: Tensor) -> None:
        for parts in (self.kept[group.name], self.some[group.name]):
            parts[:] = [(part.float() / scales).to(part.dtype) for part in parts]
