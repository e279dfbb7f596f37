"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

    y = x Wᵀ + scale · (x Aᵀ) Bᵀ       A [rank, in], B [out, rank]

scale is lora_alpha / rank, or lora_alpha / √rank with `use_rslora`; `rank_pattern` and
`alpha_pattern` give single modules their own. Whatever would change the answer and is not in that
formula (DoRA, whole modules, biases) is refused: an adapter that loads by half gives garbage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.folder import read_json
from flyweight.checkpoint.shard import is_finite, open_shard, read_header
from flyweight.errors import CheckpointError, UnsupportedError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# base_model.model. is PEFT's own; what follows is the base model's name of the module
NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
# a text model alone, or as a part of one with several inputs
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?(layers\.\d+\..+)")

# options of PEFT that change what an adapter computes: a test of the value, and what it is called
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (bool, "DoRA"),
    "modules_to_save": (bool, "whole modules (modules_to_save)"),
    "lora_bias": (bool, "biases (lora_bias)"),
    "bias": (lambda value: value not in (None, "none"), "biases (bias)"),
    "fan_in_fan_out": (bool, "transposed weights (fan_in_fan_out)"),
    "layer_replication": (bool, "replicated layers (layer_replication)"),
    "trainable_token_indices": (bool, "trained token embeddings (trainable_token_indices)"),
    "target_parameters": (bool, "parameters outside of linears (target_parameters)"),
    "use_qalora": (bool, "QALoRA"),
    "alora_invocation_tokens": (bool, "activated LoRA (alora_invocation_tokens)"),
    "init_lora_weights": (
        lambda value: (
            isinstance(value, str)
            and value.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))
        ),
        "a base model changed at the start of training (init_lora_weights); convert the adapter to "
        "a plain one when saving it",
    ),
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to one module."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    name: str
    folder: Path
    modules: Mapping[str, LowRank]  # by the name of the base model's module, `model.` in front


def read_adapter(name: str, folder: str | Path) -> Adapter:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; an adapter's folder holds {CONFIG}")
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder}: no {CONFIG}; it is no folder of a PEFT adapter")
    config = read_json(folder / CONFIG)
    check_config(config, folder / CONFIG)
    file = folder / WEIGHTS
    if not file.exists():
        if (folder / PICKLE).exists():
            raise CheckpointError(
                f"{folder}: only a pickle ({PICKLE}), which can run code when opened, so it is "
                "never read; save the adapter again: PEFT's `save_pretrained` writes safetensors"
            )
        raise CheckpointError(f"{folder}: no {WEIGHTS}")
    return Adapter(name, folder, read_modules(file, config))


def check_config(config: dict[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {kind!r}; only LORA is supported")
    for option, (is_used, words) in REFUSED.items():
        if is_used(config.get(option)):
            raise UnsupportedError(f"{path}: the adapter has {words}, which is not supported")
    for option in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(option) or {}, dict):
            raise CheckpointError(f"{path}: {option} is no object of names and numbers")
    for pattern in config.get("alpha_pattern") or {}:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{path}: alpha_pattern has {pattern!r}: {error}") from error
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    for alpha in alphas:
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not number or not math.isfinite(alpha):
            raise CheckpointError(f"{path}: lora_alpha is {alpha!r}, and must be a number")


def read_modules(file: Path, config: dict[str, Any]) -> dict[str, LowRank]:
    found: dict[str, dict[str, str]] = {}
    for tensor in read_header(file):
        match = NAME.fullmatch(tensor)
        if match is None:
            raise UnsupportedError(
                f"{file}: tensor {tensor!r} is neither lora_A nor lora_B of a linear; only these "
                "are supported"
            )
        layer = LAYER.fullmatch(match[1])
        module = f"model.{layer[1]}" if layer else match[1]
        found.setdefault(module, {})[match[2]] = tensor
    if not found:
        raise CheckpointError(f"{file}: holds no adapter")
    shard = open_shard(file)
    modules = {}
    for module, sides in found.items():
        if set(sides) != {"A", "B"}:
            raise CheckpointError(
                f"{file}: {module} has only lora_{next(iter(sides))}; get the file again"
            )
        a, b = (read_matrix(shard, file, sides[side]) for side in "AB")
        if a.shape[0] != b.shape[1] or not a.shape[0]:
            raise CheckpointError(
                f"{file}: {module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} have no "
                "rank in common"
            )
        modules[module] = LowRank(a, b, scale_of(config, module, a.shape[0]))
    return modules


def read_matrix(shard: Any, file: Path, name: str) -> Tensor:
    tensor = shard.get_tensor(name)
    if tensor.ndim != 2 or tensor.dtype not in FLOATS:
        raise CheckpointError(f"{file}: tensor {name!r} is no matrix of floats")
    if not is_finite(tensor):
        raise CheckpointError(f"{file}: tensor {name!r} holds NaN or infinity; get the file again")
    return tensor


def scale_of(config: dict[str, Any], module: str, rank: int) -> float:
    """A pattern names a module by its whole name or by its end, as PEFT matches it."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
