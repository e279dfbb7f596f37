"""A checkpoint of tensors in memory, for tests of one format."""

from __future__ import annotations

from pathlib import Path

import torch

from flyweight.checkpoint import formats
from flyweight.errors import CheckpointError


class MemoryCheckpoint:
    def __init__(self, tensors, config=None, folder="memory"):
        self.tensors, self.config, self.folder, self.used = (
            dict(tensors),
            config or {},
            Path(folder),
            set(),
        )

    def names(self):
        return list(self.tensors)

    def has(self, name):
        return name in self.tensors

    def shape(self, name):
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing")
        return tuple(self.tensors[name].shape)

    def tensor(self, name):
        self.shape(name)
        self.used.add(name)
        return self.tensors[name]


def written(name, tensor, prefix="model.layers.0.mlp.down_proj", **options):
    """The checkpoint that the format `name` writes for one weight."""
    form = formats.named(name)
    parts = {key: value.clone() for key, value in form.write(prefix, tensor).items()}
    return MemoryCheckpoint(
        parts, {"quantization_config": form.config({prefix: tensor.to("meta")}, **options)}
    )


def read(checkpoint, prefix="model.layers.0.mlp.down_proj"):
    return formats.read_linear(formats.find(checkpoint.config, checkpoint), checkpoint, prefix)


def words(*numbers):
    """Words written as hexadecimal in the tests → int32."""
    return torch.tensor(
        [number - (1 << 32) if number >= 1 << 31 else number for number in numbers],
        dtype=torch.int32,
    )


def same(first, second):
    """The same kind with the same bits in every field."""
    assert type(first) is type(second)
    for name, value in first.fields().items():
        other = getattr(second, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(
                value.view(torch.uint8), other.view(torch.uint8)
            ), name
        elif hasattr(value, "fields"):
            same(value, other)
        else:
            assert value == other, name
