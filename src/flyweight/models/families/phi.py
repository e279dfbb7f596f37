"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and long rope."""

from __future__ import annotations

from dataclasses import replace

from flyweight.models.config import Family, ModelConfig, sizes
from flyweight.models.plan import LayerPlan, MlpPlan, ModelPlan
from flyweight.models.standard import change_layers, fused, fused_mlp, standard_plan


def phi_layer(layer: LayerPlan) -> LayerPlan:
    assert isinstance(layer.mlp, MlpPlan)
    return replace(
        layer,
        qkv=fused(layer.qkv, "self_attn.qkv_proj"),
        # the rows of v are a part of qkv_proj: no factor is taken out of them
        o=replace(layer.o, source=""),
        mlp=fused_mlp(layer.mlp),
    )


def phi_plan(config: ModelConfig) -> ModelPlan:
    return change_layers(standard_plan(config), phi_layer)


FAMILIES = {
    "phi3": Family(
        "Phi3ForCausalLM",
        partial_rope=True,
        window="all",
        defaults=dict(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        plan=phi_plan,
    )
}

_PHI = dict(
    model_type="phi3",
    architectures=["Phi3ForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-5,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    sliding_window=None,
    tie_word_embeddings=False,
)
PRESETS = {
    "phi-3-mini-4k": _PHI
    | dict(vocab_size=32064, rope_theta=1e4, max_position_embeddings=4096, sliding_window=2047)
    | sizes(3072, 8192, 32, 32, 32),
    "phi-4": _PHI
    | dict(vocab_size=100352, rope_theta=250000.0, max_position_embeddings=16384)
    | sizes(5120, 17920, 40, 40, 10),
    # within its trained length; the factors of its long rope are in its own config.json
    "phi-4-mini": _PHI
    | dict(
        vocab_size=200064,
        rope_theta=1e4,
        max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
    )
    | sizes(3072, 8192, 32, 24, 8),
}
