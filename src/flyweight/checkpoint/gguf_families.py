"""The architectures of GGUF files: what llama.cpp calls their parts, and what its metadata leaves
to be known.

One entry a family, data but for a few settings. llama.cpp knows some of them by the architecture
alone (Gemma's windows, the layers of SmolLM3 without rope), so they are written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
OUT = {"attn_output": "self_attn.o_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FIRST_NORM = {"attn_norm": "input_layernorm"}
SECOND_NORM = {"ffn_norm": "post_attention_layernorm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
# of mixtures: the router, and tensors that hold a matrix of every expert
ROUTER = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {f"{old}_exps": new.replace("mlp.", "mlp.experts.{}.") for old, new in MLP.items()}
PLAIN = FIRST_NORM | QKV | OUT | SECOND_NORM | MLP
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LONG_ROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}

# (the file, config so far) → more of config
Settings = Callable[[Any, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class GgufFamily:
    model_type: str
    transformers: str  # the class
    parts: dict[str, str]  # of a layer: llama.cpp's name → Hugging Face's
    experts: dict[str, str] = field(default_factory=dict)  # likewise, {} being the number of one
    turned: bool = False  # rows of q and k lie in the order of llama.cpp's own rope
    raised: bool = False  # 1 was added to the weights of norms
    whole_norms: bool = False  # of queries and keys, over all heads
    biased: bool = False  # q, k and v always have one
    windows: bool = False  # a sliding window is no surprise
    partial_rope: bool = False  # rope may turn a part of each head
    settings: Settings = lambda file, config: {}


def gemma_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Of the largest model queries are scaled by their mean width, not by that of a head."""
    layers = {"gemma2": 46, "gemma3": 62}[file.architecture]
    largest = config["num_hidden_layers"] == layers
    width = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "sliding_window": int(file.number("attention.sliding_window")),
    }
    if file.architecture == "gemma2":
        return found | {
            "attn_logit_softcapping": file.setting("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": file.setting("final_logit_softcapping", 30.0),
        }
    return found | {
        "rope_local_base_freq": file.setting("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 6,
    }


def granite_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": file.setting("embedding_scale", 1.0),
        "residual_multiplier": file.setting("residual_scale", 1.0),
        "attention_multiplier": file.number("attention.scale"),
        "logits_scaling": file.setting("logit_scale", 1.0),
    }


def phi_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    original = file.setting(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    found = {
        "sliding_window": file.setting("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }
    if all(name in file.tensors for name in LONG_ROPE.values()):
        factors = {key: file.values(name).tolist() for key, name in LONG_ROPE.items()}
        found["rope_scaling"] = {"type": "longrope", **factors}
    return found


def mixture_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Of Qwen3: every layer has experts, whose shares add up to 1."""
    return {
        "num_experts": int(file.number("expert_count")),
        "num_experts_per_tok": int(file.number("expert_used_count")),
        "moe_intermediate_size": int(file.number("expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def smollm_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "use_sliding_window": False,
    }


FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", PLAIN, turned=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", PLAIN, biased=True),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", PLAIN | HEAD_NORMS),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        FIRST_NORM | QKV | OUT | HEAD_NORMS | SECOND_NORM | ROUTER,
        EXPERTS,
        settings=mixture_settings,
    ),
    "gemma2": GgufFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA_NORMS | QKV | OUT | MLP,
        raised=True,
        windows=True,
        settings=gemma_settings,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA_NORMS | QKV | OUT | HEAD_NORMS | MLP,
        raised=True,
        windows=True,
        settings=gemma_settings,
    ),
    "granite": GgufFamily(
        "granite", "GraniteForCausalLM", PLAIN, turned=True, settings=granite_settings
    ),
    "olmo2": GgufFamily(
        "olmo2",
        "Olmo2ForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
        | QKV
        | OUT
        | HEAD_NORMS
        | MLP,
        whole_norms=True,
    ),
    "phi3": GgufFamily(
        "phi3",
        "Phi3ForCausalLM",
        FIRST_NORM | SECOND_NORM | {"attn_qkv": "self_attn.qkv_proj"} | OUT | FUSED_MLP,
        windows=True,
        partial_rope=True,
        settings=phi_settings,
    ),
    "glm4": GgufFamily(
        "glm4",
        "Glm4ForCausalLM",
        FIRST_NORM
        | SECOND_NORM
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
        | QKV
        | OUT
        | FUSED_MLP,
        partial_rope=True,
    ),
    "smollm3": GgufFamily(
        "smollm3", "SmolLM3ForCausalLM", PLAIN, turned=True, settings=smollm_settings
    ),
}
BY_TYPE = {family.model_type: family for family in FAMILIES.values()}


def lowered(family: GgufFamily, name: str, values: Tensor) -> Tensor:
    """Weights of a norm as Hugging Face has them."""
    return values.float() - 1 if family.raised and name.endswith("norm.weight") else values
