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
# of mixtures: the router, tensors that hold a matrix of every expert, and an expert for all tokens
ROUTER = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {f"{old}_exps": new.replace("mlp.", "mlp.experts.{}.") for old, new in MLP.items()}
SHARED = {f"{old}_shexp": new.replace("mlp.", "mlp.shared_experts.") for old, new in MLP.items()}
GATED_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    old: new.replace("experts", "expert") for old, new in SHARED.items()
}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
PLAIN = FIRST_NORM | QKV | OUT | SECOND_NORM | MLP
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# of layers with a state in place of attention
STATE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
STEPS = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
DECAY = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QWEN_NORMS = FIRST_NORM | {"post_attention_norm": "post_attention_layernorm"}
LONG_ROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}

# (the file, config so far) → more of config
Settings = Callable[[Any, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class GgufFamily:
    model_type: str
    transformers: str  # the class
    parts: dict[str, str]  # of a layer: llama.cpp's name → Hugging Face's
    experts: dict[str, str] = field(default_factory=dict)  # likewise, {} being the number of one
    # likewise, of some layers or models alone: loading finds out which must be there
    some: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)  # likewise, but names with their last part
    made: tuple[str, ...] = ()  # of several tensors of the file: gguf_made.py
    also: tuple[str, ...] = ()  # model types that `settings` may say instead
    turned: bool = False  # rows of q and k lie in the order of llama.cpp's own rope
    raised: bool = False  # 1 was added to the weights of norms
    whole_norms: bool = False  # of queries and keys, over all heads
    biased: bool = False  # q, k and v always have one
    windows: bool = False  # a sliding window is no surprise
    partial_rope: bool = False  # rope may turn a part of each head
    latent: bool = False  # heads share one row of the cache; its size is the file's size of a head
    tiled: bool = False  # value heads lie in llama.cpp's order: gguf_heads.py
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


FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", PLAIN, turned=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", PLAIN, biased=True),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", PLAIN | HEAD_NORMS),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        FIRST_NORM | QKV | OUT | SECOND_NORM | ROUTER,
        EXPERTS,
        some=GATED_SHARED,
        biased=True,
        settings=shared_mixture_settings,
    ),
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
        also=("olmo3",),
        whole_norms=True,
        windows=True,
        settings=olmo_settings,
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
    "gpt-oss": GgufFamily(
        "gpt_oss",
        "GptOssForCausalLM",
        FIRST_NORM
        | QKV
        | OUT
        | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        EXPERTS,
        whole={"attn_sinks.weight": "self_attn.sinks"},
        windows=True,
        settings=gpt_oss_settings,
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        FIRST_NORM | QKV | OUT | {"post_attention_norm": "post_attention_layernorm"},
        some=HEAD_NORMS | MLP | ROUTER | EXPERTS | SHARED,
        whole=CORRECTION,
        partial_rope=True,
        settings=glm_mixture_settings,
    ),
    "deepseek2": GgufFamily(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        FIRST_NORM | SECOND_NORM,
        some=MLP
        | ROUTER
        | EXPERTS
        | SHARED
        | OUT
        | {
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
        },
        whole=CORRECTION,
        made=("self_attn.kv_b_proj.weight",),
        also=("deepseek_v3",),
        latent=True,
        settings=deepseek_settings,
    ),
    "qwen3next": GgufFamily(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        QWEN_NORMS | ROUTER,
        EXPERTS,
        some=QKV | OUT | HEAD_NORMS | GATED_SHARED | STATE | {"ssm_ba": "linear_attn.in_proj_ba"},
        whole=DECAY,
        made=("linear_attn.in_proj_qkvz.weight",),
        raised=True,
        partial_rope=True,
        settings=qwen_next_settings,
    ),
    "qwen35": GgufFamily(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        QWEN_NORMS | MLP,
        some=QKV | OUT | HEAD_NORMS | STATE | STEPS,
        whole=DECAY,
        raised=True,
        partial_rope=True,
        tiled=True,
        settings=state_settings,
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        QWEN_NORMS | ROUTER,
        EXPERTS,
        some=QKV | OUT | HEAD_NORMS | GATED_SHARED | STATE | STEPS,
        whole=DECAY,
        raised=True,
        partial_rope=True,
        tiled=True,
        settings=qwen_next_settings,
    ),
    "mistral3": GgufFamily(
        "ministral3",
        "Ministral3ForCausalLM",
        PLAIN,
        also=("mistral",),
        turned=True,
        settings=ministral_settings,
    ),
}
BY_TYPE = {
    kind: family for family in FAMILIES.values() for kind in (family.model_type, *family.also)
}


def restored(family: GgufFamily, name: str, values: Tensor) -> Tensor:
    """The numbers of a tensor as Hugging Face has them."""
    if name.endswith("linear_attn.A_log"):
        return (-values.float()).log()
    if family.raised and name.endswith("norm.weight") and "linear_attn." not in name:
        return values.float() - 1
    return values


def shape_elsewhere(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's, where llama.cpp's converter leaves dimensions of 1 out."""
    if name.endswith("conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    return shape
