"""The plan of Llama and its like, from their config: norms before attention and MLP, rotary
attention, gated MLP or experts.

Families that differ take it and replace parts (`dataclasses.replace`). `plan_of` is what everybody
asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from flyweight.checkpoint.names import ROUTER, SHARED_GATE
from flyweight.models.config import FAMILIES, ModelConfig, MoeConfig
from flyweight.models.plan import (
    LOCAL,
    ROPE,
    AttentionPlan,
    ExpertsPlan,
    Group,
    LayerPlan,
    MlpPlan,
    ModelPlan,
    NormPlan,
    RouterPlan,
)


@functools.lru_cache(maxsize=64)
def plan_of(config: ModelConfig) -> ModelPlan:
    """The model as data: what executors run and quantization walks."""
    return (FAMILIES[config.model_type].plan or standard_plan)(config)


def standard_plan(config: ModelConfig) -> ModelPlan:
    return ModelPlan(
        tuple(standard_layer(config, index) for index in range(config.layers)), {ROPE: config.rope}
    )


def standard_layer(config: ModelConfig, index: int) -> LayerPlan:
    """Norms before attention and MLP, rotary attention, a gated MLP or experts."""
    hidden = config.hidden_size
    size = config.head_dim
    query = config.heads * size
    return LayerPlan(
        index=index,
        hidden_size=hidden,
        epsilon=config.epsilon,
        qkv=projections(config),
        attention=AttentionPlan(
            config.heads,
            config.kv_heads,
            size,
            config.attention_scale,
            config.windows[index],
            query_norm=NormPlan("self_attn.q_norm") if config.qk_norm else None,
            key_norm=NormPlan("self_attn.k_norm") if config.qk_norm else None,
        ),
        o=Group("o", "self_attn.v_proj", ("self_attn.o_proj",), (hidden,), query, config.o_bias),
        mlp=experts_plan(config, config.moe)
        if has_experts(config, index)
        else gated_mlp(config, "mlp.", config.intermediate_size, bias=config.mlp_bias),
        before_attention=NormPlan("input_layernorm"),
        before_mlp=NormPlan("post_attention_layernorm"),
    )


def projections(config: ModelConfig) -> Group:
    """q, k and v of the first norm's result."""
    query = config.heads * config.head_dim
    key = config.kv_heads * config.head_dim
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    sizes = (query, key, key)
    return Group("qkv", "input_layernorm", names, sizes, config.hidden_size, config.qkv_bias)


def fused(group: Group, name: str) -> Group:
    """The same group where the files hold its linears as one."""
    return replace(group, linears=(name,), sizes=(sum(group.sizes),))


def fused_mlp(mlp: MlpPlan, name: str = "mlp.gate_up_proj") -> MlpPlan:
    # A factor of down's inputs would have to come out of half of the rows.
    return MlpPlan(fused(mlp.gate_up, name), replace(mlp.down, source=""))


def fed_by(mlp: MlpPlan, source: str) -> MlpPlan:
    """The same MLP behind another norm, or behind none ("")."""
    return replace(mlp, gate_up=replace(mlp.gate_up, source=source))


def change_layers(plan: ModelPlan, change: Callable[[LayerPlan], LayerPlan]) -> ModelPlan:
    return replace(plan, layers=tuple(change(layer) for layer in plan.layers))


def with_local_rope(plan: ModelPlan, config: ModelConfig) -> ModelPlan:
    """Layers with a window turn by a table of their own."""
    if config.local_rope is None:
        return plan

    def turn(layer: LayerPlan) -> LayerPlan:
        rope = LOCAL if layer.attention.window else ROPE
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return replace(change_layers(plan, turn), ropes={ROPE: config.rope, LOCAL: config.local_rope})


def has_experts(config: ModelConfig, index: int) -> bool:
    return config.moe is not None and index not in config.moe.dense_layers


def gated_mlp(
    config: ModelConfig,
    prefix: str,
    width: int,
    *,
    name: str = "",
    source: str = "post_attention_layernorm",
    bias: bool = False,
) -> MlpPlan:
    hidden = config.hidden_size
    gate_up = Group(
        f"{name}gate_up",
        source,
        (f"{prefix}gate_proj", f"{prefix}up_proj"),
        (width, width),
        hidden,
        bias,
        activation=config.activation,
    )
    return MlpPlan(
        gate_up,
        Group(f"{name}down", f"{prefix}up_proj", (f"{prefix}down_proj",), (hidden,), width, bias),
    )


def experts_plan(config: ModelConfig, moe: MoeConfig | None) -> ExpertsPlan:
    assert moe is not None
    shared = shared_expert(config, moe, "mlp.shared_expert.")
    return ExpertsPlan(
        RouterPlan(ROUTER, moe.experts, moe.experts_per_token, moe.normalize_weights),
        tuple(
            gated_mlp(config, f"mlp.experts.{i}.", moe.intermediate_size, name=f"experts.{i}.")
            for i in range(moe.experts)
        ),
        shared,
        SHARED_GATE if shared else None,
    )


def shared_expert(config: ModelConfig, moe: MoeConfig, prefix: str) -> MlpPlan | None:
    width = moe.shared_intermediate_size
    return gated_mlp(config, prefix, width, name="shared_expert.") if width else None
