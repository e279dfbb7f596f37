"""DeepSeek-V2, V2-Lite, V3, R1, and what is built like them (Kimi K2, GLM-4.7-Flash): latent
attention, the first layers dense, experts beside shared ones.

    V2-Lite  queries straight from the hidden state, router: softmax, the largest
    V2       queries through a latent of their own, router: softmax in the best groups
    V3       the same queries, router: sigmoid with a correction, in the best groups (`noaux_tc`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import ROUTER, ROUTER_CORRECTION
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.models.config import Experts, Family, ModelConfig, MoeConfig, sizes
from flyweight.models.families.glm import read_experts, write_experts
from flyweight.models.plan import (
    AttentionPlan,
    ExpertsPlan,
    Group,
    Interleaved,
    LatentPlan,
    LayerPlan,
    ModelPlan,
    NormPlan,
    RouterPlan,
    TurnedHeads,
)
from flyweight.models.standard import change_layers, shared_expert, standard_plan

GREEDY = "greedy"
IN_GROUPS = "group_limited_greedy"
CORRECTED = "noaux_tc"


def deepseek_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        width = config.heads * config["v_head_dim"]
        mlp = layer.mlp
        if isinstance(mlp, ExpertsPlan) and config.moe is not None:
            shared = shared_expert(config, config.moe, "mlp.shared_experts.")
            mlp = replace(mlp, router=router(config, config.moe), shared=shared, shared_gate=None)
        return replace(
            layer,
            qkv=first_projections(config),
            attention=attention(config),
            o=replace(layer.o, source="", in_features=width),
            mlp=mlp,
        )

    return change_layers(standard_plan(config), change)


def attention(config: ModelConfig) -> AttentionPlan:
    rank = config["kv_lora_rank"]
    plain = config["qk_nope_head_dim"]
    rope = config.head_dim
    value = config["v_head_dim"]
    latent = LatentPlan(
        rank,
        plain,
        rope,
        value,
        norm=NormPlan("self_attn.kv_a_layernorm"),
        kv_b=Group(
            "kv_b",
            "self_attn.kv_a_layernorm",
            ("self_attn.kv_b_proj",),
            (config.heads * (plain + value),),
            rank,
        ),
    )
    if query_rank := config["q_lora_rank"]:
        query_b = Group(
            "q_b",
            "self_attn.q_a_layernorm",
            ("self_attn.q_b_proj",),
            (config.heads * (plain + rope),),
            query_rank,
            interleaved=interleaved(config, TurnedHeads(config.heads, rope, before=plain)),
        )
        norm = NormPlan("self_attn.q_a_layernorm")
        latent = replace(latent, query_norm=norm, query_b=query_b)
    scale = (plain + rope) ** -0.5 * score_factor(config)
    return AttentionPlan(config.heads, 1, rank + rope, scale, latent=latent)


def score_factor(config: ModelConfig) -> float:
    """YaRN's own, where config.json asks for it of all dimensions and not of those that turn."""
    rope = config.rope
    weight = rope.get("mscale_all_dim", 0)
    if rope.kind == "default" or not weight or rope["factor"] <= 1:
        return 1.0
    return (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2


def first_projections(config: ModelConfig) -> Group:
    """Queries, or the latent that they are made of, and the row of the cache."""
    rank = config["kv_lora_rank"]
    rope = config.head_dim
    plain = config["qk_nope_head_dim"]
    row = TurnedHeads(1, rope, before=rank)
    if query_rank := config["q_lora_rank"]:
        first = "self_attn.q_a_proj"
        size = query_rank
        row = replace(row, before=query_rank + rank)
        turned = interleaved(config, row)
    else:
        first = "self_attn.q_proj"
        size = config.heads * (plain + rope)
        turned = interleaved(config, TurnedHeads(config.heads, rope, before=plain), row)
    return Group(
        "qkv",
        "input_layernorm",
        (first, "self_attn.kv_a_proj_with_mqa"),
        (size, rank + rope),
        config.hidden_size,
        interleaved=turned,
    )


def interleaved(config: ModelConfig, *parts: TurnedHeads) -> Interleaved | None:
    return Interleaved(parts) if config["rope_interleave"] else None


def router(config: ModelConfig, moe: MoeConfig) -> RouterPlan:
    method = config["topk_method"]
    corrected = method == CORRECTED
    grouped = method != GREEDY
    return RouterPlan(
        ROUTER,
        moe.experts,
        moe.experts_per_token,
        moe.normalize_weights,
        kind="sigmoid" if corrected else "softmax",
        scale=float(config["routed_scaling_factor"]),
        bias=ROUTER_CORRECTION if corrected else None,
        groups=(config["n_group"] or 1) if grouped else 1,
        chosen_groups=(config["topk_group"] or 1) if grouped else 1,
    )


def checked_experts(methods: tuple[str, ...], scores: str, *, normalizes: bool) -> Experts:
    """Refuses routers that DeepSeek's own code has and transformers' does not."""

    def read(data: Mapping[str, Any], layers: int) -> MoeConfig:
        found = read_experts(data, layers)
        for key, known in (("topk_method", methods), ("scoring_func", (scores,))):
            value = data.get(key)
            if value is not None and value not in known:
                raise UnsupportedError(
                    f"config.json: {key} {value!r} is not supported for {data['model_type']}; "
                    f"known: {', '.join(known)}"
                )
        if found.normalize_weights and not normalizes:
            raise UnsupportedError(
                f"config.json: norm_topk_prob is not supported for {data['model_type']}"
            )
        return found

    return Experts(read, write_experts)


def read_typed_experts(data: Mapping[str, Any], layers: int) -> MoeConfig:
    """GLM-4.7-Flash's: a list may say which layers are dense."""
    kinds = data.get("mlp_layer_types")
    if kinds is None:
        return read_experts(data, layers)
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: 'mlp_layer_types' must hold {layers} of dense or sparse"
        )
    dense = tuple(index for index, kind in enumerate(kinds) if kind == "dense")
    return replace(read_experts(data, layers), dense_layers=dense)


