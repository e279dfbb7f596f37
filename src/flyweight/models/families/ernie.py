"""ERNIE 4.5 (dense): Llama whose rope turns neighbours together."""

from __future__ import annotations

from flyweight.models.config import Family, sizes
from flyweight.models.families.glm import with_pairs

FAMILIES = {
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        head_dim=128,
        defaults=dict(
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
        plan=with_pairs,
    )
}

PRESETS = {
    "ernie-4.5-0.3b": dict(
        model_type="ernie4_5",
        architectures=["Ernie4_5ForCausalLM"],
        hidden_act="silu",
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        head_dim=128,
        vocab_size=103424,
        max_position_embeddings=131072,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    | sizes(1024, 3072, 18, 16, 2)
}
