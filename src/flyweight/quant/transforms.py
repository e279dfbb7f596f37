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
from flyweight.quant.smoothquant import balanced, search_alpha, smooth_scales
from flyweight.quant.trellis import even_scales
from flyweight.quant.work import WorkBlock, root_mean_square

JUDGED_TOKENS = 4096  # tokens on which the scale search runs attention and MLP


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
        self.searches = recipe.scale_search or recipe.smooth == "search"
        self.inputs = GroupInputs(JUDGED_TOKENS if self.searches else 0)
        self.groups = work.plan.foldable_groups
        self.statistics = work.statistics(
            hidden,
            context,
            self.groups,
            see=self.inputs.keep,
            relative=recipe.relative,
            products=self.searches,
        )

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
        kind = self.recipe.smooth
        if kind == "balance":
            gated = group.name == "down"
            alpha, scales = balanced(found.importance, found.largest, weights, gated=gated)
        elif kind == "search":
            settings = self.layers(group)[0].integers(self.stored)
            error = output_error(found, weights, settings, judge=self.judge(group))
            alpha, scales = search_alpha(
                lambda scales: error(self.work.allowed(group, scales)),
                (found.largest, found.importance.sqrt()),
                weights,
            )
        elif group.source.endswith("norm"):  # the published method smooths what follows a norm
            alpha = float(kind or 0)
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
