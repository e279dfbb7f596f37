"""What an LLM opens before there is an engine: weights, the decoder that can run them, their type.

Apart from llm.py, because benchmarks, quantization and compiling ahead open models as it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flyweight.cpu import computable
from flyweight.engine.tokenizer import Tokenizer, tokenizer_of
from flyweight.errors import OptionError, unknown
from flyweight.models.adapters import Adapters
from flyweight.models.config import DTYPES, ModelConfig

if TYPE_CHECKING:
    pass


def open_model(name: str, device: torch.device) -> tuple[Any, Tokenizer | None]:
    """The weights, and the tokenizer where there is one."""
    if name.startswith("preset:"):
        from flyweight.models.presets import PresetWeights

        _, preset, *scheme = name.split(":")
        return PresetWeights(preset, scheme[0] if scheme else "bf16", device=device), None
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.checkpoint.streamed import Streamed

    checkpoint = Checkpoint(resolve(name))
    # before the tokenizer, for which transformers may read config.json too, and blames the former
    ModelConfig.from_dict(checkpoint.config)
    return Streamed(checkpoint, device), tokenizer_of(checkpoint)


def load_decoder(
    weights: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    exact: bool,
    native: bool | None,
    offload: int = 0,
    adapters: Adapters | None = None,
    eight_bit_prompts: bool = False,
    tapped: bool = False,
) -> tuple[Any, str]:
    """A decoder, and in words which: the native one of a CPU where it can run the model, else
    torch's.
    """
    from flyweight.models import native as own

    if offload and device.type != "cuda":
        raise OptionError(
            "offload moves layers out of a GPU's memory, and this runs on a CPU: leave it out"
        )
    if native and device.type != "cpu":
        raise OptionError(
            "native kernels are for a CPU: leave out --native, or choose --device cpu"
        )
    reason: str | None = "turned off"
    if native is not False and device.type == "cpu":
        reason = own.why_not(ModelConfig.from_dict(weights.config), dtype)
        if adapters is not None:
            reason = reason or "they do not know LoRA adapters"
        if eight_bit_prompts:
            reason = reason or "they have no prompts in 8 bits"
        if tapped:
            reason = reason or "they show no hidden states to a head that guesses"
    if native and reason:
        raise OptionError(f"the CPU's native kernels cannot be used: {reason}; leave out --native")
    if reason is None:
        return own.load(weights, exact=exact), own.describe()
    from flyweight.kernels import dispatch
    from flyweight.models.decoder import Decoder

    why = f" (no native kernels: {reason})" if device.type == "cpu" else ""
    with dispatch.without_native() if native is False else contextlib.nullcontext():
        decoder = Decoder.load(
            weights, device=device, dtype=dtype, exact=exact, offload=offload, adapters=adapters
        )
    return decoder, f"torch{why}"


def choose_dtype(
    dtype: str | torch.dtype | None, config: Mapping[str, Any], device: torch.device
) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:  # few CPUs compute half precision faster than single, and many very slowly
        dtype = (
            "float32"
            if device.type == "cpu"
            else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        )
    if dtype not in DTYPES:
        raise OptionError(unknown("dtype", dtype, DTYPES))
    return computable(DTYPES[dtype]) if device.type == "cpu" else DTYPES[dtype]


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says about sampling. `do_sample: false` asks for the likeliest
    token.
    """
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    return found | ({"temperature": 0.0} if generation.get("do_sample") is False else {})


def end_ids(
    config_ids: Sequence[int], generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> set[int]:
    """Every id that any of the model's files calls an end of text."""
    listed = generation.get("eos_token_id")
    found = {*config_ids, *(listed if isinstance(listed, list) else [listed])}
    return {
        token for token in found | {tokenizer.end_id if tokenizer else None} if token is not None
    }
