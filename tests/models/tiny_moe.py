"""Random mixtures of experts in the shapes of both families, written by transformers."""

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=512,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    mlp_only_layers=[1],
    tie_word_embeddings=False,
)
CASES = {
    "qwen2": lambda **more: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES | dict(shared_expert_intermediate_size=64) | more)
    ),
    "qwen2-normalized": lambda **more: CASES["qwen2"](norm_topk_prob=True, **more),
    "qwen3": lambda **more: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES | dict(head_dim=16, norm_topk_prob=True) | more)
    ),
    "qwen3-unnormalized": lambda **more: CASES["qwen3"](norm_topk_prob=False, **more),
}


def save(case, folder, **more):
    torch.manual_seed(0)
    model = CASES[case](**more).eval()
    for (
        name,
        parameter,
    ) in model.named_parameters():  # biases and norms are constants at first, and routers nearly so
        spread = 0.1 if parameter.ndim == 1 else 1.0 if name.endswith("gate.weight") else None
        if spread:
            parameter.data += spread * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model
