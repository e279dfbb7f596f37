"""How a model's KV cache is kept: what a user asks for, and what its files say.

compressed-tensors checkpoints may have a `kv_cache_scheme` in their config, and then scales for the
keys and values of each layer, found by calibration (`self_attn.k_scale`, `v_scale`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyweight.checkpoint.formats.base import CheckpointNotice
from flyweight.errors import CheckpointError, OptionError, unknown
from flyweight.kv_format import AUTO, KV_FORMATS, MODEL, KVFormat
from flyweight.models.config import ModelConfig
from flyweight.models.layers import Weights
from flyweight.models.standard import plan_of


@dataclass(frozen=True)
class KVScheme:
    format: KVFormat | None = None  # None: the type of activations
    # of keys and of values, by layer; None: found for each token
    scales: tuple[tuple[float, float], ...] | None = None


def choose_kv_scheme(wanted: str | None, weights: Weights, config: ModelConfig) -> KVScheme:
    """Scales of the files are used where they are of the format that is used."""
    known = [AUTO, MODEL, *KV_FORMATS]
    if wanted is not None and wanted not in known:
        raise OptionError(unknown("kv_dtype", wanted, known))
    latent = plan_of(config).layers[0].attention.latent is not None
    if latent and wanted in KV_FORMATS:
        raise OptionError(
            f"kv_dtype {wanted}: {config.model_type} caches one compressed row for all heads, "
            "which no kernel here reads in 8 bits: leave kv_dtype out"
        )
    stored = KVScheme() if latent else scheme_of(weights, config)
    if wanted in (None, AUTO):
        return stored
    if wanted == MODEL:
        return KVScheme()
    asked = KV_FORMATS[wanted]
    return stored if stored.format is asked else KVScheme(asked)


def scheme_of(weights: Weights, config: ModelConfig) -> KVScheme:
    """What the files ask for."""
    quantization = weights.config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if not scheme:
        return KVScheme()
    format = format_of(scheme)
    if format is None:
        warnings.warn(
            "`kv_cache_scheme` of config.json asks for a KV cache that no kernel here reads; it "
            "keeps the type of activations, which is more precise and takes more memory "
            "(--kv-dtype fp8 or int8 take less)",
            CheckpointNotice,
            stacklevel=2,
        )
    names = [f"model.layers.{layer}.self_attn" for layer in range(config.layers)]
    if format is None or scheme.get("dynamic") or not weights.has(f"{names[0]}.k_scale"):
        return KVScheme(format)
    pairs = ((scale_of(weights, f"{n}.k_scale"), scale_of(weights, f"{n}.v_scale")) for n in names)
    return KVScheme(format, tuple(pairs))


def format_of(scheme: Mapping[str, Any]) -> KVFormat | None:
    """None where it is none of ours: the cache then keeps the type of activations, which is only
    more precise.
    """
    if scheme.get("num_bits", 8) != 8 or scheme.get("symmetric", True) is not True:
        return None
    if scheme.get("strategy") not in (None, "tensor"):
        return None
    return {"float": KV_FORMATS["fp8"], "int": KV_FORMATS["int8"]}.get(str(scheme.get("type")))


def scale_of(weights: Weights, name: str) -> float:
    found = weights.tensor(name)
    if found.numel() != 1 or not float(found) > 0:
        raise CheckpointError(
            f"{name}: one positive scale is expected, as `kv_cache_scheme` of config.json says"
        )
    return float(found)
