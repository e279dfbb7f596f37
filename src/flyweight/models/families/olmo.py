"""OLMo 2 and OLMo 3: norms behind attention and MLP instead of before them, and over all queries
and all keys of a token; OLMo 3 has three layers with a window to one without. OLMoE: experts, and
the norms of queries and keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.models.config import Experts, Family, ModelConfig, MoeConfig, read_moe, sizes
from flyweight.models.config_values import one_in
from flyweight.models.plan import LayerPlan, MlpPlan, ModelPlan, NormPlan
from flyweight.models.standard import change_layers, fed_by, standard_plan, with_local_rope


def behind(layer: LayerPlan) -> LayerPlan:
    """Norms behind attention and MLP alone."""
    assert isinstance(layer.mlp, MlpPlan)
    return replace(
        layer,
        qkv=replace(layer.qkv, source=""),
        mlp=fed_by(layer.mlp, ""),
        before_attention=None,
        before_mlp=None,
        after_attention=NormPlan("post_attention_layernorm"),
        after_mlp=NormPlan("post_feedforward_layernorm"),
    )


def with_whole_norms(layer: LayerPlan) -> LayerPlan:
    return replace(layer, attention=replace(layer.attention, whole_norms=True))


def olmo_layer(layer: LayerPlan) -> LayerPlan:
    return with_whole_norms(behind(layer))


def olmoe_plan(config: ModelConfig) -> ModelPlan:
    return change_layers(standard_plan(config), with_whole_norms)


def read_experts(data: Mapping[str, Any], layers: int) -> MoeConfig:
    return read_moe({**data, "moe_intermediate_size": data.get("intermediate_size")}, layers)


def write_experts(moe: MoeConfig) -> dict[str, Any]:
    return dict(
        num_experts=moe.experts,
        num_experts_per_tok=moe.experts_per_token,
        norm_topk_prob=moe.normalize_weights,
    )


def olmo_plan(config: ModelConfig) -> ModelPlan:
    return with_local_rope(change_layers(standard_plan(config), olmo_layer), config)


OLMO2 = dict(
    vocab_size=50304,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
FAMILIES = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        defaults=OLMO2,
        plan=olmo_plan,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="types",
        layer_types=lambda data, layers: one_in(4, layers),
        local_rope="rope_theta",
        defaults=OLMO2 | dict(rope_theta=500000.0, sliding_window=4096),
        plan=olmo_plan,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        experts=Experts(read_experts, write_experts),
        defaults=dict(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        plan=olmoe_plan,
    ),
}

_OLMO = dict(
    hidden_act="silu",
    rope_theta=500000.0,
    rms_norm_eps=1e-6,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_id=100257,
    pad_token_id=100277,
    tie_word_embeddings=False,
)
_OLMO3 = _OLMO | dict(
    model_type="olmo3",
    architectures=["Olmo3ForCausalLM"],
    vocab_size=100278,
    max_position_embeddings=65536,
    sliding_window=4096,
    rope_scaling=dict(
        rope_type="yarn",
        factor=8.0,
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_position_embeddings=8192,
    ),
)
PRESETS = {
    "olmo2-7b": _OLMO
    | dict(
        model_type="olmo2",
        architectures=["Olmo2ForCausalLM"],
        vocab_size=100352,
        max_position_embeddings=4096,
    )
    | sizes(4096, 11008, 32, 32, 32),
    "olmo3-7b": _OLMO3 | sizes(4096, 11008, 32, 32, 32),
    "olmo3-32b": _OLMO3 | sizes(5120, 27648, 64, 40, 8),
    "olmoe-1b-7b": _OLMO
    | dict(
        model_type="olmoe",
        architectures=["OlmoeForCausalLM"],
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        vocab_size=50304,
        max_position_embeddings=4096,
        eos_token_id=50279,
        pad_token_id=1,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    )
    | sizes(2048, 1024, 16, 16, 16),
}
