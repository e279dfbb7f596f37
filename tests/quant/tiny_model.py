"""A whole model folder of a few thousand weights, with a tokenizer of one token per letter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_configs import LETTERS

from flyweight.models.presets import PresetWeights


def make_tiny_model(folder: Path, **changes: object) -> Path:
    """Random weights with a few loud channels, as real models have."""
    folder.mkdir(parents=True)
    config = LETTERS | changes
    source = PresetWeights(config, "fp32")
    tensors = {name: source.tensor(name).clone() for name in source.names()}
    loud = torch.ones(config["hidden_size"])
    loud[::9] = 6.0
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor *= loud
    dtype = getattr(torch, str(config["dtype"]))
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(32, 124)]
    vocabulary = {
        token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "\n", *letters])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "<unk>",
                "bos_token": "<s>",
                "eos_token": "</s>",
            }
        )
    )


TEXT = "\n".join(
    f"{a} {b} walks over the {c} hill and sings of {a}"
    for a in ("Ann", "Bob", "Cleo", "Dan")
    for b in ("slowly", "gladly", "never", "again", "alone")
    for c in ("green", "old", "far", "steep", "last")
)
