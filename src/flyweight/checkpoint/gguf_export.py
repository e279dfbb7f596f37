"""A model folder as one GGUF file, for llama.cpp and the programs around it.

`stored` writes each weight in the type that holds it exactly (integers in groups of 32 as Q4_0,
Q4_1, Q5_0 or Q8_0, floats as F16) or says what would be lost. The other choices round to the
nearest, as llama.cpp's own tool does without an importance matrix; embedding and head then stay in
8 bits, and matrices whose rows do not fill a block of 256 get the next larger type.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.convert import Converted
from flyweight.checkpoint.gguf_blocks import TYPES
from flyweight.checkpoint.gguf_config import llama3_factors
from flyweight.checkpoint.gguf_encode import ENCODERS, encode_stored
from flyweight.checkpoint.gguf_families import FAMILIES, HEAD_NORMS, OUTER, PLAIN
from flyweight.checkpoint.gguf_shard import ROPE_FACTORS, heads_turned
from flyweight.checkpoint.gguf_vocabulary import add_vocabulary
from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import MissingPackageError, OptionError, UnsupportedError, unknown
from flyweight.saving import writing
from flyweight.tensors import Plain, QuantTensor

STORED = "stored"
KINDS = (STORED, "F16", *ENCODERS)
# general.file_type: what the file is called
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18}
ENDS = ("model.embed_tokens", "lm_head")
NUMBERS = {number.name: code for code, number in TYPES.items()}
NAMES = {new: old for old, new in (OUTER | PLAIN | HEAD_NORMS).items()}
WRITTEN = ("llama", "qwen2", "qwen3")  # architectures


def export(
    source: str | Path,
    target: str | Path,
    *,
    kind: str = STORED,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """`progress` is called with tensors done and in all."""
    try:
        import gguf
    except ImportError:
        raise MissingPackageError(
            "writing GGUF files needs the gguf package: pip install gguf"
        ) from None
    path = Path(target)
    if kind not in KINDS:
        raise OptionError(unknown("GGUF type", kind, KINDS))
    if path.suffix != ".gguf":
        raise OptionError(f"{path}: the name of a GGUF file ends in .gguf")
    if path.exists() and not overwrite:
        raise OptionError(f"{path} exists already; pass --overwrite or choose another name")
    checkpoint = Checkpoint(source)
    if path.resolve() in [file.resolve() for file in checkpoint.files]:
        raise OptionError(f"{path} is the model that is read; choose another name")
    architecture = architecture_of(checkpoint)
    result = Converted(path, f"gguf {kind}", bytes_before=checkpoint.nbytes)
    half = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = gguf.GGUFWriter(half, architecture)
            add_settings(writer, checkpoint, kind)
            add_vocabulary(writer, checkpoint)
            for done, (name, data, number) in enumerate(tensors(checkpoint, kind)):
                writer.add_tensor(name, data.numpy(), raw_dtype=gguf.GGMLQuantizationType(number))
                label = gguf.GGMLQuantizationType(number).name
                result.modules[label] = result.modules.get(label, 0) + 1
                result.bytes_after += data.nbytes
                progress(done + 1, len(checkpoint.names()))
            checkpoint.check_used()
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.replace(half, path)
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
    return result


def architecture_of(checkpoint: Checkpoint) -> str:
    kind = str(checkpoint.config.get("model_type"))
    if kind not in WRITTEN:
        raise UnsupportedError(
            f"{checkpoint.folder}: {kind} models are not written as GGUF; these are: "
            f"{', '.join(WRITTEN)}"
        )
    return kind


def tensors(checkpoint: Checkpoint, kind: str) -> Iterator[tuple[str, Tensor, int]]:
    """(name, bytes or numbers as they lie in the file, type) of every tensor."""
    config = checkpoint.config
    if (factors := rope_factors(config)) is not None:
        yield ROPE_FACTORS, factors, NUMBERS["F32"]
    for prefix in modules(checkpoint):
        heads = heads_turned(config, f"{prefix}.")
        data, number = encoded(checkpoint, prefix, kind)
        yield gguf_name(f"{prefix}.weight"), data if heads is None else turned(data, heads), number
        if checkpoint.has(bias := f"{prefix}.bias"):
            values = checkpoint.tensor(bias).float()
            yield (
                gguf_name(bias),
                values if heads is None else turned(values, heads),
                NUMBERS["F32"],
            )


def modules(checkpoint: Checkpoint) -> list[str]:
    """Prefixes in the order of llama.cpp's own files."""
    layers = checkpoint.config["num_hidden_layers"]
    parts = FAMILIES[architecture_of(checkpoint)].parts.values()
    ends = [
        "model.norm",
        *(["lm_head"] if not checkpoint.config.get("tie_word_embeddings") else []),
    ]
    return [
        "model.embed_tokens",
        *(f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts),
        *ends,
    ]


def encoded(checkpoint: Checkpoint, prefix: str, kind: str) -> tuple[Tensor, int]:
    if prefix.endswith("norm"):
        return checkpoint.tensor(f"{prefix}.weight").float(), NUMBERS["F32"]
    weight: QuantTensor = checkpoint.linear(prefix)
    if kind == STORED:
        name, data = encode_stored(weight, where=f"{checkpoint.folder}: {prefix}")
        return data, NUMBERS[name]
    if kind == "F16":
        return weight.dequantize(torch.float16), NUMBERS["F16"]
    if weight.kind != Plain.kind and weight.bits_per_weight < 15:
        # as few bits already, and nothing has to be rounded again
        with contextlib.suppress(UnsupportedError):
            name, data = encode_stored(weight, where=prefix)
            if name == kind:
                return data, NUMBERS[name]
    name = "Q8_0" if prefix in ENDS else kind
    while weight.shape[1] % TYPES[NUMBERS[name]].inputs:
        if TYPES[NUMBERS[name]].inputs == 32:
            return weight.dequantize(torch.float16), NUMBERS["F16"]
        name = "Q8_0"
    return ENCODERS[name](weight.dequantize()), NUMBERS[name]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def turned(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `gguf_shard.turned_back`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Theta and scaling, in the words of transformers 4 and 5 alike."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10000.0)} | rope


def rope_factors(config: dict[str, Any]) -> Tensor | None:
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    known = (
        rope.get("low_freq_factor"),
        rope.get("high_freq_factor"),
        rope.get("original_max_position_embeddings"),
    )
    if known != (1.0, 4.0, 8192):
        raise UnsupportedError(
            f"a llama3 rope scaling of {known} is not written as GGUF; 1, 4 and 8192 are"
        )
    return llama3_factors(rope["factor"], rope["rope_theta"], head_dim(config)).float()


def add_settings(writer: Any, checkpoint: Checkpoint, kind: str) -> None:
    config = checkpoint.config
    size = head_dim(config)
    if config.get("sliding_window") and config.get(
        "use_sliding_window", config["model_type"] == "llama"
    ):
        raise UnsupportedError(
            f"{checkpoint.folder}: models with a sliding window are not written as GGUF"
        )
    writer.add_name(checkpoint.folder.resolve().name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    if kind in FILE_TYPES:
        writer.add_file_type(FILE_TYPES[kind])
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling in ("linear", "yarn"):
        writer.add_string(f"{config['model_type']}.rope.scaling.type", scaling)
        writer.add_rope_scaling_factor(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)
    elif scaling not in ("default", "llama3"):
        raise UnsupportedError(
            f"{checkpoint.folder}: {unknown('rope scaling', scaling, ('linear', 'yarn', 'llama3'))}"
        )