LATENT = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128)
READS = ("n_routed_experts", "first_k_dense_replace")
V3 = Family(
    "DeepseekV3ForCausalLM",
    head_dim="qk_rope_head_dim",
    experts=checked_experts((CORRECTED,), "sigmoid", normalizes=True),
    defaults=dict(qk_rope_head_dim=64, first_k_dense_replace=3, norm_topk_prob=True),
    extras=LATENT
    | dict(
        rope_interleave=True,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        topk_method=CORRECTED,
        qk_rope_head_dim=64,
    ),
    reads=READS,
    plan=deepseek_plan,
)
GLM_LITE = replace(
    V3,
    architecture="Glm4MoeLiteForCausalLM",
    experts=Experts(read_typed_experts, write_experts),
    defaults=dict(
        qk_rope_head_dim=64, first_k_dense_replace=1, norm_topk_prob=True, rms_norm_eps=1e-5
    ),
    extras=dict(V3.extras)
    | dict(
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        routed_scaling_factor=1.8,
        n_group=1,
        topk_group=1,
    ),
)
FAMILIES = {
    "glm4_moe_lite": GLM_LITE,
    "deepseek_v2": replace(
        V3,
        architecture="DeepseekV2ForCausalLM",
        experts=checked_experts((GREEDY, IN_GROUPS), "softmax", normalizes=False),
        defaults=dict(qk_rope_head_dim=64),
        extras=dict(V3.extras)
        | dict(routed_scaling_factor=1.0, n_group=None, topk_group=None, topk_method=GREEDY),
    ),
    "deepseek_v3": V3,
    "kimi_k2": V3,
}

_YARN: dict[str, Any] = dict(
    rope_type="yarn",
    factor=40.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.707,
    mscale_all_dim=0.707,
    original_max_position_embeddings=4096,
)
_V2 = dict(
    model_type="deepseek_v2",
    architectures=["DeepseekV2ForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=_YARN,
    max_position_embeddings=163840,
    dtype="bfloat16",
    vocab_size=102400,
    bos_token_id=100000,
    eos_token_id=100001,
    tie_word_embeddings=False,
    norm_topk_prob=False,
    qk_rope_head_dim=64,
    **LATENT,
)
_YARN3 = _YARN | dict(mscale=1.0, mscale_all_dim=1.0)
PRESETS = {
    "deepseek-v2-lite": _V2
    | dict(
        q_lora_rank=None,
        topk_method=GREEDY,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
    )
    | sizes(2048, 10944, 27, 16, 16),
    "deepseek-v2": _V2
    | dict(
        topk_method=IN_GROUPS,
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
    )
    | sizes(5120, 12288, 60, 128, 128),
    "deepseek-v3": _V2
    | dict(
        model_type="deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"],
        rope_scaling=_YARN3,
        vocab_size=129280,
        bos_token_id=0,
        eos_token_id=1,
        topk_method=CORRECTED,
        scoring_func="sigmoid",
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=3,
    )
    | sizes(7168, 18432, 61, 128, 128),
}
