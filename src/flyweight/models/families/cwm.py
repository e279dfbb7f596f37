"""CWM: Llama with a window in three of four layers, the first sees everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyweight.models.config import Family, sizes
from flyweight.models.config_values import FULL, SLIDING

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e6,
    factor=16.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
)


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    return [SLIDING if index % 4 else FULL for index in range(layers)]


SHAPE = sizes(6144, 21504, 64, 48, 8, head_dim=128) | dict(
    vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, sliding_window=8192
)
FAMILIES = {
    "cwm": Family(
        "CwmForCausalLM",
        window="types",
        layer_types=layer_types,
        head_dim=128,
        defaults=SHAPE | dict(rope_parameters=LLAMA3),
    )
}

PRESETS = {
    "cwm-32b": SHAPE
    | dict(
        model_type="cwm",
        architectures=["CwmForCausalLM"],
        hidden_act="silu",
        rope_theta=1e6,
        rope_scaling={key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        pad_token_id=None,
        tie_word_embeddings=False,
    )
}
