"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and long rope."""

from __future__ import annotations

from dataclasses import replace

from flyweight.models.config import Family, ModelConfig
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
