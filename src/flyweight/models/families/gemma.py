"""Gemma: norms of 1 + weight, tanh-gelu, scaled embeddings. Gemma 2 and Gemma 3 (text): norms
behind attention and MLP too, layers with a window among those that see everything. Gemma 2 caps
scores and logits; Gemma 3 norms queries and keys and has a rope table for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import HEAD_DIMS
from flyweight.models.config import Family, ModelConfig, sizes
from flyweight.models.config_values import one_in
from flyweight.models.plan import LayerPlan, MlpPlan, ModelPlan, NormPlan
from flyweight.models.standard import change_layers, fed_by, standard_plan, with_local_rope


def plus_one(norm: NormPlan | None) -> NormPlan | None:
    return None if norm is None else replace(norm, plus_one=True)


def gemma_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        assert isinstance(layer.mlp, MlpPlan)
        return replace(
            layer,
            attention=replace(
                layer.attention,
                scale=config["query_pre_attn_scalar"] ** -0.5,
                soft_cap=config.get("attn_logit_softcapping"),
                query_norm=plus_one(layer.attention.query_norm),
                key_norm=plus_one(layer.attention.key_norm),
            ),
            mlp=fed_by(layer.mlp, "pre_feedforward_layernorm"),
            before_attention=NormPlan("input_layernorm", plus_one=True),
            after_attention=NormPlan("post_attention_layernorm", plus_one=True),
            before_mlp=NormPlan("pre_feedforward_layernorm", plus_one=True),
            after_mlp=NormPlan("post_feedforward_layernorm", plus_one=True),
        )

    plan = with_local_rope(change_layers(standard_plan(config), change), config)
    return replace(
        plan,
        norm=NormPlan("model.norm", plus_one=True),
        embedding_scale=config.hidden_size**0.5,
        logit_soft_cap=config["final_logit_softcapping"],
    )


def first_gemma_plan(config: ModelConfig) -> ModelPlan:
    """Gemma: Llama with norms of 1 + weight and scaled embeddings."""

    def change(layer: LayerPlan) -> LayerPlan:
        return replace(
            layer,
            before_attention=plus_one(layer.before_attention),
            before_mlp=plus_one(layer.before_mlp),
        )

    return replace(
        change_layers(standard_plan(config), change),
        norm=NormPlan("model.norm", plus_one=True),
        embedding_scale=config.hidden_size**0.5,
    )


def gemma3_layers(data: Mapping[str, Any], layers: int) -> list[str]:
    return one_in(data.get("sliding_window_pattern") or 6, layers)


GEMMA = dict(
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
    sliding_window=4096,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
)
FAMILIES = {
    "gemma": Family(
        "GemmaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        head_dim=HEAD_DIMS["gemma"],
        activations=("gelu_tanh", "silu"),
        defaults=GEMMA
        | dict(
            vocab_size=256000,
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=8192,
        ),
        plan=first_gemma_plan,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        window="types",
        layer_types=lambda data, layers: one_in(2, layers),
        head_dim=HEAD_DIMS["gemma2"],
        activation_key="hidden_activation",
        activations=("gelu_tanh", "silu"),
        defaults=GEMMA | dict(vocab_size=256000, max_position_embeddings=8192),
        extras=dict(
            query_pre_attn_scalar=256,
            final_logit_softcapping=30.0,
            attn_logit_softcapping=50.0,
        ),
        plan=gemma_plan,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="types",
        layer_types=gemma3_layers,
        head_dim=HEAD_DIMS["gemma3_text"],
        local_rope="rope_local_base_freq",
        activation_key="hidden_activation",
        activations=("gelu_tanh", "silu"),
        defaults=GEMMA
        | dict(vocab_size=262208, max_position_embeddings=131072, rope_theta=1000000.0),
        extras=dict(query_pre_attn_scalar=256, final_logit_softcapping=None),
        plan=gemma_plan,
    ),
}

_GEMMA2 = dict(
    model_type="gemma2",
    architectures=["Gemma2ForCausalLM"],
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    head_dim=256,
    query_pre_attn_scalar=256,
    vocab_size=256000,
    max_position_embeddings=8192,
    sliding_window=4096,
    dtype="bfloat16",
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
    tie_word_embeddings=True,
)
_GEMMA3 = _GEMMA2 | dict(
    model_type="gemma3_text",
    architectures=["Gemma3ForCausalLM"],
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_scaling=dict(rope_type="linear", factor=8.0),
    vocab_size=262208,
    max_position_embeddings=131072,
    sliding_window=1024,
)
PRESETS = {
    "gemma-2b": dict(
        model_type="gemma",
        architectures=["GemmaForCausalLM"],
        hidden_act="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        head_dim=256,
        vocab_size=256000,
        max_position_embeddings=8192,
        dtype="bfloat16",
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    | sizes(2048, 16384, 18, 8, 1),
    "gemma-2-2b": _GEMMA2 | sizes(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _GEMMA2 | sizes(3584, 14336, 42, 16, 8),
    "gemma-2-27b": _GEMMA2
    | sizes(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-1b": _GEMMA3
    | dict(rope_scaling=None, sliding_window=512, vocab_size=262144, max_position_embeddings=32768)
    | sizes(1152, 6912, 26, 4, 1),
    "gemma-3-4b": _GEMMA3 | sizes(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _GEMMA3 | sizes(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _GEMMA3
    | sizes(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
}
