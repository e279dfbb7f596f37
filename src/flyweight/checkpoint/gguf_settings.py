"""What the metadata of a GGUF file says of its family alone, in the keys of config.json.

A function takes the file and the config that is common to all families, and returns what to add or
to change. llama.cpp knows some settings by the architecture alone (Gemma's windows, the layers of
SmolLM3 without rope), so they are written out here.
"""

from __future__ import annotations

from typing import Any

LONG_ROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


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


def shared_mixture_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Of Qwen2: an expert for all tokens beside those, whose shares are left as they are."""
    return mixture_settings(file, config) | {
        "shared_expert_intermediate_size": int(file.number("expert_shared_feed_forward_length")),
        "norm_topk_prob": False,
    }


def without_guessing(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The layers of the model: those behind them, which guess further tokens, are not read."""
    guessing = int(file.setting("nextn_predict_layers", 0))
    layers = config["num_hidden_layers"] - guessing
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": guessing}


def gpt_oss_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "num_local_experts": int(file.number("expert_count")),
        "num_experts_per_tok": int(file.number("expert_used_count")),
        "intermediate_size": int(file.number("expert_feed_forward_length")),
        "sliding_window": int(file.number("attention.sliding_window")),
    }
    if scaling := config.get("rope_scaling"):
        found["rope_scaling"] = scaling | yarn_limits(file) | {"truncate": False}
    return found


def yarn_limits(file: Any) -> dict[str, float]:
    return {
        "beta_fast": file.setting("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.setting("rope.scaling.yarn_beta_slow", 1.0),
    }


def sigmoid_mixture_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Of GLM and DeepSeek: the first layers are dense, an expert is for all tokens."""
    return without_guessing(file, config) | {
        "n_routed_experts": int(file.number("expert_count")),
        "num_experts_per_tok": int(file.number("expert_used_count")),
        "moe_intermediate_size": int(file.number("expert_feed_forward_length")),
        "n_shared_experts": int(file.setting("expert_shared_count", 0)),
        "first_k_dense_replace": int(file.setting("leading_dense_block_count", 0)),
        "routed_scaling_factor": float(f"{file.setting('expert_weights_scale', 1.0):.6g}"),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "n_group": int(file.setting("expert_group_count", 0)) or 1,
        "topk_group": int(file.setting("expert_group_used_count", 0)) or 1,
    }


def glm_mixture_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    normed = "blk.0.attn_q_norm.weight" in file.tensors
    return sigmoid_mixture_settings(file, config) | {"use_qk_norm": normed}


SIGMOID = 2  # of llama.cpp's gating functions


def deepseek_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """V2's by default; V3's where experts are chosen by their sigmoid.

    Files say the sizes of heads as they are (`_mla`) and as the row of the cache that they share;
    older ones only the first.
    """
    rope = config["head_dim"]
    key = file.number("attention.key_length_mla", file.number("attention.key_length"))
    value = file.number("attention.value_length_mla", file.number("attention.value_length"))
    found = sigmoid_mixture_settings(file, config) | {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": int(file.number("attention.kv_lora_rank")),
        "q_lora_rank": int(file.setting("attention.q_lora_rank", 0)) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": int(key) - rope,
        "v_head_dim": int(value),
        "topk_method": "greedy",
    }
    corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    if corrected or file.setting("expert_gating_func", 0) == SIGMOID:
        found |= {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        }
    elif found["n_group"] > 1:
        found["topk_method"] = "group_limited_greedy"
    if scaling := config.get("rope_scaling"):
        weight = float(f"{10 * file.setting('rope.scaling.yarn_log_multiplier', 0.0):.6g}")
        of_scores = {"mscale": weight, "mscale_all_dim": weight} if weight else {}
        found["rope_scaling"] = scaling | yarn_limits(file) | of_scores
    return found


def state_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Of layers with a state, as Qwen3-Next and Qwen3.5 have them."""
    heads = int(file.number("ssm.time_step_rank"))
    return without_guessing(file, config) | {
        "full_attention_interval": int(file.setting("full_attention_interval", 4)),
        "linear_conv_kernel_dim": int(file.number("ssm.conv_kernel")),
        "linear_key_head_dim": int(file.number("ssm.state_size")),
        "linear_num_key_heads": int(file.number("ssm.group_count")),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": int(file.number("ssm.inner_size")) // heads,
    }


def qwen_next_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    mixture = shared_mixture_settings(file, config) | {"norm_topk_prob": True}
    return mixture | state_settings(file, config)


def olmo_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A window makes it OLMo 3, whose scaled rope is that of layers without one."""
    window = int(file.setting("attention.sliding_window", 0))
    if not window:
        return {}
    layers = config["num_hidden_layers"]
    pattern = file.setting("attention.sliding_window_pattern", 4)
    if isinstance(pattern, int):  # every so many layers one sees everything
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    found: dict[str, Any] = {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if local else "full_attention" for local in pattern[:layers]
        ],
    }
    if scaling := config.get("rope_scaling"):
        found["rope_scaling"] = scaling | yarn_limits(file)
    return found


def ministral_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3; without queries that grow with their position it is a Mistral (Small)."""
    growth = float(f"{file.setting('attention.temperature_scale', 0.0):.6g}")
    scaling = config.get("rope_scaling")
    if not growth or not scaling:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
        }
    weight = float(f"{file.setting('rope.scaling.yarn_log_multiplier', 1.0):.6g}")
    of_scores = {"mscale": 1.0, "mscale_all_dim": weight, "llama_4_scaling_beta": growth}
    return {"rope_scaling": scaling | yarn_limits(file) | of_scores, "sliding_window": None}


def smollm_settings(file: Any, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "use_sliding_window": False,
    }
