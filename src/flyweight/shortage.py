"""Out of memory on a GPU, in one line: how much is missing, and which options help."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from flyweight.errors import ResourceError

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SIZE = r"([\d.]+) (B|KiB|MiB|GiB)"
RUNNING = (
    "shorter contexts (--max-model-len), fewer at once (--max-num-seqs), a smaller scheme "
    "(`flyweight quantize --scheme int4`), or layers in the host's memory (--offload) help"
)


def describe(error: BaseException, hint: str = RUNNING) -> str | None:
    """None where `error` is something else."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    text = str(error)
    asked = _bytes(rf"[Tt]ried to allocate {SIZE}", text)
    free = _bytes(rf"of which {SIZE} is free", text)
    if asked is None:
        return f"out of GPU memory; {hint}"
    if free is None or free >= asked:  # free, but in pieces or beyond a limit of the process
        return f"out of GPU memory: {size_text(asked)} more could not be had; {hint}"
    return (
        f"out of GPU memory: {size_text(asked)} more were needed and {size_text(free)} are free, "
        f"{size_text(asked - free)} are missing; {hint}"
    )


def _bytes(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text)
    return float(found[1]) * UNITS[found[2]] if found else None


def size_text(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 5e6 else f"{count / 1e6:.2f} MB"


@contextlib.contextmanager
def told(doing: str, hint: str = RUNNING) -> Iterator[None]:
    """What runs out of memory in here is the user's to solve: one line that says what was done."""
    try:
        yield
    except Exception as error:
        text = describe(error, hint)
        if text is None:
            raise
        raise ResourceError(f"{doing}: {text}") from error
