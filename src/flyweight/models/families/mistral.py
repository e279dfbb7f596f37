"""Ministral: Mistral with windows in the layers that `layer_types` names. Ministral 3: Mistral with
YaRN, whose queries grow with their position behind the trained length; sequences end there.

Mistral Small is a Mistral of other sizes; files that hold it beside a vision tower are read by
their text part (checkpoint/text_part.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyweight.models.config import Family, sizes
from flyweight.models.config_values import FULL, SLIDING


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    return [FULL if data.get("sliding_window") is None else SLIDING] * layers


YARN = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
FAMILIES = {
    "ministral": Family(
        "MinistralForCausalLM",
        window="types",
        layer_types=layer_types,
        defaults=dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            sliding_window=4096,
        ),
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        window="all",
        head_dim=128,
        defaults=dict(
            vocab_size=131072,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=34,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=262144,
            rms_norm_eps=1e-5,
            sliding_window=None,
            rope_parameters=YARN,
        ),
    ),
}

_MISTRAL = dict(
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1e8,
    head_dim=128,
    vocab_size=131072,
    max_position_embeddings=32768,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
)
PRESETS = {
    "mistral-small-24b": _MISTRAL
    | dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    | sizes(5120, 32768, 40, 32, 8),
    "ministral-8b": _MISTRAL
    | dict(model_type="ministral", architectures=["MinistralForCausalLM"], sliding_window=32768)
    | sizes(4096, 12288, 36, 32, 8),
    "ministral-3-8b": _MISTRAL
    | dict(
        model_type="ministral3",
        architectures=["Ministral3ForCausalLM"],
        max_position_embeddings=262144,
        rope_theta=1e6,
        rope_scaling={key: value for key, value in YARN.items() if key != "rope_theta"},
        sliding_window=None,
    )
    | sizes(4096, 14336, 34, 32, 8),
}
