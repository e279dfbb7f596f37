"""dots.llm1: attention of Qwen3, experts of GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyweight.models.config import Experts, Family, sizes
from flyweight.models.config_values import FULL, trailing
from flyweight.models.families.glm import glm4_moe_plan, read_experts, write_experts


def layer_types(data: Mapping[str, Any], layers: int) -> list[str]:
    return [FULL] * layers if data.get("sliding_window") is None else trailing(data, layers)


FAMILIES = {
    "dots1": Family(
        "Dots1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="types",
        layer_types=layer_types,
        experts=Experts(read_experts, write_experts),
        defaults=dict(
            vocab_size=152064,
            hidden_size=4608,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            sliding_window=4096,
            max_window_layers=62,
        ),
        extras=dict(routed_scaling_factor=1.0, n_group=1, topk_group=1),
        reads=("n_routed_experts", "first_k_dense_replace"),
        plan=glm4_moe_plan,
    )
}

PRESETS = {
    "dots.llm1": dict(
        model_type="dots1",
        architectures=["Dots1ForCausalLM"],
        hidden_act="silu",
        rope_theta=1e7,
        rms_norm_eps=1e-5,
        head_dim=128,
        attention_bias=False,
        vocab_size=152064,
        max_position_embeddings=32768,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=None,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=151645,
        pad_token_id=151643,
        tie_word_embeddings=False,
    )
    | sizes(4096, 10944, 62, 32, 32)
}
