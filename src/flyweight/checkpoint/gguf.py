"""What a GGUF file says of its model, written out once as Hugging Face's config.json and tokenizer
files.

`keep` puts those beside a link to the file, whose weights stay as they are (gguf_shard.py reads
them). `convert` writes an ordinary folder that other programs read: weights become float16, or
float32 for the exact values of the quantized file.

The `gguf` package parses the metadata; here is what it leaves open: names, config, and the row
order of q and k that llama.cpp changes for its own rope. A tensor or setting that has no
counterpart is an error: leaving one out would give a model that loads and talks nonsense.
"""

from __future__ import annotations

import difflib
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flyweight.checkpoint.gguf_families import FAMILIES
from flyweight.checkpoint.gguf_header import read_table
from flyweight.checkpoint.gguf_shard import (
    ROPE_FACTORS,
    GgufShard,
    hugging_face_name,
    is_read,
)
from flyweight.checkpoint.gguf_tokenizer import write_tokenizer
from flyweight.checkpoint.shard import is_finite
from flyweight.checkpoint.writer import CheckpointWriter, write_json
from flyweight.errors import (
    CheckpointError,
    MissingPackageError,
    ResourceError,
    UnsupportedError,
    unknown,
)

SIZES = {  # config.json ← GGUF metadata, less its architecture prefix
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Few files say how to sample, and plain sampling lets a small model ramble. By architecture or word
# pattern: what the authors ask for in the card or generation_config.json of their instruct models;
# a middle way for others.
INSTRUCT: dict[str, dict[str, Any]] = {
    "smollm": {"temperature": 0.2, "top_p": 0.9},
    "qwen2": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "qwen3": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "llama-bpe": {"temperature": 0.6, "top_p": 0.9},
    "other": {"temperature": 0.7, "top_p": 0.95},
}
SOURCE = "flyweight_source"  # in config.json, which other programs read past
# transformers takes any large vocabulary without a version for a Mistral tokenizer of old, whose
# pattern was wrong. Ours come from the table in gguf_tokenizer.py.
WRITTEN_FOR = "5.0.0"


def parts_of(path: Path) -> list[Path]:
    """All files of a model that llama.cpp has split, `path` being one of them; else
    `path` alone.
    """
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) < 2:
        return [path]
    parts = [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        for number in range(1, int(match[3]) + 1)
    ]
    if missing := [part.name for part in parts if not part.exists()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: one of {match[3].lstrip('0')} parts, of which "
            f"{missing[0]}{more} is missing; get it too"
        )
    return parts


class GGUF:
    """The metadata and tensors of one model, in one file or in several."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            import gguf
        except ImportError:
            raise MissingPackageError(
                "reading GGUF files needs the gguf package: pip install gguf"
            ) from None
        self.paths = parts_of(self.path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        for part in self.paths:
            try:
                read_table(part)
                reader = gguf.GGUFReader(part)
                fields = {name: field.contents() for name, field in reader.fields.items()}
                self.tensors |= {tensor.name: tensor for tensor in reader.tensors}
            except (
                ValueError,
                IndexError,
                KeyError,
                TypeError,
                OverflowError,
                MemoryError,
                OSError,
            ) as error:
                raise CheckpointError(
                    f"{part}: truncated or damaged GGUF file ({error}); get it again"
                ) from error
            self.metadata = fields | self.metadata  # the first part has it all
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in FAMILIES:
            near = difflib.get_close_matches(self.architecture, list(FAMILIES), n=1, cutoff=0.75)
            nearest = f"; the nearest that is: {near[0]}" if near else ""
            raise UnsupportedError(
                f"{self.path}: architecture {self.architecture!r} is not "
                f"supported{nearest}; known: {', '.join(FAMILIES)}"
            )
        self.family = FAMILIES[self.architecture]
        count = self.metadata.get("split.count", 0)
        if count > 1 and count != len(self.paths):
            raise UnsupportedError(
                f"{self.path}: one of {count} parts whose names do not tell the others; join them "
                "with `llama-gguf-split --merge`"
            )

    def setting(self, name: str, default: Any = None) -> Any:
        """Metadata of the architecture; without a default it must be there."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata '{self.architecture}.{name}' is missing")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        value = self.setting(name, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedError(
                f"{self.path}: metadata '{self.architecture}.{name}' is "
                f"{value!r}, not a number above zero"
            )
        return value

    def values(self, name: str) -> Tensor:
        """Dequantized, float32."""
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            return torch.from_numpy(
                np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            )
        except NotImplementedError:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is {tensor.tensor_type.name}, which cannot be read"
            ) from None


