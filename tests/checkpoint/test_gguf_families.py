"""GGUF files of families beyond Llama and Qwen, as llama.cpp names their parts: logits as
transformers computes them."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import tiny_model, write_gguf

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.gguf import GGUF
from flyweight.checkpoint.hub import resolve
from flyweight.errors import UnsupportedError
from flyweight.models.decoder import Decoder

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOKENS = torch.arange(2, 60)[None]  # longer than every window
LONG = {
    f"rope_factors_{kind}.weight": np.linspace(1, factor, 16, dtype=np.float32)
    for kind, factor in (("long", 4), ("short", 2))
}
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0
)
YARN_FIELDS = dict(
    rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
)
MIXTURE = dict(
    tied=False,
    pad_token_id=0,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)
MIXTURE_FIELDS = dict(
    expert_count=4,
    expert_used_count=2,
    expert_feed_forward_length=32,
    expert_shared_count=2,
    leading_dense_block_count=1,
    expert_weights_scale=1.5,
)
LATENT = dict(
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_key_value_heads=3,
    head_dim=16,
    rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7, rope_theta=1e4),
)
LATENT_FIELDS = dict(
    attention__kv_lora_rank=32,
    attention__key_length=48,
    attention__value_length=32,
    attention__key_length_mla=48,
    attention__value_length_mla=32,
    rope__dimension_count=16,
)


STATES = dict(
    tied=False,
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    pad_token_id=0,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]
    ),
)
STATE_FIELDS = dict(
    rope__dimension_count=8,
    ssm__conv_kernel=4,
    ssm__state_size=16,
    ssm__group_count=2,
    ssm__time_step_rank=6,
    ssm__inner_size=192,
    nextn_predict_layers=0,
)


def fields_of(architecture, more, **fields):
    return {f"{architecture}__{name}": value for name, value in (more | fields).items()}


# (options of the tiny model, metadata that llama.cpp's converter writes besides)
FAMILIES = {
    "gemma2": (
        dict(sliding_window=16, query_pre_attn_scalar=32, head_dim=32),
        dict(
            gemma2__attention__sliding_window=16,
            gemma2__attn_logit_softcapping=50.0,
            gemma2__final_logit_softcapping=30.0,
        ),
    ),
    "gemma3_text": (
        dict(sliding_window=16, query_pre_attn_scalar=32, head_dim=32, num_hidden_layers=6),
        dict(gemma3__attention__sliding_window=16),
    ),
    "granite": (
        dict(
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.125,
            logits_scaling=2.0,
        ),
        dict(
            granite__embedding_scale=3.0,
            granite__residual_scale=0.5,
            granite__attention__scale=0.125,
            granite__logit_scale=2.0,
        ),
    ),
    "olmo2": ({}, {}),
    "olmo3": (
        dict(
            sliding_window=16,
            num_hidden_layers=4,
            tied=False,
            pad_token_id=0,
            rope_parameters=dict(
                full_attention=YARN | dict(rope_theta=1e4),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
        fields_of(
            "olmo2",
            YARN_FIELDS,
            attention__sliding_window=16,
            attention__sliding_window_pattern=[True, True, True, False],
            rope__scaling__yarn_beta_fast=32.0,
        ),
    ),
    "ministral3": (
        dict(
            tied=False,
            pad_token_id=0,
            rope_parameters=YARN
            | dict(
                rope_theta=1e4,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            ),
        ),
        fields_of(
            "mistral3",
            YARN_FIELDS,
            rope__scaling__original_context_length=64,
            rope__scaling__yarn_log_multiplier=1.0,
            attention__temperature_scale=0.1,
        ),
    ),
    "mistral": (dict(tied=False, pad_token_id=0, sliding_window=None), {}),
    "phi3": (dict(tied=False, pad_token_id=0), {}),
    "glm4": (
        dict(tied=False, partial_rotary_factor=0.5, attention_bias=True, pad_token_id=0),
        dict(glm4__rope__dimension_count=16),
    ),
    "qwen2_moe": (
        dict(
            tied=False,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            norm_topk_prob=False,
        ),
        fields_of(
            "qwen2moe",
            {},
            expert_count=4,
            expert_used_count=2,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=64,
        ),
    ),
    "qwen3_moe": (
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
        dict(
            qwen3moe__expert_count=4,
            qwen3moe__expert_used_count=2,
            qwen3moe__expert_feed_forward_length=32,
        ),
    ),
    "smollm3": (dict(num_hidden_layers=4, pad_token_id=0), {}),
    "gpt_oss": (
        dict(
            tied=False,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            pad_token_id=0,
            rope_parameters=YARN | dict(rope_theta=1e4, truncate=False),
        ),
        fields_of(
            "gpt-oss",
            YARN_FIELDS,
            expert_count=4,
            expert_used_count=2,
            expert_feed_forward_length=64,
            attention__sliding_window=16,
        ),
    ),
    "glm4_moe": (
        dict(
            MIXTURE,
            n_group=1,
            topk_group=1,
            use_qk_norm=True,
            attention_bias=True,
            partial_rotary_factor=0.5,
        ),
        fields_of(
            "glm4moe",
            MIXTURE_FIELDS,
            expert_weights_norm=True,
            rope__dimension_count=16,
            nextn_predict_layers=1,
        ),
    ),
    "deepseek_v2": (
        dict(MIXTURE, **LATENT, q_lora_rank=None, topk_method="greedy"),
        fields_of(
            "deepseek2",
            MIXTURE_FIELDS | LATENT_FIELDS | YARN_FIELDS,
            rope__scaling__yarn_log_multiplier=0.07,
        ),
    ),
    "deepseek_v3": (
        dict(MIXTURE, **LATENT, q_lora_rank=32, n_group=2, topk_group=1),
        fields_of(
            "deepseek2",
            MIXTURE_FIELDS | LATENT_FIELDS | YARN_FIELDS,
            rope__scaling__yarn_log_multiplier=0.07,
            attention__q_lora_rank=32,
            expert_group_count=2,
            expert_group_used_count=1,
            expert_gating_func=2,
            expert_weights_norm=True,
        ),
    ),
    "qwen3_next": (
        dict(
            tied=False,
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            norm_topk_prob=True,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            partial_rotary_factor=0.25,
            pad_token_id=0,
        ),
        fields_of(
            "qwen3next",
            {},
            expert_count=4,
            expert_used_count=2,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=32,
            rope__dimension_count=8,
            ssm__conv_kernel=4,
            ssm__state_size=16,
            ssm__group_count=2,
            ssm__time_step_rank=4,
            ssm__inner_size=128,
        ),
    ),
    "qwen3_5_text": (STATES, fields_of("qwen35", STATE_FIELDS)),
    "qwen3_5_moe_text": (
        STATES
        | dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        fields_of(
            "qwen35moe",
            STATE_FIELDS,
            expert_count=4,
            expert_used_count=2,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=32,
        ),
    ),
}
# of those whose tensors are cut out of others, put together or turned: one that keeps its bits
KEPT = {
    "granite": "model.layers.0.self_attn.q_proj.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "glm4_moe": "model.layers.1.mlp.shared_experts.up_proj.weight",
    "deepseek_v2": "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
    "qwen3_next": "model.layers.0.linear_attn.in_proj_qkvz.weight",
    "qwen3_5_text": "model.layers.0.linear_attn.out_proj.weight",
}
GUESSING = {
    "blk.2.nextn.enorm.weight": np.ones(96, dtype=np.float32)
}  # of a layer behind the model's own


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))


def answers(folder):
    decoder = Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32, exact=True)
    with torch.inference_mode():
        return decoder.forward_whole(TOKENS)[0]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_computes_what_its_model_does(tmp_path, kind):
    options, fields = FAMILIES[kind]
    model = tiny_model(kind, **options)
    extra = GUESSING if kind == "glm4_moe" else None
    path = write_gguf(tmp_path / "model.gguf", model, extra=extra, **fields)
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    assert torch.allclose(answers(resolve(path)), expected, atol=1e-4 * float(expected.abs().max()))
    if kind not in KEPT:
        return
    quantized = write_gguf(tmp_path / "quantized.gguf", model, quantize=Q8_0, extra=extra, **fields)
    assert Checkpoint(resolve(quantized)).in_blocks(KEPT[kind])
    kept = answers(resolve(quantized))
    assert torch.allclose(
        kept, answers(resolve(quantized, dtype="float32")), atol=1e-3 * float(kept.abs().max())
    )
    assert not torch.equal(kept, expected)


def test_blocks_that_reach_across_value_heads_become_floats(tmp_path):
    """Columns of Qwen3.5's out_proj change their places by heads: of 16 here, where blocks have
    32."""
    sizes = dict(linear_value_head_dim=16)
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("qwen3_5_text", **STATES | sizes),
        quantize=Q8_0,
        **fields_of("qwen35", STATE_FIELDS | dict(ssm__inner_size=96)),
    )
    folder = resolve(path)
    checkpoint = Checkpoint(folder)
    assert not checkpoint.in_blocks("model.layers.0.linear_attn.out_proj.weight")
    assert checkpoint.in_blocks("model.layers.0.linear_attn.in_proj_qkv.weight")
    kept = answers(folder)
    assert torch.allclose(
        kept, answers(resolve(path, dtype="float32")), atol=1e-3 * float(kept.abs().max())
    )


def test_long_rope_comes_from_the_factors_in_the_file(tmp_path):
    from flyweight.checkpoint.gguf_config import make_config

    model = tiny_model("phi3", tied=False, pad_token_id=0)
    fields = dict(phi3__rope__scaling__original_context_length=32)
    config = make_config(
        GGUF(write_gguf(tmp_path / "model.gguf", model, extra=LONG, **fields)), torch.float16
    )
    assert (
        config["original_max_position_embeddings"] == 32
        and config["rope_scaling"]["type"] == "longrope"
    )
    assert config["rope_scaling"]["long_factor"] == LONG["rope_factors_long.weight"].tolist()


def test_a_window_where_a_family_has_none_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("qwen3"), qwen3__attention__sliding_window=16
    )
    with pytest.raises(UnsupportedError, match="sliding-window"):
        resolve(path)
