"""One model folder into another file format, a module at a time: the same numbers in other words,
or a refusal.

Nothing is quantized here. A format that cannot hold a weight exactly says what would be lost,
before anything is written where that shows in the shapes, at that layer otherwise; `plain` writes
dequantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from flyweight.checkpoint import formats
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.errors import OptionError, UnsupportedError, unknown
from flyweight.tensors import Plain, QuantTensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What older tools left beside config.json for this information; the new folder has it in
# config.json.
EMBEDDING = "embed_tokens"
OLD_KEYS = ("quantization_config", "compression_config")


# a module or tensor, what is written for it, its weight
Part = tuple[str, dict[str, torch.Tensor], QuantTensor | None]


@dataclass
class Converted:
    """What was done: the modules by their kind, and the bytes before and after."""

    target: Path
    format: str
    modules: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0


def convert(
    source: str | Path,
    target: str | Path,
    *,
    format: str,
    dtype: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """`progress` is called with tensors done and in all. `dtype` is for `plain`: the model's own
    where it is None.
    """
    checkpoint = Checkpoint(source)
    if format != "plain":
        formats.named(format)  # an unknown name must not cost a half-written folder
    elif dtype is not None and dtype not in DTYPES:
        raise OptionError(unknown("dtype", dtype, DTYPES))
    if checkpoint.format is None:
        raise OptionError(f"{checkpoint.folder} is not quantized; `flyweight quantize` makes it so")
    result = Converted(Path(target), format, bytes_before=checkpoint.nbytes)
    layers: dict[str, QuantTensor] = {}
    with CheckpointWriter(target, overwrite=overwrite, source=checkpoint.folder) as writer:
        for done, (name, parts, tensor) in enumerate(
            _parts(checkpoint, format, dtype=dtype, device=device)
        ):
            for part, value in parts.items():
                writer.add(part, value)
                result.bytes_after += value.nbytes
            if tensor is not None:
                layers[name] = tensor.to("meta")  # only its shape and scheme are wanted later
                result.modules[tensor.kind] = result.modules.get(tensor.kind, 0) + 1
            progress(done + 1, len(checkpoint.names()))
        checkpoint.check_used()
        writer.finish(_config(checkpoint, format, layers, dtype=dtype), source=source)
    return result


def _parts(
    checkpoint: Checkpoint, format: str, *, dtype: str | None, device: str
) -> Iterator[Part]:
    """Each quantized module with its new tensors, and every other tensor as it is, in the order of
    the files.
    """
    form = checkpoint.format
    assert form is not None
    own = {
        name: prefix
        for prefix in quantized_modules(checkpoint)
        for name in (*form.names(prefix), f"{prefix}.weight")
    }
    seen: set[str] = set()
    for name in checkpoint.names():
        prefix = own.get(name)
        if prefix is None and any(fnmatchcase(name, pattern) for pattern in form.spare):
            continue
        if prefix is None:
            yield name, {name: checkpoint.tensor(name)}, None
        elif prefix not in seen:
            seen.add(prefix)
            tensor = form.read(checkpoint, prefix)
            assert tensor is not None  # its mark is there
            tensor = tensor.to(device)
            if isinstance(tensor, Plain):  # 2:4 storage of a weight that is not quantized
                yield prefix, {f"{prefix}.weight": tensor.weight}, None
            elif format == "plain" or prefix.endswith(EMBEDDING):  # other formats hold linears only
                weight = tensor.dequantize(DTYPES[dtype or _own_dtype(checkpoint)])
                yield prefix, {f"{prefix}.weight": weight}, tensor if format == "plain" else None
            else:
                yield prefix, formats.named(format).write(prefix, tensor), tensor


def quantized_modules(checkpoint: Checkpoint) -> list[str]:
    """The prefixes of all modules that the format of the folder has tensors for, in the order of
    the files.
    """
    return [] if checkpoint.format is None else checkpoint.format.modules(checkpoint)


def _config(
    checkpoint: Checkpoint, format: str, layers: dict[str, QuantTensor], *, dtype: str | None
) -> dict[str, Any]:
    config = {key: value for key, value in checkpoint.config.items() if key not in OLD_KEYS}
    if format == "plain":
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        return config | {key: dtype or _own_dtype(checkpoint)}
    plain = [
        name.removesuffix(".weight")
        for name in checkpoint.names()
        if name.endswith(".weight")
        and len(checkpoint.shape(name)) == 2
        and name.removesuffix(".weight") not in layers
        and "embed" not in name
        and not any(name.endswith(f".{suffix}") for suffix in formats.READABLE["vptq"].suffixes)
    ]
    if config.get("tie_word_embeddings") and "lm_head" not in plain and "lm_head" not in layers:
        plain.append("lm_head")
    biased = [prefix for prefix in layers if checkpoint.has(f"{prefix}.bias")]
    return config | {
        "quantization_config": formats.named(format).config(layers, ignore=plain, biased=biased)
    }


def _own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that the model says it has; plain weights of an unknown one stay exact."""
    named = str(
        checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
    ).removeprefix("torch.")
    if named not in DTYPES:
        raise UnsupportedError(
            f"{checkpoint.folder}: config.json names the dtype {named!r}; choose one with --dtype"
        )
    return named
