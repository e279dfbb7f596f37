"""What a row says about the model under measurement, whichever engine runs it: which weights, which
scheme, how large.

Taken from the checkpoint (or the preset), not from the engine, so that the rows of two engines
about one folder agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flyweight.errors import OptionError
from flyweight.limit import decode_limit

NOTE = "flyweight.json"  # what `flyweight quantize` leaves in the folder it makes
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
FIELDS = (
    "model",
    "scheme",
    "checkpoint",
    "weights",
    "size_gb",
    "bits_per_weight",
    "file_bits_per_weight",
)
COMMON_IDS = 10_000  # every vocabulary has so many
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class Variant:
    """`NAME=MODEL` or `MODEL`: NAME is what the rows call its scheme."""

    model: str
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        name, equals, model = text.partition("=")
        if equals and not (name and model):
            raise OptionError(f"{text!r}: a named variant is NAME=MODEL, such as w8a8=./my-model")
        return cls(model, name) if equals else cls(text)


@dataclass(frozen=True)
class ModelFacts:
    model: str
    scheme: str
    checkpoint: str | None = None
    weights: str | None = None  # trained | random
    size_gb: float | None = None
    bits_per_weight: float | None = None
    vocabulary: int = COMMON_IDS
    context: int | None = None
    layers: int = 0  # with keys and values
    kv_width: int = 0  # numbers that one layer keeps of one token
    # of weights that a decode step reads, as the files hold them; an engine may tell better
    step_bytes: int = 0
    file_bits_per_weight: float | None = None  # embedding, head and norms included

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}

    def kv_bytes(self, dtype: str | None) -> int:
        """Of one token."""
        return self.layers * self.kv_width * BYTES.get(dtype or "bfloat16", 2)

    def decode_limit(
        self,
        *,
        batch: int,
        input: int,
        output: int,
        kv_dtype: str | None,
        copy_gb_s: float | None,
        read_bytes: int | None = None,
    ) -> float | None:
        """The limit of flyweight/limit.py over the mean context; `read_bytes` is what the engine
        really reads.
        """
        return decode_limit(
            weight_bytes=read_bytes or self.step_bytes,
            copy_gb_s=copy_gb_s,
            batch=batch,
            context=input + (output + 1) / 2,
            kv_bytes_per_token=self.kv_bytes(kv_dtype),
        )


def facts_of(variant: Variant, *, model: str | None = None) -> ModelFacts:
    """`model` is what the rows call the model, where the name of its folder says little."""
    found = (
        preset_facts(variant.model)
        if variant.model.startswith("preset:")
        else checkpoint_facts(variant.model)
    )
    return replace(found, scheme=variant.name or found.scheme, model=model or found.model)


def served_facts(variant: Variant, *, model: str | None = None) -> ModelFacts:
    """Of a model behind a URL: what the name tells if it is a folder or preset here too, else
    nothing.
    """
    if variant.model.startswith("preset:") or Path(variant.model).is_dir():
        return facts_of(variant, model=model)
    return ModelFacts(model or variant.model, variant.name or "unknown")


def preset_facts(name: str) -> ModelFacts:
    """One weight of each shape is made and counted: the others are as large."""
    import torch

    from flyweight.models.config import ModelConfig
    from flyweight.models.presets import PresetWeights
    from flyweight.models.standard import plan_of

    _, preset, *rest = name.split(":")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = PresetWeights(preset, rest[0] if rest else "bf16", device=device)
    config = ModelConfig.from_dict(weights.config)
    sizes: dict[tuple[int, ...], int] = {}
    linear_bytes = linear_weights = 0
    # of linears in a step of one sequence: of experts those that a token is sent to
    read_bytes = 0.0
    for index, group in [
        (layer.index, group) for layer in plan_of(config).layers for group in layer.groups
    ]:
        share = (
            config.moe.experts_per_token / config.moe.experts
            if config.moe and group.routed
            else 1.0
        )
        for linear in group.linears:
            shape = weights.shapes[f"model.layers.{index}.{linear}.weight"]
            if shape not in sizes:
                sizes[shape] = weights.linear(f"model.layers.{index}.{linear}").nbytes
            linear_bytes, linear_weights = (
                linear_bytes + sizes[shape],
                linear_weights + math.prod(shape),
            )
            read_bytes += share * sizes[shape]
    others = sum(math.prod(shape) for shape in weights.shapes.values()) - linear_weights
    table = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tied_embeddings else table
    itemsize = config.dtype.itemsize
    return replace(
        _shape_facts(config, model=preset, scheme=weights.scheme),
        size_gb=round((linear_bytes + others * itemsize) / 1e9, 4),
        bits_per_weight=round(8 * linear_bytes / linear_weights, 4),
        step_bytes=int(read_bytes) + (others - looked_up) * itemsize,
        file_bits_per_weight=round(
            8 * (linear_bytes + others * itemsize) / (linear_weights + others), 4
        ),
    )


def _shape_facts(config: Any, *, model: str, scheme: str) -> ModelFacts:
    from flyweight.models.standard import plan_of

    return ModelFacts(
        model,
        scheme,
        "random:0",
        "random",
        vocabulary=config.vocab_size,
        context=config.context_length,
        layers=config.layers - len(config.state_layers),
        kv_width=plan_of(config).layers[0].attention.cached_numbers,
    )


def checkpoint_facts(name: str) -> ModelFacts:
    from flyweight.checkpoint.folder import read_json
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.checkpoint.summary import summarize
    from flyweight.engine.capacity import read_per_token
    from flyweight.models.config import ModelConfig
    from flyweight.models.standard import plan_of

    checkpoint = Checkpoint(resolve(name))
    summary, config = summarize(checkpoint), ModelConfig.from_dict(checkpoint.config)
    note = read_json(checkpoint.folder / NOTE) if (checkpoint.folder / NOTE).exists() else {}
    plain, source = SHORT.get(summary.dtype, summary.dtype), str(note.get("model") or name)
    made = source.split(":")[2:] if source.startswith("preset:") else []
    return ModelFacts(
        model=base_name(source),
        checkpoint=checkpoint.hash(),
        weights="random" if source.startswith("preset:") else "trained",
        scheme=note.get("recipe", {}).get("name") or "".join(made) or summary.quantization or plain,
        size_gb=round(checkpoint.nbytes / 1e9, 4),
        bits_per_weight=round(summary.linear_bits, 4),
        file_bits_per_weight=round(summary.file_bits, 4),
        vocabulary=config.vocab_size,
        context=config.context_length,
        layers=config.layers - len(config.state_layers),
        kv_width=plan_of(config).layers[0].attention.cached_numbers,
        step_bytes=read_per_token(summary, config),
    )


def base_name(model: str) -> str:
    """Of `preset:NAME:SCHEME` the name, of a folder the last part: where it lies on this machine
    says nothing to others.
    """
    if model.startswith("preset:"):
        return model.split(":")[1]
    return Path(model).resolve().name if Path(model).is_dir() else model


def comparable(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether greedy tokens can be expected to agree. Random weights that each scheme draws for
    itself have nothing in common.
    """
    drawn = all(str(fact.checkpoint).startswith("random:") for fact in (one, other))
    return not drawn or (one.checkpoint, one.bits_per_weight) == (
        other.checkpoint,
        other.bits_per_weight,
    )
