"""Mixtral and MiniMax-M2: experts under other names. Mixtral's router is Qwen3-MoE's; that of
MiniMax-M2 has sigmoids with a correction, and norms are over all queries and all keys of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import BLOCK_ROUTER, BLOCK_ROUTER_CORRECTION
from flyweight.models.config import Experts, Family, ModelConfig, MoeConfig, sizes
from flyweight.models.families import gpt_oss
from flyweight.models.plan import ExpertsPlan, LayerPlan, MlpPlan, ModelPlan, RouterPlan
from flyweight.models.standard import change_layers, standard_plan


def read_experts(data: Mapping[str, Any], layers: int) -> MoeConfig:
    """Named as in gpt-oss, whose router has no shares left to normalize."""
    return replace(gpt_oss.read_experts(data, layers), normalize_weights=True)


def named(mlp: MlpPlan, index: int) -> MlpPlan:
    gate, up, down = (f"block_sparse_moe.experts.{index}.{name}" for name in ("w1", "w3", "w2"))
    return MlpPlan(
        replace(mlp.gate_up, linears=(gate, up)), replace(mlp.down, source=up, linears=(down,))
    )


def with_experts(layer: LayerPlan, router: RouterPlan) -> LayerPlan:
    assert isinstance(layer.mlp, ExpertsPlan)
    experts = tuple(named(one, index) for index, one in enumerate(layer.mlp.experts))
    return replace(layer, mlp=replace(layer.mlp, router=router, experts=experts))


def router_of(config: ModelConfig, **more: Any) -> RouterPlan:
    assert config.moe is not None
    moe = config.moe
    return RouterPlan(BLOCK_ROUTER, moe.experts, moe.experts_per_token, True, **more)


def mixtral_plan(config: ModelConfig) -> ModelPlan:
    router = router_of(config)
    return change_layers(standard_plan(config), lambda layer: with_experts(layer, router))


def minimax_plan(config: ModelConfig) -> ModelPlan:
    router = router_of(config, kind="sigmoid", bias=BLOCK_ROUTER_CORRECTION)

    def change(layer: LayerPlan) -> LayerPlan:
        attention = replace(layer.attention, whole_norms=True)
        return with_experts(replace(layer, attention=attention), router)

    return change_layers(standard_plan(config), change)


FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        window="all",
        experts=Experts(read_experts, gpt_oss.write_experts),
        defaults=dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_experts_per_tok=2,
            num_local_experts=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=None,
        ),
        plan=mixtral_plan,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        qk_norm=True,
        partial_rope=True,
        head_dim=128,
        experts=Experts(read_experts, gpt_oss.write_experts),
        defaults=dict(
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=1536,
            num_hidden_layers=62,
            num_attention_heads=48,
            num_key_value_heads=8,
            num_experts_per_tok=8,
            num_local_experts=256,
            max_position_embeddings=196608,
            rope_theta=5e6,
        ),
        reads=("use_qk_norm",),
        plan=minimax_plan,
    ),
}

_MIXTRAL = dict(hidden_act="silu", dtype="bfloat16", pad_token_id=None, tie_word_embeddings=False)
PRESETS = {
    "mixtral-8x7b": _MIXTRAL
    | dict(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        vocab_size=32000,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    | sizes(4096, 14336, 32, 32, 8),
    "minimax-m2": _MIXTRAL
    | dict(
        model_type="minimax_m2",
        architectures=["MiniMaxM2ForCausalLM"],
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        partial_rotary_factor=0.5,
        head_dim=128,
        vocab_size=200064,
        max_position_embeddings=196608,
        bos_token_id=200034,
        eos_token_id=200020,
        num_local_experts=256,
        num_experts_per_tok=8,
    )
    | sizes(3072, 1536, 62, 48, 8),
}
