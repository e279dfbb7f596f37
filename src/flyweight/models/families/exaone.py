"""EXAONE 4: norms behind attention and MLP instead of before them, and of each head's queries and
keys. Where some layers have a window, only these turn queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.errors import UnsupportedError
from flyweight.models.config import Family, ModelConfig, sizes
from flyweight.models.config_values import FULL, SLIDING, count, one_in
from flyweight.models.families.olmo import behind
from flyweight.models.plan import LayerPlan, ModelPlan
from flyweight.models.standard import change_layers, standard_plan

INTERVAL = 4


def exaone_plan(config: ModelConfig) -> ModelPlan:
    windows = any(config.windows)

    def change(layer: LayerPlan) -> LayerPlan:
        layer = behind(layer)
        if not windows or layer.attention.window:
            return layer
        return replace(layer, attention=replace(layer.attention, rope=None))

    return change_layers(standard_plan(config), change)


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    if data.get("sliding_window") is None:
        return [FULL] * layers
    if SLIDING not in (data.get("layer_types") or [SLIDING]):
        raise UnsupportedError(
            "config.json: a 'sliding_window' that no layer has is not supported for exaone4: no "
            "layer would turn queries and keys"
        )
    if data.get("layer_types"):
        return list(data["layer_types"])
    pattern = data.get("sliding_window_pattern")
    if isinstance(pattern, str):  # as the first files have it: LLLG
        return one_in(len(pattern) or INTERVAL, layers)
    return one_in(count(data, "sliding_window_pattern", INTERVAL), layers)


FAMILIES = {
    "exaone4": Family(
        "Exaone4ForCausalLM",
        qk_norm=True,
        window="types",
        layer_types=layer_types,
        defaults=dict(
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=16384,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            sliding_window=4096,
        ),
        plan=exaone_plan,
    )
}

_EXAONE = dict(
    model_type="exaone4",
    architectures=["Exaone4ForCausalLM"],
    hidden_act="silu",
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    vocab_size=102400,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=361,
    pad_token_id=0,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=16.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
)
PRESETS = {
    "exaone-4-1.2b": _EXAONE
    | dict(
        max_position_embeddings=65536,
        sliding_window=None,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3,
    )
    | sizes(2048, 4096, 30, 32, 8),
    "exaone-4-32b": _EXAONE
    | dict(
        max_position_embeddings=131072,
        sliding_window=4096,
        tie_word_embeddings=False,
        rope_scaling=_LLAMA3,
    )
    | sizes(5120, 27392, 64, 40, 8),
}
