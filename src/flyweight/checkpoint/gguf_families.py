"""The architectures of GGUF files, an entry each: what llama.cpp calls their parts, and how its
tensors differ from Hugging Face's. gguf_settings.py reads what their metadata says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flyweight.checkpoint.gguf_settings import (
    deepseek_settings,
    gemma_settings,
    glm_mixture_settings,
    gpt_oss_settings,
    granite_settings,
    ministral_settings,
    mixture_settings,
    olmo_settings,
    phi_settings,
    qwen_next_settings,
    shared_mixture_settings,
    smollm_settings,
    state_settings,
)

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
