"""The text model inside a folder that holds a vision tower too (Gemma 3 from 4B on, Mistral Small,
Qwen3-VL, Qwen3.5).

Its config is an object of its own inside config.json, and its tensors have a prefix. Both are
turned into what the text model alone would have, so that nobody else has to know; what sees images
is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# model_type of the whole → model_type of the text model inside → its architecture
WRAPPED: dict[str, dict[str, str]] = {
    "gemma3": {"gemma3_text": "Gemma3ForCausalLM"},
    "qwen3_vl": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "qwen3_5": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "mistral3": {
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}
# of texts alone: rope by three positions of a token is rope by one where these are equal
PLAIN = {"qwen3_vl_text": "qwen3"}
SHARED = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# as transformers 4 wrote them, and as 5 does
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
SEEING = ("visual.", "vision_tower.", "multi_modal_projector.", "vision_model.")


def is_wrapped(config: Mapping[str, Any]) -> bool:
    inside = config.get("text_config")
    kinds = WRAPPED.get(str(config.get("model_type")), {})
    return isinstance(inside, Mapping) and inside.get("model_type", next(iter(kinds), "")) in kinds


def text_config(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """config.json of the text model; `names`: of its tensors."""
    kinds = WRAPPED[config["model_type"]]
    found: dict[str, Any] = {"model_type": next(iter(kinds))} | dict(config["text_config"])
    found["architectures"] = [kinds[found["model_type"]]]
    found["model_type"] = PLAIN.get(found["model_type"], found["model_type"])
    for key in SHARED:
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    # Neither object need say so, and both may have been written with a default of another version.
    found["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in names)
    return found


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The text model's name of each of its tensors → the one in the file."""
    found = {}
    for name in names:
        if name.removeprefix("model.").startswith(SEEING):
            continue
        new = next(
            (to + name.removeprefix(old) for old, to in PREFIXES if name.startswith(old)), name
        )
        found[new] = name
    return found