def keep(path: str | Path, target: Path, *, move: bool = False) -> Path:
    """Fill the new folder `target`: config, tokenizer, and the GGUF file itself, moved there or
    linked to.
    """
    file = GGUF(path)
    config = make_config(file, torch.float16)
    for name in file.tensors:
        if is_read(config, name):
            hugging_face_name(file.path, file.family, name)
    _check_tensors(file, config)
    target.mkdir()
    write_tokenizer(file.metadata, target, file=file.path)
    write_json(target / "generation_config.json", make_generation_config(file))
    write_json(target / "config.json", config)
    for part in file.paths:
        if move:
            shutil.move(part, target / part.name)
        else:
            (target / part.name).symlink_to(part.resolve())
    return target


def convert(
    path: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype = torch.float16,
    overwrite: bool = False,
) -> Path:
    """Write `target`, a Hugging Face folder with the weights, config, tokenizer and chat template
    of a GGUF file.
    """
    file = GGUF(path)
    config = make_config(file, dtype)
    shards = [GgufShard(part, config) for part in file.paths]
    _check_tensors(file, config)
    check_room(file, Path(target), dtype)
    with CheckpointWriter(target, overwrite=overwrite) as writer:
        names = [(shard, name) for shard in shards for name in shard.table]
        for shard, name in track(
            names,
            f"Converting {file.path.name}",
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ):
            writer.add(name, _converted(shard, name, dtype))
        with writer.writing("the tokenizer"):
            write_tokenizer(file.metadata, writer.staging, file=file.path)
            write_json(writer.staging / "generation_config.json", make_generation_config(file))
        return writer.finish(config)


def check_room(file: GGUF, target: Path, dtype: torch.dtype) -> None:
    """A disk that cannot hold the result is told before the work, not after it."""
    needed = (
        sum(math.prod(map(int, tensor.shape)) for tensor in file.tensors.values()) * dtype.itemsize
    )
    place = target.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ResourceError(
            f"{file.path.name} takes {needed / 1e6:,.0f} MB as a folder, but only "
            f"{free / 1e6:,.0f} MB are free "
            f"at {place}; make room, or set FLYWEIGHT_CACHE to another folder"
        )


