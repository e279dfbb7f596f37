"""What is refused before anything is loaded: unknown architectures, and known ones with a switch
that nobody here reads.

A switch is a key of config.json that changes the arithmetic. Its neutral values change nothing; any
other value must be read by the family, or the model would load and talk nonsense.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flyweight.errors import UnsupportedError

# key → values that leave the computation as it is; null and a missing key always do
SWITCHES: dict[str, tuple[Any, ...]] = {
    # biases
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "attention_qkv_bias": (False,),
    "attention_out_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    # norms
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "norm_after": (False,),
    "use_post_norm": (False,),
    # scores and logits
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    # what a token sees
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "attention_chunk_size": (),
    "alibi": (False,),
    "attn_temperature_tuning": (False, 0),
    "num_kv_shared_layers": (0,),
    # rope
    "no_rope_layers": (),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    # other kinds of layers
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "kv_lora_rank": (0,),
    "q_lora_rank": (0,),
    "full_attention_interval": (1,),
    "attn_output_gate": (False,),
    "use_gated_attention": (False,),
    "hidden_size_per_layer_input": (0,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    # experts
    "n_routed_experts": (0,),
    "n_group": (1, 0),
    "topk_group": (1, 0),
    "routed_scaling_factor": (1,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "use_grouped_topk": (False,),
    "moe_apply_router_weight_on_input": (False,),
}

# Architectures that people have and that do not run here: the nearest that does, and what is
# missing.
MISSING = {
    "deepseek_v32": ("deepseek_v3", "sparse attention and its indexer"),
    "deepseek_v4": ("deepseek_v3", "compressed attention of several kinds"),
    "kimi_linear": ("deepseek_v3", "linear attention layers"),
    "mistral4": ("deepseek_v3", "queries that grow with their position"),
    "gemma3n": ("gemma3_text", "alternating updates and per-layer embeddings"),
    "gemma4_text": ("gemma3_text", "shared keys and values and per-layer embeddings"),
    "phi": ("phi3", "parallel residuals and layer norms with biases"),
    "phimoe": ("phi3", "its experts"),
    "granitemoe": ("granite", "its experts"),
    "granitemoehybrid": ("granite", "Mamba layers"),
    "olmo": ("olmo2", "layer norms without weights"),
    "flex_olmo": ("olmoe", "norms behind attention and experts"),
    "hunyuan_v1_dense": ("llama", "norms of queries and keys behind rope"),
    "ernie4_5_moe": ("ernie4_5", "its experts"),
    "arcee": ("llama", "an MLP without a gate"),
    "apertus": ("llama", "an MLP without a gate"),
    "nemotron": ("llama", "layer norms, and an MLP without a gate"),
    "starcoder2": ("llama", "layer norms, and an MLP without a gate"),
    "lfm2": ("llama", "short convolutions"),
    "exaone_moe": ("exaone4", "its experts"),
    "olmo_hybrid": ("olmo3", "gated DeltaNet layers"),
    "llama4_text": ("llama", "chunked attention and experts beside a shared one"),
    "cohere": ("llama", "parallel residuals and layer norms"),
    "cohere2": ("llama", "parallel residuals and layer norms"),
}


def unknown_architecture(data: Mapping[str, Any], known: Collection[str]) -> str:
    """The refusal of a model_type that is not among the known: by name, with the nearest."""
    name = data.get("model_type")
    near, reason = MISSING.get(str(name), (None, ""))
    if near is None:
        near = next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.7)), None)
    missing = f" ({reason} are missing)" if reason else ""
    nearest = f"; the nearest that is: {near}" if near in known else ""
    return (
        f"config.json: model_type {name!r} is not supported{missing}{nearest}; known: "
        f"{', '.join(known)}"
    )


def check_switches(data: Mapping[str, Any], read: Iterable[str]) -> None:
    """Refuse what would be computed otherwise than the config says."""
    keys = set(read)
    for key, neutral in SWITCHES.items():
        value = data.get(key)
        if value is None or key in keys or (value in neutral if neutral else False):
            continue
        if isinstance(value, list) and all(item == 1 for item in value):
            continue  # one flag for each layer, all as usual
        raise UnsupportedError(
            f"config.json: {key} {value!r} is not supported for model_type "
            f"{data.get('model_type')}: it changes the computation"
        )
