"""The block loop: one decoder block in memory at a time, each calibrated on what the quantized
blocks before it give.

    tokens → embedding → [block 0] → [block 1] → …
                 │ 1. transforms   smoothing and scale search on the float block, folded into its
                 │                 weights
                 │ 2. solvers      group by group (q/k/v → o → gate/up → down), each seeing the ones
                 │                 before it already quantized
                 │ 3. learning     rounding tuned on the whole block's output (where the recipe asks
                 │                 for it)
                 └ 4. save, then run the quantized block over all samples: input of the next
    → predictions
                   5. tuning       scales and norms of all blocks together (where the recipe asks)

A finished block is a file (`store.py`). Resuming runs the finished blocks over the samples again
instead of storing activations; the arithmetic is the same, so the bytes are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels.dispatch import decoder_ops
from flyweight.kernels.linear.fused import Norm
from flyweight.models.attention import PromptStage, Whole
from flyweight.models.layers import Embedding
from flyweight.models.plan import Group
from flyweight.models.rope import all_tables, long_rows
from flyweight.models.standard import plan_of
from flyweight.quant.cache import ActivationCache
from flyweight.quant.events import Event
from flyweight.quant.guards import memory_errors
from flyweight.quant.options import Setting
from flyweight.quant.recipe import Layer, Recipe
from flyweight.quant.rounding import Learning, learn_rounding, learnable
from flyweight.quant.solve import solve_group
from flyweight.quant.statistics import NonFiniteError, Statistics, layer_error
from flyweight.quant.store import BlockStore, FinishedBlock
from flyweight.quant.transforms import Transforms
from flyweight.quant.tune import Chain, Predictions, Tuning, tune, tune_block
from flyweight.quant.work import WorkBlock
from flyweight.tensors import QuantTensor

FEWEST_TOKENS = 32  # an expert that fewer calibration tokens reached is rounded to nearest


def block_name(index: int) -> str:
    return f"block-{index:04}"


def tuned_name(index: int) -> str:
    return f"tuned-{index:04}"


class Loop:
    """All blocks of one model, one after the other; `accept` refuses a weight that cannot be
    written.
    """

    def __init__(
        self,
        source: Any,
        recipe: Recipe,
        store: BlockStore,
        setting: Setting,
        accept: Callable[[str, QuantTensor], None],
    ) -> None:
        self.source = source
        self.recipe = recipe
        self.store = store
        self.setting = setting
        self.accept = accept
        self.config = setting.config
        self.device = setting.device
        self.dtype = setting.dtype
        self.listen = setting.listen
        self.ops = decoder_ops(setting.device)
        self.hidden = self.cache("hidden")
        # Learning and tuning aim at the original model, which therefore runs beside the quantized
        # one.
        self.original = self.cache("original") if recipe.follows_original else None
        self.context: PromptStage | None = None

    def cache(self, name: str) -> ActivationCache:
        return ActivationCache(self.device, self.setting.budget, self.store.folder, name)

    def begin(self, tokens: Tensor, embedding: Tensor, *, batch: int, tuning: int = 0) -> None:
        """Embed the samples [samples, length], `batch` at a time; of the last `tuning` only what
        the original makes of them is wanted.
        """
        length = tokens.shape[1]
        tables = all_tables(self.config, self.device)
        self.context = Whole(length, tables, self.ops, first=long_rows(self.config, length))
        embed = Embedding(embedding, plan_of(self.config).embedding_scale)
        seen = len(tokens) - tuning
        for part in tokens[:seen].split(batch):
            x = embed(part).to(self.dtype)
            self.hidden.append(x)
            if self.original is not None:
                self.original.append(x)
        if self.original is not None and tuning:
            for part in tokens[seen:].split(batch):
                self.original.append(embed(part).to(self.tuning_dtype))

    def close(self) -> None:
        self.hidden.close()
        if self.original is not None:
            self.original.close()

    def run(self, blocks: int) -> list[FinishedBlock]:
        """Quantize the first `blocks` blocks; those that are on disk are only run."""
        done = []
        for index in range(blocks):
            started = time.perf_counter()
            with memory_errors(f"layer {index}"):
                if self.store.has(block_name(index)):
                    kind = "resumed"
                    finished = self.store.load(block_name(index))
                    work = self.restore(finished, index)
                else:
                    kind = "finished"
                    work = self.load(index)
                    finished = self.finish(work)
                if self.context is not None:
                    self.advance(index, work)
            # Only what the writer needs to know is kept in memory.
            meta = {
                name: tensor.map(lambda t: t.to("meta"))
                for name, tensor in finished.linears.items()
            }
            done.append(FinishedBlock(meta, {}, finished.report))
            self.listen(Event(kind, index, blocks, seconds=time.perf_counter() - started))
        return done

    def finish(self, work: WorkBlock) -> FinishedBlock:
        finished = work.finished(self.quantize(work))
        for linear, tensor in finished.linears.items():
            self.accept(f"model.layers.{work.index}.{linear}", tensor)
        self.store.save(block_name(work.index), finished)
        return finished

    def load(self, index: int, *, dtype: torch.dtype | None = None) -> WorkBlock:
        dtype = dtype or self.dtype
        block = WorkBlock.load(self.source, self.config, index, device=self.device, dtype=dtype)
        self.source.check_used(within=f"model.layers.{index}.")  # it would be left out
        return block

    def restore(
        self, finished: FinishedBlock, index: int, *, dtype: torch.dtype | None = None
    ) -> WorkBlock:
        dtype = dtype or self.dtype
        return WorkBlock.restore(finished, self.config, index, device=self.device, dtype=dtype)

    def advance(self, index: int, work: WorkBlock) -> None:
        """Both streams of activations move on to the next block."""
        assert self.context is not None
        if self.original is not None:
            self.follow(index, self.original)
        block = work.build()
        for i in range(len(self.hidden)):
            x = work.run(block, i, self.hidden[i], self.context)
            if not bool(torch.isfinite(x).all()):
                raise NonFiniteError(
                    f"layer {index} gives NaN or infinity in {self.dtype}; finished blocks are "
                    "kept: try --dtype float32 or bfloat16"
                )
            self.hidden[i] = x
        work.known.forget()

    def follow(self, index: int, original: ActivationCache) -> None:
        """The original's own block, over all samples; those of tuning alone in its dtype."""
        assert self.context is not None
        block = self.load(index).build()
        seen = len(self.hidden)
        for i in range(seen):
            original[i] = block.forward(original[i], self.context)
        if seen < len(original):
            block = self.load(index, dtype=self.tuning_dtype).build()
        for i in range(seen, len(original)):
            original[i] = block.forward(original[i], self.context)

    def tune(self, tokens: Tensor, embedding: Tensor) -> None:
        """All finished blocks together; the results lie beside them and stand in their place."""
        count = self.config.layers
        if self.store.has(tuned_name(count - 1)):
            return
        assert self.original is not None and self.context is not None
        original = self.original
        places = original.samples
        dtype = self.tuning_dtype
        works = [self.restore(self.store.load(block_name(i)), i, dtype=dtype) for i in range(count)]
        recipe = self.recipe
        settings = Tuning(
            recipe.tune_steps,
            recipe.tune_batch,
            recipe.tune_rate,
            recipe.tune_rounding,
            seed=self.setting.seed,
        )

        scale = plan_of(self.config).embedding_scale
        embed = Embedding(embedding.to(self.device), scale)
        facts = tune(
            Chain(works, self.predictions(dtype), self.context),
            lambda i: embed(tokens[i].to(self.device)).to(dtype),
            lambda i: original.sample(places[i]).to(dtype),
            len(tokens),
            settings=settings,
            originals=self.start_of_codes,
            listen=lambda step: self.listen(Event("tuned", step, settings.steps)),
        )
        for i, work in enumerate(works):
            self.store.save(tuned_name(i), work.finished(facts))

    def start_of_codes(self, index: int) -> dict[str, Tensor]:
        """The original's weights, unless transforms have made others of them."""
        recipe = self.recipe
        if not recipe.tune_rounding or recipe.scale_search or recipe.smooth is not None:
            return {}
        return self.load(index).weights

    @property
    def tuning_dtype(self) -> torch.dtype:
        """Codes move by whole steps, beside which bfloat16's rounding is small, and float32 has no
        fast attention on a GPU.
        """
        coarse = self.recipe.tune_rounding > 0 and self.dtype == torch.float32
        return torch.bfloat16 if coarse and self.device.type == "cuda" else self.dtype

    def predictions(self, dtype: torch.dtype) -> Predictions:
        tied = self.config.tied_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        norm = self.source.tensor("model.norm.weight").to(self.device, dtype)
        weight = self.source.tensor(head).to(self.device, dtype)
        plan = plan_of(self.config)
        folded = Norm(norm, self.config.epsilon, plan.norm.plus_one).folded
        return Predictions(folded, weight, plan.shape_logits)

    # -- one block --------------------------------------------------------------------------------

    def quantize(self, work: WorkBlock) -> dict[str, Any]:
        """Fill work.quantized; returns the report of the block."""
        report: dict[str, Any] = {"layers": {}}
        if self.recipe.smooth is not None or self.recipe.scale_search:
            assert self.context is not None
            stored = self.setting.stored
            report["scales"] = Transforms(
                work, self.recipe, self.hidden, self.context, stored
            ).run()
        floats: dict[str, Tensor] = {}
        if self.recipe.learn_steps:
            floats = {name: weight.clone() for name, weight in work.weights.items()}
        targets = self.targets(work) if self.recipe.heal_steps else None
        # Experts of a layer are calibrated in one pass: all gate/up, then all down.
        for _, stage in itertools.groupby(
            work.groups, key=lambda group: group.name.rpartition(".")[2]
        ):
            self.solve(work, list(stage), report["layers"])
            if targets is not None:
                report.setdefault("healed", []).append(self.heal(work, targets))
        if targets is not None:
            targets.close()
        if self.recipe.learn_steps and self.original is not None:
            work.weights |= floats
            report["learned"] = self.learn(work)
            work.known.forget()
        return report

    def layers(self, work: WorkBlock, group: Group) -> list[Layer]:
        return self.recipe.layers_for(work.index, group.linears)

    def solve(self, work: WorkBlock, stage: list[Group], report: dict[str, Any]) -> None:
        if self.device.type == "cuda":
            # stages need pieces of other sizes: the last one's would only add up
            torch.cuda.empty_cache()
        found: dict[str, Statistics] = {}
        needing = [group for group in stage if self.needs_statistics(work, group)]
        if self.context is not None and needing:
            relative = self.recipe.relative
            found = work.statistics(self.hidden, self.context, needing, relative=relative)
        for group in stage:
            self.solve_group(work, group, found.pop(group.name, None), report)

    def needs_statistics(self, work: WorkBlock, group: Group) -> bool:
        layers = self.layers(work, group)
        return self.recipe.sparse or any(layer.needs_statistics for layer in layers)

    def solve_group(
        self, work: WorkBlock, group: Group, statistics: Statistics | None, report: dict[str, Any]
    ) -> None:
        started = time.perf_counter()
        facts = {}
        if statistics is not None and group.routed:
            facts = {"tokens": statistics.tokens}
            if statistics.tokens < FEWEST_TOKENS:
                statistics = Statistics.uniform(statistics.columns, self.device)
        weights = [work.weights[name] for name in group.linears]
        solved = solve_group(
            weights,
            self.layers(work, group),
            statistics,
            dtype=self.setting.stored,
            sparse=self.recipe.sparse,
            seed=self.setting.seed,
        )
        hessian = None if statistics is None else statistics.hessian
        for name, weight, tensor in zip(group.linears, weights, solved, strict=True):
            work.quantized[name] = tensor
            error = layer_error(weight, tensor.dequantize(), hessian)
            report[name] = {"error": error, "bits_per_weight": tensor.bits_per_weight} | facts
            seconds = time.perf_counter() - started
            self.listen(Event("layer", work.index, self.config.layers, name, error, seconds))

    def targets(self, work: WorkBlock) -> ActivationCache:
        """What the original's block makes of the original's hidden states."""
        assert self.original is not None and self.context is not None
        targets = self.cache("target")
        block = self.load(work.index).build()
        for i in range(len(self.hidden)):
            targets.append(block.forward(self.original[i], self.context))
        return targets

    def heal(self, work: WorkBlock, targets: ActivationCache) -> tuple[float, float]:
        """What is still in floats makes up for what is solved, and scales and norms move."""
        assert self.context is not None
        recipe = self.recipe
        settings = Tuning(
            recipe.heal_steps,
            recipe.learn_batch,
            recipe.heal_rate,
            seed=self.setting.seed,
            floats=True,
            relative=True,
        )
        found = tune_block(work, self.hidden, targets, self.context, settings)
        work.known.forget()
        return found

    def learn(self, work: WorkBlock) -> dict[str, float]:
        targets = self.targets(work)
        before, after = self.learned(work, targets)
        targets.close()
        return {"before": before, "after": after}

    def learned(self, work: WorkBlock, targets: ActivationCache) -> tuple[float, float]:
        """Codes of integers are nudged; where there are none, what else may move is tuned."""
        assert self.context is not None
        recipe = self.recipe
        if any(
            learnable([work.quantized[name] for name in group.linears]) for group in work.groups
        ):
            settings = Learning(
                recipe.learn_steps,
                recipe.learn_batch,
                recipe.learn_rate,
                seed=self.setting.seed,
                relative=recipe.relative,
            )
            return learn_rounding(work, self.hidden, targets, self.context, settings)
        tuning = Tuning(
            recipe.learn_steps,
            recipe.learn_batch,
            recipe.learn_rate or Tuning.rate,
            seed=self.setting.seed,
        )
        return tune_block(work, self.hidden, targets, self.context, tuning)
