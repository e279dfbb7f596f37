"""Rotary position tables: cos and sin of every position, for plain, linear, dynamic, llama3, YaRN
and long rope frequencies.

Made once at load in float32 and indexed by position, so a step costs one gather whatever the
scaling. Dynamic NTK changes its frequencies with the length of the sequence: row p holds those of a
sequence of p + 1 tokens, which is what a token-by-token run sees and what keeps cached keys valid;
transformers re-scales a long prompt as a whole.

Long rope has frequencies for sequences within the trained length and others beyond it. Row p holds
those of a sequence of p + 1 tokens too, and a second half of the table (`long_rows` on) the second
kind for every position: a prompt that is longer than the trained length is turned by it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flyweight.models.config import ModelConfig
from flyweight.models.plan import RopeConfig
from flyweight.models.standard import plan_of

RopeTables = Mapping[str | None, tuple[Tensor, Tensor]]


def all_tables(config: ModelConfig, device: torch.device | str = "cpu") -> RopeTables:
    """By the names that the layers of the plan give them; layers without rope turn by no angle
    (None).
    """
    plan = plan_of(config)
    found: dict[str | None, tuple[Tensor, Tensor]] = {
        name: rope_tables(config, device, rope) for name, rope in plan.ropes.items()
    }
    rows = max(len(cos) for cos, _ in found.values())
    for name, pair in found.items():
        if len(pair[0]) < rows:  # beside long rope: the same for prompts of any length
            found[name] = torch.cat([pair[0]] * 2), torch.cat([pair[1]] * 2)
    if any(layer.attention.rope is None for layer in plan.layers):
        shape = (rows, config.head_dim // 2)
        found[None] = torch.ones(shape, device=device), torch.zeros(shape, device=device)
    return found


def rope_tables(
    config: ModelConfig, device: torch.device | str = "cpu", rope: RopeConfig | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [context length, rotary_dim / 2], the attention factor of YaRN
    multiplied in.
    """
    rope = rope or config.rope
    positions = torch.arange(config.context_length, dtype=torch.float32)
    if rope.kind == "dynamic":
        lengths = (positions + 1).clamp(min=config.max_positions).double()
        angles = positions[:, None] * _dynamic(rope, lengths, config.max_positions)
    elif rope.kind == "longrope":
        angles = _long_angles(rope, positions)
    else:
        angles = positions[:, None] * inverse_frequencies(rope)
    factor = 1.0
    if rope.kind == "yarn":
        factor = _attention_factor(rope)
    elif rope.kind == "longrope":
        factor = _long_factor(rope, config.max_positions)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Float32 [rotary_dim / 2]: radians per position."""
    plain = 1.0 / rope.theta ** (
        torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    )
    if rope.kind == "linear":
        return plain / rope["factor"]
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, plain) if rope.kind == "yarn" else plain


def long_border(config: ModelConfig) -> int | None:
    """The longest prompt that long rope turns by its first frequencies; None: no such rope."""
    ropes = (config.rope, config.local_rope)
    borders = [
        rope["original_max_position_embeddings"]
        for rope in ropes
        if rope is not None and rope.kind == "longrope"
    ]
    return borders[0] if borders else None


def long_rows(config: ModelConfig, tokens: int) -> int:
    """Where in the tables the rows of a sequence begin whose prompt has so many tokens."""
    border = long_border(config)
    return config.context_length if border is not None and tokens > border else 0


def _long_angles(rope: RopeConfig, positions: Tensor) -> Tensor:
    """[2 · positions, rotary_dim / 2]"""
    plain = rope.theta ** (
        torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    )
    short, long = (
        positions[:, None] * (1.0 / (torch.tensor(rope[key]) * plain))
        for key in ("short_factor", "long_factor")
    )
    within = positions[:, None] < rope["original_max_position_embeddings"]
    return torch.cat([torch.where(within, short, long), long])


def _long_factor(rope: RopeConfig, max_positions: int) -> float:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor", max_positions / original)
    if (given := rope.get("attention_factor")) is not None:
        return given
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _dynamic(rope: RopeConfig, lengths: Tensor, max_positions: int) -> Tensor:
    """[lengths, rotary_dim / 2]: the base grows with what lies beyond the trained length."""
    dim = rope.rotary_dim
    factor = rope["factor"]
    base = rope.theta * (factor * lengths / max_positions - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base.float()[:, None] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    # in the original context
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / rope["factor"] * (1 - keep)


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """As llama3, but the blend is linear in the index of the frequency."""
    dim = rope.rotary_dim
    original = rope["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = index_of(rope.get("beta_fast", 32))
    high = index_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    high += 0.001 if low == high else 0
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope["factor"] * stretch + plain * (1 - stretch)


def _attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return given
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
