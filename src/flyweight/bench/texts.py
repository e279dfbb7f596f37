"""Prompts cut from a text, for measurements in which what is said matters: guessed tokens, above
all.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

from flyweight.errors import OptionError


def read(path: Path) -> str:
    """A text in a file that the user named."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"--text {path}: no such file") from None
    except OSError as error:
        raise OptionError(f"--text {path}: {error.strerror}; a text file is wanted") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--text {path}: not UTF-8 text ({error.reason})") from None
    if not text.strip():
        raise OptionError(f"--text {path}: the file is empty")
    return text


@functools.cache
def tokens_of(model: str, path: Path) -> tuple[int, ...]:
    """The whole text in the model's tokens."""
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.engine.tokenizer import tokenizer_of

    if model.startswith("preset:"):
        raise OptionError(f"--text: {model} has no tokenizer; name a model with files")
    tokenizer = tokenizer_of(Checkpoint(resolve(model)))
    if tokenizer is None:
        raise OptionError(f"--text: {model} has no tokenizer")
    return tuple(tokenizer.encode(read(path)))


def text_prompts(model: str, path: Path, count: int, length: int, *, seed: int) -> list[list[int]]:
    """So many stretches of the text, at places drawn by the seed."""
    tokens = tokens_of(model, path)
    if len(tokens) < length:
        raise OptionError(
            f"--text {path}: it has {len(tokens)} tokens, and prompts of {length} are wanted"
        )
    draw = random.Random(seed)
    starts = [draw.randint(0, len(tokens) - length) for _ in range(count)]
    return [list(tokens[start : start + length]) for start in starts]
