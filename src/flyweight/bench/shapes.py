"""Which shapes a kernel benchmark runs: the grids of the documents it reproduces, the linears of a
preset, or given ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from flyweight.errors import OptionError, unknown
from flyweight.models.config import ModelConfig
from flyweight.models.presets import PRESETS, preset_config

COLUMNS = (1024, 2048, 4096, 8192, 16384)
OUTPUTS = (1024, 4096, 8192, 14336, 28672, 53248)
BOOKS = ((4096, 256), (8192, 256), (4096, 512), (8192, 512))  # in the order of the second document
GRIDS = ("seed-000", "seed-001")


@dataclass(frozen=True)
class Shape:
    in_features: int
    out_features: int
    books: tuple[int, int] | None = None  # main and residual centroids, where the grid fixes them
    name: str | None = None  # of the grid, or of the linear


def find(words: Iterable[str]) -> list[Shape]:
    """`seed-000`, `seed-001`, a preset's name, or KxN."""
    return [shape for word in words for shape in _find(word)]


def _find(word: str) -> list[Shape]:
    if word == "seed-000":
        return [Shape(k, n, (8192, 256), word) for k in COLUMNS for n in OUTPUTS]
    if word == "seed-001":
        return [Shape(k, n, book, word) for book in BOOKS for n in OUTPUTS for k in COLUMNS]
    if word in PRESETS:
        return [Shape(k, n, name=f"{word} {name}") for name, (n, k) in linears(word).items()]
    if given := re.fullmatch(r"(\d+)[x×](\d+)", word):
        return [Shape(int(given[1]), int(given[2]))]
    raise OptionError(unknown("shape (KxN, a grid or a preset)", word, [*GRIDS, *PRESETS]))


def linears(preset: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a block's merged linears."""
    config = ModelConfig.from_dict(preset_config(preset))
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    return {
        "qkv": (query + 2 * key, hidden),
        "o": (hidden, query),
        "gate_up": (2 * middle, hidden),
        "down": (hidden, middle),
    }
