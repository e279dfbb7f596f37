"""Calibration samples: windows of equal length out of a text, drawn by seed.

The text is a file (plain, or JSON lines with `text`, `prompt` or chat `messages`), a hub dataset,
or the built-in one: public-domain prose, verse and drama, and questions, answers, lists and code of
our own writing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.errors import MissingPackageError, OptionError

BUILT_IN = "built-in"
FIELDS = ("text", "content", "prompt", "question", "instruction")


@dataclass(frozen=True, eq=False)
class Samples:
    tokens: Tensor  # int64 [samples, length]
    source: str
    seed: int
    own: int = 0  # of them written by the model itself (own_text.py)
    tuning: int = 0  # the last so many are looked at by tuning alone

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "samples": self.tokens.shape[0],
            "length": self.tokens.shape[1],
            "seed": self.seed,
            "tokens_sha256": self.digest,
        } | {name: count for name in ("own", "tuning") if (count := getattr(self, name))}


def read_text(source: str) -> str:
    """The text that `source` names: a path, `built-in`, or a hub dataset `owner/name`."""
    if source == BUILT_IN:
        folder = files("flyweight.quant").joinpath("texts")
        parts = sorted(
            (part for part in folder.iterdir() if part.name.endswith(".txt")),
            key=lambda part: part.name,
        )
        return "\n\n".join(part.read_text(encoding="utf-8") for part in parts)
    path = Path(source).expanduser()
    if not path.exists():
        if source.count("/") == 1 and not path.suffix:
            return read_dataset(source)
        raise OptionError(f"--calibration {source}: no such file")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--calibration {path}: cannot be read as UTF-8 text ({error})"
        ) from error
    if path.suffix in (".jsonl", ".ndjson"):
        return "\n\n".join(
            row_text(path, number, line)
            for number, line in enumerate(content.splitlines(), 1)
            if line.strip()
        )
    return content


def row_text(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"--calibration {path}: line {number} is not JSON ({error.msg})"
        ) from None
    if isinstance(row, str):
        return row
    turns = (
        row.get("messages") or row.get("conversations") or row.get("turns")
        if isinstance(row, dict)
        else None
    )
    if isinstance(turns, list):
        said = [
            turn if isinstance(turn, str) else turn.get("content") or turn.get("value") or ""
            for turn in turns
        ]
        return "\n".join(map(str, said))
    for name in FIELDS if isinstance(row, dict) else ():
        if isinstance(row.get(name), str):
            return row[name]
    raise OptionError(
        f"--calibration {path}: line {number} has none of "
        f"{', '.join((*FIELDS, 'messages', 'turns'))}"
    )


def read_dataset(name: str, rows: int = 4096) -> str:
    """The first rows of a hub dataset's training split."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingPackageError(
            f"--calibration {name}: no such file; reading it as a hub dataset needs: "
            "pip install datasets"
        ) from None
    try:
        part = load_dataset(name, split="train", streaming=True)
        taken = [
            row_text(Path(name), i, json.dumps(row, default=str))
            for i, row in zip(range(rows), part, strict=False)
        ]
    except OptionError:
        raise
    except Exception as error:  # the network and the hub raise many kinds
        raise OptionError(
            f"--calibration {name}: no such file, and no hub dataset that can be read ({error})"
        ) from error
    return "\n\n".join(taken)


def draw_samples(
    tokens: Sequence[int],
    *,
    count: int,
    length: int,
    seed: int,
    source: str,
    bos: int | None = None,
) -> Samples:
    """`count` windows of `length` tokens (a BOS token included where the model begins texts with
    one), drawn by seed.

    Windows do not overlap; a text with fewer of them gives all it has.
    """
    if count < 1 or length < 8:
        raise OptionError(
            f"{count} samples of {length} tokens: at least 1 sample of 8 tokens is needed"
        )
    body = length - (bos is not None)
    whole = len(tokens) // body
    if whole < 1:
        raise OptionError(
            f"calibration text {source}: {len(tokens)} tokens are too few for one sample of "
            f"{length}; use a longer text or a smaller --length"
        )
    order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    windows = torch.tensor([tokens[i * body : (i + 1) * body] for i in order], dtype=torch.int64)
    if bos is not None:
        windows = torch.cat([torch.full((len(windows), 1), bos), windows], 1)
    return Samples(windows, source, seed)
