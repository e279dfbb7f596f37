"""Format: on-disk tensors and `quantization_config` ↔ QuantTensor, one class per family of files.

Reading trusts nothing: every config value has its type checked, every tensor its dtype and its
shape against the others before anything is unpacked, so a damaged file is an error with a name in
it and never garbage or a huge allocation. Writing asks `refuses` first: what a format cannot hold
exactly is never written.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from flyweight.errors import CheckpointError, UnsupportedError, unknown
from flyweight.tensors import IntGroup, Plain, QuantTensor, Sparse24

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INT32 = (torch.int32,)
REQUIRED: Any = object()


Layers = Mapping[str, QuantTensor]


class CheckpointNotice(UserWarning):
    """A fault of a checkpoint that was understood and mended; given once."""


def notice(checkpoint: Source, message: str) -> None:
    """Python shows a warning of one text once, so a fault of every layer is told once for the
    folder.
    """
    warnings.warn(f"{checkpoint.folder}: {message}", CheckpointNotice, stacklevel=2)


def fault(checkpoint: Source, message: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.folder}: {message}")


class Source(Protocol):
    """What a format asks of a checkpoint; `reader.Checkpoint` is one."""

    folder: Path
    config: dict[str, Any]

    def names(self) -> list[str]: ...
    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Format:
    """One family of files. A module is quantized where the tensor `mark` is there, and then uses
    `suffixes`.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[tuple[str, ...]]

    @classmethod
    def parse(cls, settings: Settings) -> Self:
        """The format as `quantization_config` describes it."""
        raise NotImplementedError

    @property
    def spare(self) -> tuple[str, ...]:
        """Patterns of tensors that nothing here needs: they need not be read, and are not written
        again.
        """
        return ()

    def names(self, prefix: str) -> list[str]:
        """Every tensor that a quantized module may use."""
        return [f"{prefix}.{suffix}" for suffix in self.suffixes]

    def modules(self, checkpoint: Source) -> list[str]:
        """The prefixes of all quantized modules, in the order of the files."""
        return list(
            dict.fromkeys(
                name.removesuffix(f".{mark}")
                for name in checkpoint.names()
                for mark in self.marks
                if name.endswith(f".{mark}")
            )
        )

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        """The weight of the module `prefix`; None where it is not quantized."""
        raise NotImplementedError

    def refuses(self, tensor: QuantTensor) -> str | None:
        """Why this format cannot hold the (dense) weight without loss, or None where it can."""
        raise NotImplementedError

    def pack(self, tensor: Any) -> dict[str, Tensor]:
        """The tensors of one module by suffix."""
        raise NotImplementedError

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        """`quantization_config` for these layers (their tensors may be on the meta device).

        `ignore` are the linear modules that stay plain, `biased` those with a bias beside the
        weight.
        """
        raise NotImplementedError

    def expect(self, prefix: str, dense: QuantTensor) -> None:
        if not isinstance(dense, Plain) and (reason := self.refuses(dense)):
            raise UnsupportedError(
                f"{prefix}: the {self.name} format cannot hold this weight: {reason}"
            )

    def write(self, prefix: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """The tensors of the module `prefix` by full name. 2:4 weights are written dense: no engine
        reads them otherwise.
        """
        if tensor.experts is not None:
            raise ValueError("experts are written one by one")
        dense = dense_of(tensor)
        if isinstance(dense, Plain):
            return {f"{prefix}.weight": dense.weight}
        self.expect(prefix, dense)
        return {
            f"{prefix}.{suffix}": part.contiguous() for suffix, part in self.pack(dense).items()
        }


def dense_of(tensor: QuantTensor) -> QuantTensor:
    return tensor.to_dense() if isinstance(tensor, Sparse24) else tensor


@dataclass(frozen=True)
class Settings:
    """`quantization_config` with typed access: a wrong value is an error that names its key and
    file.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise CheckpointError(f"{self.where}: `{key}` is missing")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.where}: `{key}` is {short(value)}, a {kind.__name__} is wanted"
            )
        return value

    def choice(self, key: str, known: Sequence[str], default: Any = REQUIRED) -> str:
        value = str(self.get(key, str, default)).lower()
        if value not in known:
            raise UnsupportedError(f"{self.where}: {unknown(key, value, known)}")
        return value

    def bits(self, key: str, known: Sequence[int], default: Any = REQUIRED) -> int:
        bits = self.get(key, int, default)
        if bits not in known:
            raise UnsupportedError(
                f"{self.where}: `{key}` is {bits}; {', '.join(map(str, known))} can be read"
            )
        return bits

    def group_size(self, key: str, default: Any = REQUIRED) -> int:
        """Above zero, or −1 for one group per row."""
        size = self.get(key, int, default)
        if size < 1 and size != -1:
            raise CheckpointError(
                f"{self.where}: `{key}` is {size}; above zero, or -1 for one "
                f"group per row, is wanted"
            )
        return size

    def part(self, key: str, default: Any = REQUIRED) -> Settings:
        return Settings(self.get(key, dict, default), f"{self.where}: {key}")


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 40 else text[:37] + "..."


def take(
    checkpoint: Source, name: str, *, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
) -> Tensor:
    """The tensor if it is there, of one of the types and of the shape (None: any length there)."""
    if not checkpoint.has(name):
        raise fault(checkpoint, f"tensor {name!r} is missing, but its siblings are there")
    found = checkpoint.shape(name)
    if len(found) != len(shape) or any(
        want is not None and size != want for size, want in zip(found, shape, strict=True)
    ):
        wanted = [size if size is not None else "any" for size in shape]
        raise fault(
            checkpoint,
            f"tensor {name!r} has shape {list(found)}; quantization_config and its siblings imply "
            f"{wanted}".replace("'any'", "any"),
        )
    tensor = checkpoint.tensor(name)
    if tensor.dtype not in dtypes:
        wanted_types = " or ".join(map(type_name, dtypes))
        raise fault(
            checkpoint, f"tensor {name!r} is {type_name(tensor.dtype)}, {wanted_types} is wanted"
        )
    return tensor


def present(checkpoint: Source, prefix: str, form: Format) -> bool:
    """Is the module quantized? Parts without their main tensor are a fault."""
    if any(checkpoint.has(f"{prefix}.{mark}") for mark in form.marks):
        return True
    stray = next((name for name in form.names(prefix) if checkpoint.has(name)), None)
    if stray and not checkpoint.has(f"{prefix}.weight"):
        raise fault(
            checkpoint, f"tensor '{prefix}.{form.marks[0]}' is missing, but {stray!r} is there"
        )
    return False


def rounded_scales(scales: Tensor) -> str | None:
    """GPTQ and AWQ files keep scales in float16; a bfloat16 scale fits unless it is very small or
    large.
    """
    if (
        scales.dtype == torch.float16
        or scales.is_meta
        or torch.equal(scales.half().float(), scales.float())
    ):
        return None
    return (
        f"its {type_name(scales.dtype)} scales would be rounded to float16; use compressed-tensors"
    )


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def most_common(values: Iterable[Any]) -> Any:
    counted = list(values)
    return max(dict.fromkeys(counted), key=counted.count)


def group_labels(layers: Layers) -> dict[str, int]:
    """The group size of each integer layer as a config names it: −1 for one group per row, unless
    that is the common size.
    """
    sizes = {
        prefix: (dense.group_size, dense.group_size >= dense.in_features)
        for prefix, tensor in layers.items()
        if isinstance(dense := dense_of(tensor), IntGroup)
    }
    common = most_common([size for size, whole in sizes.values() if not whole] or [-1])
    return {
        prefix: -1 if whole and size != common else size for prefix, (size, whole) in sizes.items()
    }
