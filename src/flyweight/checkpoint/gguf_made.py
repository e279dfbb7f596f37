"""Tensors that llama.cpp's converter has cut in two, put together again as Hugging Face has them.

`linear_attn.in_proj_qkvz` of Qwen3-Next: the file has queries, keys and values of all heads in one
tensor and their gates in another; here a key head has all of its parts together. Rows only change
their places, so they keep the bits of the file where both tensors have the same type.

`self_attn.kv_b_proj` of DeepSeek: the file has the keys' part turned, head by head, and the values'
as it is. Turned blocks are no blocks, so these become floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.gguf_header import Stored
from flyweight.errors import UnsupportedError

F32, F16, BF16 = 0, 1, 30  # types of the file


@dataclass(frozen=True)
class Recipe:
    sources: tuple[str, str]
    build: Callable[[Mapping[str, Any], Tensor, Tensor], Tensor]
    by_rows: bool  # it only moves rows


@dataclass(frozen=True)
class Made:
    """One such tensor of a file."""

    recipe: Recipe
    first: Stored
    second: Stored
    stored: Stored  # what it will be; it lies nowhere

    @property
    def keeps_bits(self) -> bool:
        return self.recipe.by_rows and self.first.type == self.second.type

    def build(self, config: Mapping[str, Any], first: Tensor, second: Tensor) -> Tensor:
        return self.recipe.build(config, first, second).contiguous()


def by_key_heads(config: Mapping[str, Any], qkv: Tensor, gates: Tensor) -> Tensor:
    heads = config["linear_num_key_heads"]
    keys = heads * config["linear_key_head_dim"]
    parts = qkv.split([keys, keys, len(qkv) - 2 * keys])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in (*parts, gates)], 1).flatten(0, 1)


def by_heads(config: Mapping[str, Any], keys: Tensor, values: Tensor) -> Tensor:
    """[heads, rank, key] and [heads, value, rank] → [heads · (key + value), rank]"""
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


RECIPES = {
    "linear_attn.in_proj_qkvz.weight": Recipe(
        ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"), by_key_heads, True
    ),
    "self_attn.kv_b_proj.weight": Recipe(
        ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"), by_heads, False
    ),
}


def take_made(
    table: dict[str, Stored], wanted: tuple[str, ...], config: Mapping[str, Any], file: Path
) -> dict[str, Made]:
    """What can be put together of a file; `table` has it in the place of its sources then."""
    found = {}
    for kind in wanted:
        recipe = RECIPES[kind]
        prefixes = {
            name.removesuffix(source)
            for source in recipe.sources
            for name in table
            if name.endswith(source)
        }
        for prefix in prefixes:
            sources = [table.pop(prefix + source, None) for source in recipe.sources]
            name = prefix + kind
            if name in table:  # older files have both
                continue
            first, second = sources
            if first is None or second is None:
                raise UnsupportedError(
                    f"{file}: the parts of {name!r} lie in different files; join these with "
                    f"`llama-gguf-split --merge`"
                )
            shapes = [torch.empty(one.shape, device="meta") for one in (first, second)]
            shape = tuple(recipe.build(config, *shapes).shape)
            kept = recipe.by_rows and first.type == second.type
            number = first.type if kept else float_type(first.type, second.type)
            found[name] = Made(recipe, first, second, Stored(shape, number, -1))
    table |= {name: made.stored for name, made in found.items()}
    return found


def float_type(first: int, second: int) -> int:
    if first == second == BF16:
        return BF16
    return F32 if F32 in (first, second) else F16
