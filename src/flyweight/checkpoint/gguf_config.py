"""config.json and generation_config.json of a GGUF file: its metadata, in Hugging Face's keys.

gguf_settings.py has what a family adds of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.gguf import GGUF
from flyweight.checkpoint.gguf_shard import ROPE_FACTORS
from flyweight.errors import UnsupportedError, unknown

SIZES = {  # config.json ← GGUF metadata, less its architecture prefix
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Few files say how to sample, and plain sampling lets a small model ramble. By architecture or word
# pattern: what the authors ask for in the card or generation_config.json of their instruct models;
# a middle way for others.
INSTRUCT: dict[str, dict[str, Any]] = {
    "smollm": {"temperature": 0.2, "top_p": 0.9},
    "qwen2": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "qwen3": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "llama-bpe": {"temperature": 0.6, "top_p": 0.9},
    "other": {"temperature": 0.7, "top_p": 0.95},
}
SOURCE = "flyweight_source"  # in config.json, which other programs read past
# transformers takes any large vocabulary without a version for a Mistral tokenizer of old, whose
# pattern was wrong. Ours come from the table in gguf_tokenizer.py.
WRITTEN_FOR = "5.0.0"


def make_config(file: GGUF, dtype: torch.dtype) -> dict[str, Any]:
    """config.json, in the keys that transformers 4 and 5 and the other engines all read."""
    config: dict[str, Any] = {key: file.number(name) for key, name in SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = file.number("attention.key_length", config["hidden_size"] // heads)
    rotary = file.number("rope.dimension_count", head_dim)
    if file.family.latent:  # what a head is made of, its settings say
        head_dim = rotary
    if rotary != head_dim and not file.family.partial_rope:
        raise UnsupportedError(f"{file.path}: rope on a part of the head ({rotary} of {head_dim})")
    if file.setting("attention.sliding_window", 0) and not file.family.windows:
        raise UnsupportedError(
            f"{file.path}: sliding-window attention in a GGUF file; get the "
            f"Hugging Face folder of this model"
        )
    config |= {
        "architectures": [file.family.transformers],
        "model_type": file.family.model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformers_version": WRITTEN_FOR,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": int(file.stored("token_embd.weight").shape[-1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.number("rope.freq_base", 10000.0),
        "rms_norm_eps": float(f"{config['rms_norm_eps']:.6g}"),  # stored in float32: 9.99999974e-06
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if not file.family.biased:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if scaling := _rope_scaling(file, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    config |= file.family.settings(file, config)
    return config | _token_ids(file) | {SOURCE: describe_source(file)}


def describe_source(file: GGUF) -> dict[str, Any]:
    """How the file stores its matrices: weights that were rounded once are told from those that
    never were.
    """
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    counts: dict[str, int] = {}
    for tensor in matrices:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(
            tensor.n_elements
        )
    weights = sum(counts.values())
    bits = 8 * sum(int(tensor.n_bytes) for tensor in matrices) / max(1, weights)
    most = max(counts, key=lambda name: counts[name], default="F16")
    return {"file": file.path.name, "type": most, "bits_per_weight": round(bits, 2)}


def make_generation_config(file: GGUF) -> dict[str, Any]:
    """Stop tokens, and the author's sampling where newer files carry it; else what suits a model
    that answers.
    """
    sampling = {
        key: file.metadata[f"general.sampling.{name}"]
        for key, name in SAMPLING.items()
        if f"general.sampling.{name}" in file.metadata
    }
    if not sampling and "tokenizer.chat_template" in file.metadata:
        pattern = str(file.metadata.get("tokenizer.ggml.pre"))
        sampling = dict(
            INSTRUCT.get(file.architecture) or INSTRUCT.get(pattern) or INSTRUCT["other"]
        )
    ids = _token_ids(file)
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn not in (None, ids.get("eos_token_id")):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return ids | sampling | ({"do_sample": True} if sampling else {})


def _token_ids(file: GGUF) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {
        key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()
    }
    return {key: value for key, value in found.items() if value is not None}


def _rope_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.setting("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{file.path}: {unknown('rope scaling', kind, ('linear', 'yarn'))}")
    scaling = {"rope_type": kind, "factor": file.setting("rope.scaling.factor")}
    if original := file.setting("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow") if kind == "yarn" else ():
        if (limit := file.setting(f"rope.scaling.yarn_{key}", 0)) > 0:
            scaling[key] = limit
    return scaling


# of 3.1, 3.2 and 3.3
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_factors(factor: float, theta: float, head_dim: int) -> Tensor:
    """The divisors of the rope frequencies that these settings give."""
    low, high, original = LLAMA3.values()
    # within the original context
    turns = original / (2 * math.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim))
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """The file holds the divisors that the settings give; find the settings and check that they do
    give them.
    """
    factors = file.values(ROPE_FACTORS)
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_dim)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is not the rope scaling of a Llama 3 model"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
