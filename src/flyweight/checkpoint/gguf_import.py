"""A GGUF file as a model folder: `keep` links to it, `convert` writes its weights out.

`keep` puts config.json and tokenizer files beside a link to the file, whose weights stay as they
are (gguf_shard.py reads them). `convert` writes an ordinary folder that other programs read:
weights become float16, or float32 for the exact values of the quantized file.

A tensor or setting that has no counterpart is an error: leaving one out would give a model that
loads and talks nonsense.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flyweight.checkpoint.gguf import GGUF
from flyweight.checkpoint.gguf_config import make_config, make_generation_config
from flyweight.checkpoint.gguf_shard import GgufShard, hugging_face_name, is_read
from flyweight.checkpoint.gguf_tokenizer import write_tokenizer
from flyweight.checkpoint.shard import is_finite
from flyweight.checkpoint.writer import CheckpointWriter, write_json
from flyweight.errors import CheckpointError, ResourceError


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


def _check_tensors(file: GGUF, config: dict[str, Any]) -> None:
    """Every layer has every part, in the shape that the metadata implies."""
    for name, shape in _wanted(file, config):
        # GGUF counts dimensions from the inside
        found = tuple(int(size) for size in reversed(file.stored(name).shape))
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
