"""What the values of config.json and generation_config.json may be, checked when a folder is
opened.

JSON lets anybody write `"temperature": "0.7"`, `NaN` or a context of 10^9. Such a value would come
up much later: as a traceback, as an engine that dies at its first request, or as a model that talks
nonsense. Only values are checked here, and only of keys that mean something to this package; which
keys an architecture needs is the business of `models/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyweight.errors import CheckpointError

LONGEST_CONTEXT = 1 << 24  # tokens; the longest that is published has 10,485,760
LONGEST_SHOWN = 60  # characters of a wrong value in its error


@dataclass(frozen=True)
class Whole:
    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number between {self.least} and {self.most}"

    def fits(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most


@dataclass(frozen=True)
class Number:
    least: float
    most: float

    def __str__(self) -> str:
        return f"a number between {self.least:g} and {self.most:g}"

    def fits(self, value: Any) -> bool:
        return (
            type(value) in (int, float)
            and math.isfinite(value)
            and self.least <= value <= self.most
        )


@dataclass(frozen=True)
class Kind:
    words: str
    test: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.words

    def fits(self, value: Any) -> bool:
        return self.test(value)


def is_id(value: Any) -> bool:
    return type(value) is int and -1 <= value < 2**31  # -1: there is none


FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
WHOLES = Kind(
    "a list of whole numbers",
    lambda value: isinstance(value, list) and all(type(item) is int for item in value),
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TOKEN_ID = Kind("a token id", is_id)
TOKEN_IDS = Kind(
    "a token id or a list of them",
    lambda value: is_id(value) or (isinstance(value, list) and all(is_id(item) for item in value)),
)
SIZE = Whole(1, 1 << 24)
CONTEXT = Whole(1, LONGEST_CONTEXT)
FACTOR = Number(1e-3, 1e4)
THETA = Number(2, 1e12)

Rules = Mapping[str, Whole | Number | Kind]
CONFIG: Rules = {
    "model_type": TEXT,
    "architectures": TEXTS,
    "hidden_act": TEXT,
    "dtype": TEXT,
    "torch_dtype": TEXT,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": Whole(1, 10_000),
    "vocab_size": SIZE,
    "num_attention_heads": Whole(1, 1 << 16),
    "num_key_value_heads": Whole(1, 1 << 16),
    "head_dim": Whole(1, 1 << 16),
    "max_position_embeddings": CONTEXT,
    "original_max_position_embeddings": CONTEXT,
    "rms_norm_eps": Number(0, 1),
    "rope_theta": THETA,
    "partial_rotary_factor": Number(0, 1),
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "quantization_config": OBJECT,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "norm_topk_prob": FLAG,
    "sliding_window": Whole(0, 1 << 31),
    "max_window_layers": Whole(0, 10_000),
    "layer_types": TEXTS,
    "num_experts": Whole(0, 1 << 16),
    "num_local_experts": Whole(0, 1 << 16),
    "num_experts_per_tok": Whole(0, 1 << 16),
    "moe_intermediate_size": Whole(0, 1 << 24),
    "shared_expert_intermediate_size": Whole(0, 1 << 24),
    "decoder_sparse_step": Whole(1, 10_000),
    "mlp_only_layers": WHOLES,
    "bos_token_id": TOKEN_IDS,
    "eos_token_id": TOKEN_IDS,
    "pad_token_id": TOKEN_ID,
}
ROPE: Rules = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": THETA,
    "partial_rotary_factor": Number(0, 1),
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "original_max_position_embeddings": Number(1, LONGEST_CONTEXT),
    "attention_factor": FACTOR,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "mscale": Number(0, 1e4),
    "mscale_all_dim": Number(0, 1e4),
    "truncate": FLAG,
}
GENERATION: Rules = {
    "temperature": Number(0, 100),
    "top_k": Whole(0, 1 << 31),
    "top_p": Number(1e-6, 1),
    "min_p": Number(0, 1),
    "repetition_penalty": Number(0.01, 100),
    "do_sample": FLAG,
    "bos_token_id": TOKEN_IDS,
    "eos_token_id": TOKEN_IDS,
    "pad_token_id": TOKEN_ID,
}


def check_config(config: Mapping[str, Any], file: Path) -> None:
    check(config, CONFIG, file)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), Mapping):
            check_rope(config, key, file)


def check_generation_config(generation: Mapping[str, Any], file: Path) -> None:
    check(generation, GENERATION, file)


def check(values: Mapping[str, Any], rules: Rules, file: Path, prefix: str = "") -> None:
    """A key that is missing or null is as if it were not there."""
    for key, rule in rules.items():
        value = values.get(key)
        if value is not None and not rule.fits(value):
            raise CheckpointError(f"{file}: {prefix + key!r} must be {rule}, not {shown(value)}")


def check_rope(config: Mapping[str, Any], key: str, file: Path) -> None:
    scaling = config[key]
    check(scaling, ROPE, file, prefix=f"{key}.")
    low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise CheckpointError(
            f"{file}: '{key}.high_freq_factor' must be greater than "
            f"'low_freq_factor' ({low}), not {high}"
        )
    kind = scaling.get("rope_type") or scaling.get("type")
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    length = (original or config.get("max_position_embeddings") or 1) * (scaling.get("factor") or 1)
    if kind in ("linear", "dynamic", "yarn") and length > LONGEST_CONTEXT:
        raise CheckpointError(
            f"{file}: '{key}.factor' makes a context of {length:.0f} tokens, "
            f"more than {LONGEST_CONTEXT}"
        )


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"