def make_config(file: GGUF, dtype: torch.dtype) -> dict[str, Any]:
    """config.json, in the keys that transformers 4 and 5 and the other engines all read."""
    config: dict[str, Any] = {key: file.number(name) for key, name in SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = file.number("attention.key_length", config["hidden_size"] // heads)
    rotary = file.number("rope.dimension_count", head_dim)
    if file.family.latent:  # what a head is made of, its settings say
        head_dim = rotary
    if rotary != head_dim and not file.family.partial_rope:
        raise UnsupportedError(f"{file.path}: rope on a part of the head ({rotary} of {head_dim})")
    if file.setting("attention.sliding_window", 0) and not file.family.windows:
        raise UnsupportedError(
            f"{file.path}: sliding-window attention in a GGUF file; get the "
            f"Hugging Face folder of this model"
        )
    config |= {
        "architectures": [file.family.transformers],
        "model_type": file.family.model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformers_version": WRITTEN_FOR,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": int(_tensor(file, "token_embd.weight").shape[-1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.number("rope.freq_base", 10000.0),
        "rms_norm_eps": float(f"{config['rms_norm_eps']:.6g}"),  # stored in float32: 9.99999974e-06
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if not file.family.biased:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if scaling := _rope_scaling(file, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    config |= file.family.settings(file, config)
    return config | _token_ids(file) | {SOURCE: describe_source(file)}


def describe_source(file: GGUF) -> dict[str, Any]:
    """How the file stores its matrices: weights that were rounded once are told from those that
    never were.
    """
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    counts: dict[str, int] = {}
    for tensor in matrices:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(
            tensor.n_elements
        )
    weights = sum(counts.values())
    bits = 8 * sum(int(tensor.n_bytes) for tensor in matrices) / max(1, weights)
    most = max(counts, key=lambda name: counts[name], default="F16")
    return {"file": file.path.name, "type": most, "bits_per_weight": round(bits, 2)}


def make_generation_config(file: GGUF) -> dict[str, Any]:
    """Stop tokens, and the author's sampling where newer files carry it; else what suits a model
    that answers.
    """
    sampling = {
        key: file.metadata[f"general.sampling.{name}"]
        for key, name in SAMPLING.items()
        if f"general.sampling.{name}" in file.metadata
    }
    if not sampling and "tokenizer.chat_template" in file.metadata:
        pattern = str(file.metadata.get("tokenizer.ggml.pre"))
        sampling = dict(
            INSTRUCT.get(file.architecture) or INSTRUCT.get(pattern) or INSTRUCT["other"]
        )
    ids = _token_ids(file)
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn not in (None, ids.get("eos_token_id")):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return ids | sampling | ({"do_sample": True} if sampling else {})


def _token_ids(file: GGUF) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {
        key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()
    }
    return {key: value for key, value in found.items() if value is not None}


def _rope_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.setting("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{file.path}: {unknown('rope scaling', kind, ('linear', 'yarn'))}")
    scaling = {"rope_type": kind, "factor": file.setting("rope.scaling.factor")}
    if original := file.setting("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow") if kind == "yarn" else ():
        if (limit := file.setting(f"rope.scaling.yarn_{key}", 0)) > 0:
            scaling[key] = limit
    return scaling


# of 3.1, 3.2 and 3.3
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_factors(factor: float, theta: float, head_dim: int) -> Tensor:
    """The divisors of the rope frequencies that these settings give."""
    low, high, original = LLAMA3.values()
    # within the original context
    turns = original / (2 * math.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim))
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """The file holds the divisors that the settings give; find the settings and check that they do
    give them.
    """
    factors = file.values(ROPE_FACTORS)
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_dim)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is not the rope scaling of a Llama 3 model"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _tensor(file: GGUF, name: str) -> Any:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name]


def _check_tensors(file: GGUF, config: dict[str, Any]) -> None:
    """Every layer has every part, in the shape that the metadata implies."""
    for name, shape in _wanted(file, config):
        # GGUF counts dimensions from the inside
        found = tuple(int(size) for size in reversed(_tensor(file, name).shape))
        if found != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has shape {list(found)}, the "
                f"metadata implies {list(shape)}"
            )


def _wanted(file: GGUF, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes = _shapes(file, config)
    yield "output_norm.weight", shapes["output_norm"]
    for name in ("token_embd", *(() if config["tie_word_embeddings"] else ("output",))):
        yield f"{name}.weight", shapes["token_embd"]
    for layer in range(config["num_hidden_layers"]):
        for part in file.family.parts | file.family.experts:
            yield f"blk.{layer}.{part}.weight", shapes[part]
            if part in ("attn_q", "attn_k", "attn_v") and (
                file.family.biased or config.get("attention_bias")
            ):
                yield f"blk.{layer}.{part}.bias", shapes[part][:1]


def _shapes(file: GGUF, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    whole = file.family.whole_norms
    ups = 1 if "ffn_gate" in file.family.parts else 2
    norms = dict.fromkeys(
        ("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (hidden,)
    )
    width = file.setting("expert_feed_forward_length", 0)
    count = file.setting("expert_count", 0)
    experts = {
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, width, hidden),
        "ffn_up_exps": (count, width, hidden),
        "ffn_down_exps": (count, hidden, width),
    }
    return (
        norms
        | experts
        | {
            "token_embd": (config["vocab_size"], hidden),
            "attn_qkv": (queries + 2 * keys, hidden),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "attn_q_norm": (queries if whole else head,),
            "attn_k_norm": (keys if whole else head,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (ups * inner, hidden),
            "ffn_down": (hidden, inner),
        }
    )


def _converted(shard: GgufShard, name: str, dtype: torch.dtype) -> Tensor:
    converted = shard.get_tensor(name, torch.float32).to(dtype)
    if not is_finite(converted):
        raise CheckpointError(
            f"{shard.file}: tensor {name!r} holds NaN, infinity or more than "
            f"{dtype} can hold; try float32"
        )
    return converted
