"""Granite: Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from flyweight.models.config import Family, ModelConfig, sizes
from flyweight.models.plan import LayerPlan, ModelPlan
from flyweight.models.standard import change_layers, standard_plan


def granite_plan(config: ModelConfig) -> ModelPlan:
    def scaled(layer: LayerPlan) -> LayerPlan:
        return replace(
            layer,
            attention=replace(layer.attention, scale=float(config["attention_multiplier"])),
            residual_scale=float(config["residual_multiplier"]),
        )

    return replace(
        change_layers(standard_plan(config), scaled),
        embedding_scale=float(config["embedding_multiplier"]),
        logit_scale=1 / config["logits_scaling"],
    )


FAMILIES = {
    "granite": Family(
        "GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        extras=dict(
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            attention_multiplier=1.0,
        ),
        defaults=dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
        ),
        plan=granite_plan,
    )
}

_GRANITE = dict(
    model_type="granite",
    architectures=["GraniteForCausalLM"],
    hidden_act="silu",
    rope_theta=1e7,
    rms_norm_eps=1e-5,
    vocab_size=49159,
    max_position_embeddings=131072,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
    tie_word_embeddings=True,
)
PRESETS = {
    "granite-3.3-2b": _GRANITE
    | dict(attention_multiplier=0.015625, logits_scaling=8.0)
    | sizes(2048, 8192, 40, 32, 8),
    "granite-3.3-8b": _GRANITE
    | dict(attention_multiplier=0.0078125, logits_scaling=16.0)
    | sizes(4096, 12800, 40, 32, 8),
}
