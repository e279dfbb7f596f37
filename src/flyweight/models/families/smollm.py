"""SmolLM3: Llama, every fourth layer of which turns no queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.errors import CheckpointError
from flyweight.models.config import Family, ModelConfig, sizes
from flyweight.models.config_values import FULL, SLIDING
from flyweight.models.plan import LayerPlan, ModelPlan
from flyweight.models.standard import change_layers, standard_plan

INTERVAL = 4


def turned(flags: Any, interval: int, layers: int) -> list[bool]:
    """Which layers have rope; despite its name `no_rope_layers` holds a 1 for those that do."""
    if flags is None:
        return [(index + 1) % interval != 0 for index in range(layers)]
    if len(flags) < layers:
        raise CheckpointError(f"config.json: 'no_rope_layers' must hold {layers} flags")
    return [bool(flag) for flag in flags[:layers]]


def smollm3_plan(config: ModelConfig) -> ModelPlan:
    ropes = turned(config["no_rope_layers"], config["no_rope_layer_interval"], config.layers)

    def choose(layer: LayerPlan) -> LayerPlan:
        if ropes[layer.index]:
            return layer
        return replace(layer, attention=replace(layer.attention, rope=None))

    return change_layers(standard_plan(config), choose)


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    interval = data.get("no_rope_layer_interval", INTERVAL)
    ropes = turned(data.get("no_rope_layers"), interval, layers)
    return [FULL if rope else SLIDING for rope in ropes]


FAMILIES = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        window="layers",
        layer_types=layer_types,
        extras=dict(no_rope_layers=None, no_rope_layer_interval=INTERVAL),
        defaults=dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rope_theta=2000000.0,
            tie_word_embeddings=True,
        ),
        plan=smollm3_plan,
    )
}

PRESETS = {
    "smollm3-3b": dict(
        model_type="smollm3",
        architectures=["SmolLM3ForCausalLM"],
        hidden_act="silu",
        rope_theta=5e6,
        rms_norm_eps=1e-6,
        vocab_size=128256,
        max_position_embeddings=65536,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=128012,
        pad_token_id=128004,
        tie_word_embeddings=True,
        no_rope_layers=[1, 1, 1, 0] * 9,
    )
    | sizes(2048, 11008, 36, 16, 4)
}
