"""A preset's random weights as a model folder, for engines that read folders and for timing how a
folder loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flyweight.checkpoint import formats
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.models.config import ModelConfig
from flyweight.models.presets import PresetWeights, preset_config
from flyweight.models.standard import plan_of
from flyweight.tensors import Plain, QuantTensor

NOTE = "flyweight.json"


def write_preset(
    name: str,
    target: str | Path,
    *,
    format: str | None = None,
    device: str = "cpu",
    layers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """`preset:NAME[:SCHEME]` in a file format (its kind's usual one), without a tokenizer; with
    `layers` only so many of the model's.
    """
    _, preset, *scheme = name.split(":")
    settings = preset_config(preset)
    if layers is not None:
        settings["num_hidden_layers"] = layers
    weights = PresetWeights(settings, scheme[0] if scheme else "bf16", device=device)
    config = ModelConfig.from_dict(weights.config)
    plan = plan_of(config)
    linears = {
        layer.prefix + linear
        for layer in plan.layers
        for group in layer.groups
        for linear in group.linears
    }
    quantized: dict[str, QuantTensor] = {}
    with CheckpointWriter(target, overwrite=overwrite) as writer:
        for done, tensor_name in enumerate(weights.names()):
            prefix = tensor_name.removesuffix(".weight")
            tensor = (
                weights.linear(prefix) if prefix in linears else Plain(weights.tensor(tensor_name))
            )
            if isinstance(tensor, Plain):
                writer.add(tensor_name, tensor.weight)
            else:
                form = formats.named(format or formats.default_for(tensor))
                for part, value in form.write(prefix, tensor).items():
                    writer.add(part, value)
                quantized[prefix] = tensor.to("meta")
            progress(done + 1, len(weights.shapes))
        settings = dict(weights.config)
        if quantized:
            biased = [prefix for prefix in quantized if f"{prefix}.bias" in weights.shapes]
            chosen = formats.named(format or formats.default_of(quantized.values()))
            settings["quantization_config"] = chosen.config(
                quantized, ignore=[*plan.routers, "lm_head"], biased=biased
            )
        folder = writer.finish(settings)
    # as `quantize` leaves it: benchmarks tell from it whose weights these are
    (folder / NOTE).write_text(json.dumps({"model": name}), encoding="utf-8")
    return folder
