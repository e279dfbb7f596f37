"""Seed-OSS: Llama with biases of its own for o, and heads of 128 whatever the hidden size."""

from __future__ import annotations

from flyweight.models.config import Family, sizes

FAMILIES = {
    "seed_oss": Family(
        "SeedOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        head_dim=128,
        defaults=dict(
            vocab_size=155136,
            hidden_size=4096,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            max_position_embeddings=524288,
            attention_bias=True,
        ),
    )
}

PRESETS = {
    "seed-oss-36b": dict(
        model_type="seed_oss",
        architectures=["SeedOssForCausalLM"],
        hidden_act="silu",
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        head_dim=128,
        attention_bias=True,
        vocab_size=155136,
        max_position_embeddings=524288,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    | sizes(5120, 27648, 64, 80, 8)
}
