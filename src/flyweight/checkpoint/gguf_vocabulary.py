"""The tokenizer of a folder as the metadata of a GGUF file: `gguf_tokenizer.py` the other way
round.
"""

from __future__ import annotations

import json
from typing import Any

from flyweight.checkpoint.folder import read_json
from flyweight.checkpoint.gguf_tokenizer import CONTROL, UNUSED, USER_DEFINED, WORD_PATTERNS
from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import CheckpointError, UnsupportedError

NORMAL = 1
SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad"}


def add_vocabulary(writer: Any, checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.folder}: no tokenizer.json, which a GGUF file is made from"
        )
    data = read_json(path)
    model = data.get("model") or {}
    if (
        model.get("type") != "BPE"
        or model.get("byte_fallback")
        or not isinstance(model.get("vocab"), dict)
    ):
        raise UnsupportedError(f"{path}: only byte-level BPE tokenizers are written as GGUF")
    tokens, types = listed(data, checkpoint.config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern_name(data, str(path)))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    )
    ids = special_ids(checkpoint)
    for name, number in ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(begins(path.read_text(encoding="utf-8"), ids.get("bos")))
    if template := chat_template(checkpoint):
        writer.add_chat_template(template)


def listed(data: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token of the vocabulary in order with its type; numbers without one are fillers."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    added = {one["content"]: one for one in data.get("added_tokens", ())}
    numbers = data["model"]["vocab"] | {name: one["id"] for name, one in added.items()}
    for token, number in numbers.items():
        if number >= size:
            raise CheckpointError(
                f"tokenizer.json: token {token!r} is number {number}, but "
                f"config.json has {size} tokens"
            )
        tokens[number] = token
        types[number] = NORMAL
        if token in added:
            types[number] = CONTROL if added[token].get("special") else USER_DEFINED
    return tokens, types


def pattern_name(data: dict[str, Any], where: str) -> str:
    """Of how a text is cut into words; see gguf_tokenizer.WORD_PATTERNS."""
    before = data.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    digits = any(step.get("type") == "Digits" and step.get("individual_digits") for step in steps)
    splits = tuple(step["pattern"].get("Regex") for step in steps if step.get("type") == "Split")
    found = next(
        (
            name
            for name, one in WORD_PATTERNS.items()
            if one.splits == splits and one.digits == digits
        ),
        None,
    )
    if found is None or not any(step.get("type") == "ByteLevel" for step in steps):
        raise UnsupportedError(
            f"{where}: it cuts texts into words in a way that has no name in GGUF: "
            f"{json.dumps(before)[:100]}"
        )
    return found


def special_ids(checkpoint: Checkpoint) -> dict[str, int]:
    found = {}
    for key, name in SPECIAL.items():
        value = checkpoint.config.get(key, checkpoint.generation_config.get(key))
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            found[name] = value
    ends = checkpoint.generation_config.get("eos_token_id")
    if isinstance(ends, list) and len(ends) > 1:  # what ends a text, and what ends a turn
        found["eot"] = next((end for end in ends if end != found.get("eos")), ends[0])
    return found


def begins(tokenizer: str, bos: int | None) -> bool:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_str(tokenizer).encode("a").ids
    return bos is not None and ids[:1] == [bos]


def chat_template(checkpoint: Checkpoint) -> str | None:
    file = checkpoint.folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = checkpoint.folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.exists() else None
    return template if isinstance(template, str) else None
