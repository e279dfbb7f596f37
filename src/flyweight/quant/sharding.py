"""Weights that several GPUs can divide among them (`quantize --shards N`).

Engines cut o and down by their inputs, all other linears by their outputs. A group of inputs that
shares a scale, or a vector of outputs that shares an entry of a codebook, must lie on one GPU:
group sizes are chosen so, and what cannot be divided is refused before the work.
"""

from __future__ import annotations

import torch

from flyweight.errors import OptionError
from flyweight.models.config import ModelConfig
from flyweight.models.plan import Group
from flyweight.models.standard import plan_of
from flyweight.quant.recipe import Recipe
from flyweight.quant.vptq import choose_shape

LONGEST_VECTOR = 8  # that vptq chooses by itself


def is_cut_by_inputs(group: Group) -> bool:
    return group.name == "o" or group.name.endswith("down")


def linear_widths(config: ModelConfig, shards: int = 1) -> list[int]:
    """How many inputs linears of this model have on a GPU: a group size must divide each."""
    found = set()
    for layer in plan_of(config).layers:
        for group in layer.groups:
            found.add(group.in_features)
            if not is_cut_by_inputs(group):
                continue
            if group.in_features % shards:
                raise OptionError(
                    f"--shards {shards}: {group.linears[0]} has {group.in_features} inputs, which "
                    f"{shards} GPUs cannot divide"
                )
            found.add(group.in_features // shards)
    return sorted(found)


def check_pruning(config: ModelConfig, recipe: Recipe) -> None:
    """2:4 keeps two of every four inputs."""
    for width in linear_widths(config) if recipe.sparse else ():
        if width % 4:
            raise OptionError(
                f"2:4 pruning needs linears of a multiple of four inputs; this model has some of "
                f"{width}: take a scheme without `sparse`"
            )


def check_vectors(config: ModelConfig, recipe: Recipe, shards: int) -> None:
    """There must be a codebook that each layer of vptq is large enough for; its vectors are outputs
    of one column, and each must be one GPU's.
    """
    for index, layer in enumerate(plan_of(config).layers):
        for group in layer.groups:
            if not group.sizes:
                continue
            chosen = recipe.layers_for(index, group.linears)
            for name, size, one in zip(group.linears, group.sizes, chosen, strict=True):
                if one.solver != "vptq":
                    continue
                choose_shape(one.vptq(torch.float16, 0), size, group.in_features)
                if is_cut_by_inputs(group):
                    continue
                length = one.vector_length or LONGEST_VECTOR
                if shards > 1 and size % (shards * length):
                    raise OptionError(
                        f"--shards {shards}: {name} has {size} outputs, no whole number of vectors "
                        f"of {length} for each GPU; take another length (--scheme vptq:v8-…)"
                    )
