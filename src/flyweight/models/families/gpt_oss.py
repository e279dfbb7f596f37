"""gpt-oss: a sink in every head, windows in every other layer, experts with a clipped swiglu, and
biases everywhere.

Its files hold all experts of a layer in one tensor, gate and up by turns, in 16 bits or in MXFP4;
checkpoint/stacked.py takes them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flyweight.checkpoint.names import HEAD_DIMS
from flyweight.models.config import Experts, Family, ModelConfig, MoeConfig, sizes
from flyweight.models.config_values import count, one_in
from flyweight.models.plan import ExpertsPlan, Group, LayerPlan, MlpPlan, ModelPlan
from flyweight.models.standard import change_layers, standard_plan

ACTIVATION = "clipped_swiglu"


def biased(group: Group) -> Group:
    activation = ACTIVATION if group.activation else None
    return replace(group, bias=True, activation=activation)


def gpt_oss_plan(config: ModelConfig) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        assert isinstance(layer.mlp, ExpertsPlan)
        router = replace(
            layer.mlp.router,
            weight="mlp.router.weight",
            bias="mlp.router.bias",
            kind="chosen_softmax",
        )
        experts = tuple(MlpPlan(biased(one.gate_up), biased(one.down)) for one in layer.mlp.experts)
        return replace(
            layer,
            attention=replace(layer.attention, sinks="self_attn.sinks"),
            mlp=replace(layer.mlp, router=router, experts=experts),
        )

    return change_layers(standard_plan(config), change)


def read_experts(data: Mapping[str, Any], layers: int) -> MoeConfig:
    return MoeConfig(
        experts=count(data, "num_local_experts"),
        experts_per_token=count(data, "num_experts_per_tok"),
        intermediate_size=count(data, "intermediate_size"),
        shared_intermediate_size=None,
        normalize_weights=False,
        dense_layers=(),
    )


def write_experts(moe: MoeConfig) -> dict[str, Any]:
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
    }


YARN = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)
FAMILIES = {
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        window="types",
        layer_types=lambda data, layers: one_in(2, layers),
        head_dim=HEAD_DIMS["gpt_oss"],
        experts=Experts(read_experts, write_experts),
        activations=("silu",),
        defaults=dict(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            num_local_experts=128,
            num_experts_per_tok=4,
            max_position_embeddings=131072,
            sliding_window=128,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            rope_parameters=YARN,
            attention_bias=True,
        ),
        plan=gpt_oss_plan,
    )
}

_GPT_OSS = dict(
    model_type="gpt_oss",
    architectures=["GptOssForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_scaling=YARN,
    head_dim=64,
    vocab_size=201088,
    max_position_embeddings=131072,
    sliding_window=128,
    attention_bias=True,
    num_experts_per_tok=4,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_id=200002,
    pad_token_id=199999,
    tie_word_embeddings=False,
)
PRESETS = {
    "gpt-oss-20b": _GPT_OSS | sizes(2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _GPT_OSS | sizes(2880, 2880, 36, 64, 8, num_local_experts=128),
}
