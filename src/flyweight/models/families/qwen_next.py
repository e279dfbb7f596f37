"""Qwen3-Next and Qwen3.5 (text): of four layers three are gated DeltaNet and one is attention whose
results are gated; norms are 1 + weight, rope turns a quarter of each head; experts beside a shared
one, or (Qwen3.5) a dense MLP.

The two differ in how files hold the projections of DeltaNet: Qwen3-Next in two linears, key head by
key head, Qwen3.5 in four, part by part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import HEAD_DIMS
from flyweight.kernels.gated_delta.shape import DeltaShape
from flyweight.models.config import Experts, Family, ModelConfig, sizes
from flyweight.models.config_values import state_layers
from flyweight.models.plan import (
    ByParts,
    DeltaPlan,
    Group,
    HeadParts,
    LayerPlan,
    ModelPlan,
    NormPlan,
)
from flyweight.models.standard import change_layers, standard_plan

INSIDE = "linear_attn."


def delta_shape(config: ModelConfig) -> DeltaShape:
    return DeltaShape(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        width=config["linear_conv_kernel_dim"],
    )


def by_key_heads(config: ModelConfig, shape: DeltaShape) -> Group:
    """Two linears; a key head has all of its parts together."""
    values = shape.sharing * shape.value_dim
    parts = (shape.key_dim, shape.key_dim, values, values)
    order = ByParts(
        (
            HeadParts(shape.key_heads, parts, (0, 1, 2, 3)),
            HeadParts(shape.key_heads, (shape.sharing, shape.sharing), (0, 1)),
        )
    )
    rows = (shape.channels + shape.outputs, 2 * shape.value_heads)
    names = (f"{INSIDE}in_proj_qkvz", f"{INSIDE}in_proj_ba")
    return Group("qkv", "input_layernorm", names, rows, config.hidden_size, interleaved=order)


def by_parts(config: ModelConfig, shape: DeltaShape) -> Group:
    """Four linears, in the order that the kernels read."""
    names = tuple(f"{INSIDE}in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    rows = (shape.channels, shape.outputs, shape.value_heads, shape.value_heads)
    return Group("qkv", "input_layernorm", names, rows, config.hidden_size)


def delta_layer(config: ModelConfig, layer: LayerPlan) -> LayerPlan:
    shape = delta_shape(config)
    project = by_key_heads if config.model_type == "qwen3_next" else by_parts
    return replace(
        layer,
        qkv=project(config, shape),
        # a factor of its inputs would have to come out of a norm that all heads share
        o=Group("o", "", (f"{INSIDE}out_proj",), (config.hidden_size,), shape.outputs),
        delta=DeltaPlan(
            shape,
            conv=f"{INSIDE}conv1d.weight",
            decay=f"{INSIDE}A_log",
            step_bias=f"{INSIDE}dt_bias",
            norm=NormPlan(f"{INSIDE}norm"),
        ),
    )


def gated_layer(config: ModelConfig, layer: LayerPlan) -> LayerPlan:
    """q_proj holds a query and its gate for each head; gates come first here, so that q, k and v
    stay together.
    """
    size = config.head_dim
    order = ByParts((HeadParts(config.heads, (size, size), (1, 0)),))
    rows = (2 * layer.qkv.sizes[0], *layer.qkv.sizes[1:])
    return replace(
        layer,
        qkv=replace(layer.qkv, sizes=rows, interleaved=order),
        attention=replace(
            layer.attention,
            gated=True,
            query_norm=NormPlan("self_attn.q_norm", plus_one=True),
            key_norm=NormPlan("self_attn.k_norm", plus_one=True),
        ),
    )


def qwen_next_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        stated = layer.index in config.state_layers
        return replace(
            (delta_layer if stated else gated_layer)(config, layer),
            before_attention=NormPlan("input_layernorm", plus_one=True),
            before_mlp=NormPlan("post_attention_layernorm", plus_one=True),
        )

    plan = change_layers(standard_plan(config), change)
    return replace(plan, norm=NormPlan("model.norm", plus_one=True))


DELTA = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
SHARED: dict[str, Any] = dict(
    partial_rope=True,
    activations=("silu",),  # the convolution and the gate have it, too
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    state_layers=state_layers,
    extras=DELTA,
    reads=("full_attention_interval", "attn_output_gate"),
    plan=qwen_next_plan,
)
ROPE = dict(partial_rotary_factor=0.25, max_position_embeddings=32768)
FAMILIES = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        head_dim=HEAD_DIMS["qwen3_next"],
        experts=Experts(),
        defaults=ROPE
        | sizes(2048, 5632, 48, 16, 2)
        | dict(
            vocab_size=151936,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        ),
        **SHARED,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        head_dim=HEAD_DIMS["qwen3_5_text"],
        defaults=ROPE | sizes(4096, 12288, 32, 16, 4) | dict(vocab_size=248320),
        **SHARED,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        head_dim=HEAD_DIMS["qwen3_5_moe_text"],
        experts=Experts(),
        defaults=ROPE
        | sizes(2048, 512, 40, 16, 2)
        | dict(
            vocab_size=248320,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        ),
        **SHARED,
    ),
}

_QWEN3_NEXT = dict(
    model_type="qwen3_next",
    architectures=["Qwen3NextForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    head_dim=256,
    vocab_size=151936,
    max_position_embeddings=262144,
    dtype="bfloat16",
    bos_token_id=151643,
    eos_token_id=[151645, 151643],
    pad_token_id=151643,
    tie_word_embeddings=False,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_topk_prob=True,
    full_attention_interval=4,
    **DELTA,
)
_QWEN35 = dict(
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    head_dim=256,
    vocab_size=248320,
    max_position_embeddings=262144,
    dtype="bfloat16",
    eos_token_id=248044,
    tie_word_embeddings=False,
    full_attention_interval=4,
    **DELTA,
)
PRESETS = {
    "qwen3-next-80b-a3b": _QWEN3_NEXT | sizes(2048, 5120, 48, 16, 2),
    "qwen3.5-9b": _QWEN35
    | dict(model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"])
    | sizes(4096, 12288, 32, 16, 4),
    "qwen3.5-35b-a3b": _QWEN35
    | dict(
        model_type="qwen3_5_moe_text",
        architectures=["Qwen3_5MoeForCausalLM"],
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
    )
    | sizes(2048, 512, 40, 16, 2),
}
