"""Ministral: Mistral with windows in the layers that `layer_types` names.

Mistral Small is a Mistral of other sizes; files that hold it beside a vision tower are read by
their text part (checkpoint/text_part.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyweight.models.config import Family
from flyweight.models.config_values import FULL, SLIDING


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    return [FULL if data.get("sliding_window") is None else SLIDING] * layers


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
    )
}
