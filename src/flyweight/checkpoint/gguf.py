"""The metadata and tensors of a GGUF file, or of the several that llama.cpp has split one into.

The `gguf` package parses them; here is what it leaves open: parts that are missing, damage, and
which family of models it is (gguf_families.py).
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyweight.checkpoint.gguf_families import FAMILIES
from flyweight.checkpoint.gguf_header import read_table
from flyweight.errors import CheckpointError, MissingPackageError, UnsupportedError


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

    def stored(self, name: str) -> Any:
        """The tensor as the package shows it."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]
