"""Equivalent changes of one float block before it is rounded: smoothing, then scale search, folded
into its weights.

Statistics follow by arithmetic instead of another pass over the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flyweight.models.attention import PromptStage
from flyweight.models.plan import Group
from flyweight.quant.awq import Judge, output_error, search_scales
from flyweight.quant.cache import ActivationCache
from flyweight.quant.inputs import GroupInputs
from flyweight.quant.recipe import Layer, Recipe
from flyweight.quant.smoothquant import int8_noise, refine, search_alpha, smooth_scales
from flyweight.quant.trellis import even_scales
from flyweight.quant.work import WorkBlock, root_mean_square

JUDGED_TOKENS = 4096  # tokens on which the scale search runs attention and MLP
SMOOTHED_TOKENS = 16384  # tokens of all samples that smoothing looks at: a few loud ones decide


class Transforms:
    """Of one block; `stored` is the dtype of the model's files."""

    def __init__(
        self,
        work: WorkBlock,
        recipe: Recipe,
        hidden: ActivationCache,
        context: PromptStage,
        stored: torch.dtype,
    ) -> None:
        self.work = work
        self.recipe = recipe
        self.context = context
        self.stored = stored
        self.hidden = hidden
        tokens = len(hidden.samples) * hidden[0].shape[1]
        every = max(1, tokens // SMOOTHED_TOKENS) if recipe.smooth == "search" else 0
        self.inputs = GroupInputs(JUDGED_TOKENS, every=every)
        self.groups = work.plan.foldable_groups
        self.statistics = work.statistics(
            hidden,
            context,
            self.groups,
            see=self.inputs.keep,
            relative=recipe.relative,
            products=self.asks_for_products,
        )

    @property
    def asks_for_products(self) -> bool:
        """Smoothing for int8 activations, or by a fixed exponent, looks at single columns."""
        if self.recipe.scale_search or self.recipe.smooth is None:
            return True
        layers = [layer for group in self.groups for layer in self.layers(group)]
        by_columns = all(layer.activations == "int8" for layer in layers)
        return self.recipe.smooth == "search" and not by_columns

    def run(self) -> dict[str, Any]:
        """Change the block; returns what was chosen, by group."""
        report: dict[str, Any] = {}
        for group in self.groups:
            if any(layer.solver == "keep" for layer in self.layers(group)):
                continue
            entry: dict[str, Any] = {}
            if self.recipe.smooth is not None:
                entry["alpha"] = self.smooth(group)
            if self.recipe.scale_search:
                entry["ratio"] = self.scale(group)
            report[group.name] = entry
        return report

    def layers(self, group: Group) -> list[Layer]:
        return self.recipe.layers_for(self.work.index, group.linears)

    def weights(self, group: Group) -> list[Tensor]:
        return [self.work.weights[name] for name in group.linears]

    def smooth(self, group: Group) -> float:
        weights = self.weights(group)
        found = self.statistics[group.name]
        layer = self.layers(group)[0]
        sizes = (found.largest, found.importance.sqrt())

        def allowed(scales: Tensor) -> Tensor:
            return self.work.allowed(group, scales)

        if self.recipe.smooth == "search" and layer.activations == "int8":
            x = self.inputs.spread(group)
            noise = int8_noise(x, weights, largest=found.largest, tokens=found.tokens)
            # the noise takes no product of matrices, and the error of the samples judges its choice
            alpha, scales = search_alpha(noise, sizes, weights)
            scales = refine(x, weights, scales, noise, allowed)
        elif self.recipe.smooth == "search":
            error = output_error(
                found, weights, layer.integers(self.stored), judge=self.judge(group)
            )
            alpha, scales = search_alpha(lambda s: error(allowed(s)), sizes, weights)
        elif group.source.endswith("norm"):  # the published method smooths what follows a norm
            alpha = float(self.recipe.smooth or 0)
            scales = smooth_scales(found.largest, weights, alpha)
        else:
            return 0.0
        self.fold(group, scales)
        return alpha

    def scale(self, group: Group) -> float:
        layers = self.layers(group)
        if layers[0].solver == "trellis":
            self.fold(group, even_scales(self.statistics[group.name], self.weights(group)))
            return 1.0
        compensated = any(layer.solver == "gptq" for layer in layers)
        ratio, scales = search_scales(
            self.statistics[group.name],
            self.weights(group),
            layers[0].integers(self.stored),
            judge=None if compensated else self.judge(group),
            compensated=compensated,
            allowed=lambda scales: self.work.allowed(group, scales),
        )
        self.fold(group, scales)
        return ratio

    def fold(self, group: Group, scales: Tensor) -> None:
        scales = self.work.fold(group, self.work.allowed(group, scales))
        self.statistics[group.name] = self.statistics[group.name].scaled(scales)
        self.inputs.scale(group, scales)

    def judge(self, group: Group) -> Judge | None:
        """The error of attention's or the MLP's output, for groups whose own is not yet it."""
        block = self.work.build()
        run = block.sublayer(group, self.context.mix)
        if run is None:
            return None
        inputs = self.inputs.batches(group)
        wanted = [run(x) for x in inputs]
        sizes = [self.sizes(i, y) for i, y in enumerate(wanted)]

        def judge(weights: Sequence[Tensor]) -> Tensor:
            self.work.swap(block, group, weights)
            total = torch.zeros((), dtype=torch.float64, device=self.work.device)
            for x, y, size in zip(inputs, wanted, sizes, strict=True):
                total += ((run(x) - y).float() / size).square().sum(dtype=torch.float64)
            return total

        return judge

    def sizes(self, batch: int, output: Tensor) -> Tensor | float:
        """What errors of `output` are divided by: where they are relative, the size of the hidden
        state that it is added to, or its own where that is larger.
        """
        if not self.recipe.relative:
            return 1.0
        before = root_mean_square(self.hidden[batch][: len(output)])
        return torch.maximum(before, root_mean_square(output))
