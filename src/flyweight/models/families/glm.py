"""GLM-4: rope over neighbours in half of each head, gate and up in one tensor, and (from 0414 on)
norms behind attention and MLP too. GLM-4.5 and later: experts by a sigmoid router beside a shared
one, the first layers dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import HEAD_DIMS, ROUTER, ROUTER_CORRECTION
from flyweight.models.config import Experts, Family, ModelConfig, MoeConfig, sizes
from flyweight.models.config_values import count, flag
from flyweight.models.plan import (
    ExpertsPlan,
    Interleaved,
    LayerPlan,
    MlpPlan,
    ModelPlan,
    NormPlan,
    RouterPlan,
    TurnedHeads,
)
from flyweight.models.standard import change_layers, fused_mlp, shared_expert, standard_plan


def with_pairs(config: ModelConfig) -> ModelPlan:
    """Llama whose rope turns neighbours together."""
    rotary = config.rope.rotary_dim
    turned = TurnedHeads(config.heads + config.kv_heads, rotary, after=config.head_dim - rotary)
    pairs = Interleaved((turned,))
    return change_layers(
        standard_plan(config),
        lambda layer: replace(layer, qkv=replace(layer.qkv, interleaved=pairs)),
    )


def glm_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        assert isinstance(layer.mlp, MlpPlan)
        return replace(layer, mlp=fused_mlp(layer.mlp))

    return change_layers(with_pairs(config), change)


def sandwich(layer: LayerPlan) -> LayerPlan:
    return replace(
        layer,
        after_attention=NormPlan("post_self_attn_layernorm"),
        after_mlp=NormPlan("post_mlp_layernorm"),
    )


def glm4_plan(config: ModelConfig) -> ModelPlan:
    return change_layers(glm_plan(config), sandwich)


def glm4_moe_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        if not isinstance(layer.mlp, ExpertsPlan) or config.moe is None:
            return layer
        router = RouterPlan(
            ROUTER,
            config.moe.experts,
            config.moe.experts_per_token,
            config.moe.normalize_weights,
            kind="sigmoid",
            scale=float(config["routed_scaling_factor"]),
            bias=ROUTER_CORRECTION,
            groups=config["n_group"],
            chosen_groups=config["topk_group"],
        )
        shared = shared_expert(config, config.moe, "mlp.shared_experts.")
        return replace(
            layer, mlp=replace(layer.mlp, router=router, shared=shared, shared_gate=None)
        )

    return change_layers(standard_plan(config), change)


def read_experts(data: Mapping[str, Any], layers: int) -> MoeConfig:
    width = count(data, "moe_intermediate_size")
    first = count(data, "first_k_dense_replace") if data.get("first_k_dense_replace") else 0
    key = "n_routed_experts" if "n_routed_experts" in data else "num_local_experts"
    return MoeConfig(
        experts=count(data, key),
        experts_per_token=count(data, "num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * (data.get("n_shared_experts") or 0) or None,
        normalize_weights=flag(data, "norm_topk_prob"),
        dense_layers=tuple(range(min(first, layers))),
    )


def write_experts(moe: MoeConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": (moe.shared_intermediate_size or 0) // moe.intermediate_size,
        "norm_topk_prob": moe.normalize_weights,
        "first_k_dense_replace": len(moe.dense_layers),
    }


GLM = dict(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=2,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    partial_rotary_factor=0.5,
    attention_bias=True,
)
GLM_MOE = dict(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=10944,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    moe_intermediate_size=1408,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_routed_experts=128,
    first_k_dense_replace=1,
    norm_topk_prob=True,
)
FAMILIES = {
    "glm": Family(
        "GlmForCausalLM",
        partial_rope=True,
        qkv_bias="attention_bias",
        head_dim=HEAD_DIMS["glm"],
        defaults=GLM,
        plan=glm_plan,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        partial_rope=True,
        qkv_bias="attention_bias",
        head_dim=HEAD_DIMS["glm4"],
        defaults=GLM,
        plan=glm4_plan,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        partial_rope=True,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=Experts(read_experts, write_experts),
        defaults=GLM_MOE,
        extras=dict(routed_scaling_factor=1.0, n_group=1, topk_group=1),
        reads=("n_routed_experts", "first_k_dense_replace"),
        plan=glm4_moe_plan,
    ),
}

_GLM4 = dict(
    model_type="glm4",
    architectures=["Glm4ForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    head_dim=128,
    vocab_size=151552,
    max_position_embeddings=32768,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_id=[151329, 151336, 151338],
    pad_token_id=151329,
    tie_word_embeddings=False,
)
PRESETS = {
    "glm-4-9b": _GLM4 | dict(attention_bias=True) | sizes(4096, 13696, 40, 32, 2),
    "glm-4-32b": _GLM4 | dict(attention_bias=False) | sizes(6144, 23040, 61, 48, 8),
    "glm-4.5-air": _GLM4
    | dict(
        model_type="glm4_moe",
        architectures=["Glm4MoeForCausalLM"],
        rope_theta=1e6,
        max_position_embeddings=131072,
        attention_bias=True,
        use_qk_norm=False,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    | sizes(4096, 10944, 46, 96, 8),
}
