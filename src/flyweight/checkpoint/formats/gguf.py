"""GGUF as it is: the file says of each matrix how it is stored, so there is no
`quantization_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from flyweight.checkpoint.formats.base import Format, Source
from flyweight.tensors import QuantTensor


class Blocks(Source, Protocol):
    """What a checkpoint of such files can be asked beyond others."""

    def in_blocks(self, name: str) -> bool: ...
    def blocks(self, name: str) -> QuantTensor | None: ...


@dataclass(frozen=True)
class Gguf(Format):
    """Read only: `checkpoint/gguf_export.py` writes such files, which are no folders of named
    parts.
    """

    name: ClassVar[str] = "gguf"
    marks: ClassVar[tuple[str, ...]] = ("weight",)
    suffixes: ClassVar[tuple[str, ...]] = ("weight",)

    def modules(self, checkpoint: Source) -> list[str]:
        source = cast(Blocks, checkpoint)
        return [name.removesuffix(".weight") for name in source.names() if source.in_blocks(name)]

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        name = f"{prefix}.weight"
        return cast(Blocks, checkpoint).blocks(name) if checkpoint.has(name) else None

    def refuses(self, tensor: QuantTensor) -> str | None:
        return "a folder holds no GGUF; `flyweight convert --format gguf` writes a file"
