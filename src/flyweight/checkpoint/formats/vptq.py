"""VPTQ, packed: one stream of codebook indices per block of rows, codebooks flat, everything else
beside them.

    indices int32 [groups, ceil(N/v), words] of (residual << B) | main over the group's columns
    centroids.weight [groups, k·v] · res_centroids.weight [groups, r·v]
    outlier_indices int16 (uint16 bits) [1, ceil(N/v₀), outliers] · outlier_centroids.weight [1,
        k₀·v₀]
    perm int16 (uint16 bits) [K] · weight_scale, weight_bias [K]

`config_for_layers` has the numbers of each module. GPTQModel writes the same streams with int32
permutations and one flat set of numbers for all modules, from which each module's are worked out as
that package does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    INT32,
    Format,
    Layers,
    Settings,
    Source,
    present,
    short,
    take,
)
from flyweight.checkpoint.formats.fused import implied_shape
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.packing import packed_words
from flyweight.tensors import QuantTensor, VectorQuant

SHORTS = (torch.int16, torch.uint16, torch.int32)


@dataclass(frozen=True)
class Vptq(Format):
    name: ClassVar[str] = "vptq"
    marks: ClassVar[tuple[str, ...]] = ("indices",)
    suffixes: ClassVar[tuple[str, ...]] = (
        "indices",
        "centroids.weight",
        "res_centroids.weight",
        "outlier_indices",
        "outlier_centroids.weight",
        "perm",
        "weight_scale",
        "weight_bias",
    )
    layers: Settings = field(default_factory=lambda: Settings({}, "config_for_layers"))
    flat: bool = False  # `layers` are the numbers of every module

    @classmethod
    def parse(cls, settings: Settings) -> Vptq:
        if "config_for_layers" not in settings.values and "vector_lens" in settings.values:
            return cls(settings, flat=True)
        return cls(settings.part("config_for_layers"))

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not present(checkpoint, prefix, self):
            return None
        layer = _Layer.parse(
            _spread(self.layers, checkpoint, prefix) if self.flat else self.layers.part(prefix)
        )
        codebook = _codebook(
            checkpoint, f"{prefix}.centroids.weight", (layer.groups, layer.main, layer.length)
        )
        residual = None
        if layer.residual:
            residual = _codebook(
                checkpoint,
                f"{prefix}.res_centroids.weight",
                (layer.groups, layer.residual, layer.length),
            )
        bits = sum((count - 1).bit_length() for count in (layer.main, layer.residual) if count)
        blocks = -(-layer.rows // layer.length)
        indices = take(
            checkpoint,
            f"{prefix}.indices",
            dtypes=INT32,
            shape=(layer.groups, blocks, packed_words(layer.group_columns, bits)),
        )
        vectors: dict[str, Tensor] = {}
        if layer.outliers:
            vectors["outlier_codebook"] = _codebook(
                checkpoint,
                f"{prefix}.outlier_centroids.weight",
                (1, layer.outlier_main, layer.outlier_length),
            )[0]
            shape = (1, -(-layer.rows // layer.outlier_length), layer.outliers)
            vectors["outlier_indices"] = _unsigned(
                take(checkpoint, f"{prefix}.outlier_indices", dtypes=SHORTS, shape=shape)
            )[0]
        if layer.permuted:
            vectors["perm"] = _unsigned(
                take(
                    checkpoint,
                    f"{prefix}.perm",
                    dtypes=(*SHORTS, torch.int64),
                    shape=(layer.columns,),
                )
            )
        if layer.normalized:
            vectors["scale"] = take(
                checkpoint, f"{prefix}.weight_scale", dtypes=FLOATS, shape=(layer.columns,)
            )
            vectors["bias"] = take(
                checkpoint, f"{prefix}.weight_bias", dtypes=FLOATS, shape=(layer.columns,)
            )
        tensor = VectorQuant(indices, codebook, residual, layer.columns, layer.rows, **vectors)
        _check_indices(tensor, f"{checkpoint.folder}: {prefix!r}")
        return tensor

    def refuses(self, tensor: QuantTensor) -> str | None:
        if not isinstance(tensor, VectorQuant):
            return f"a {tensor.kind} weight would have to be quantized again (codebooks only)"
        if tensor.in_features > 1 << 16:
            return "the permutation is stored in 16 bits"
        main, residual = tensor.index_bits
        sizes = [
            tensor.codebook.shape[-2],
            1 << residual if tensor.residual is None else tensor.residual.shape[-2],
        ]
        if sizes != [1 << main, 1 << residual] or residual > main:
            return (
                "codebooks must hold a power of two entries, the residual one no more than the "
                "main one"
            )
        if (tensor.scale is None) != (tensor.bias is None):
            return "scale and bias of the columns come together"
        return None

    def pack(self, tensor: VectorQuant) -> dict[str, Tensor]:
        parts: dict[str, Tensor | None] = {
            "indices": tensor.indices,
            "centroids.weight": tensor.codebook.flatten(1),
            "res_centroids.weight": None if tensor.residual is None else tensor.residual.flatten(1),
            "outlier_indices": None
            if tensor.outlier_indices is None
            else _short(tensor.outlier_indices)[None],
            "outlier_centroids.weight": None
            if tensor.outlier_codebook is None
            else tensor.outlier_codebook.flatten()[None],
            "perm": None if tensor.perm is None else _short(tensor.perm),
            "weight_scale": tensor.scale,
            "weight_bias": tensor.bias,
        }
        return {suffix: part for suffix, part in parts.items() if part is not None}

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        with_bias = set(biased)
        described = {
            prefix: _describe(tensor, prefix in with_bias)
            for prefix, tensor in layers.items()
            if isinstance(tensor, VectorQuant)
        }
        return {"quant_method": "vptq", "config_for_layers": described}


@dataclass(frozen=True)
class _Layer:
    rows: int
    columns: int
    length: int
    main: int
    residual: int
    groups: int
    outliers: int
    outlier_length: int
    outlier_main: int
    permuted: bool
    normalized: bool

    @property
    def group_columns(self) -> int:
        return (self.columns - self.outliers) // self.groups

    @classmethod
    def parse(cls, settings: Settings) -> _Layer:
        if settings.get("indices_as_float", bool, False) or not settings.get(
            "is_indice_packed", bool, False
        ):
            raise UnsupportedError(
                f"{settings.where}: only packed indices are read; VPTQ's `pack_model` makes them"
            )
        (outlier_length, length), (outlier_main, main), (_, residual) = (
            _pair(settings, key) for key in ("vector_lens", "num_centroids", "num_res_centroids")
        )
        outliers = (
            settings.get("outlier_size", int, 0) if outlier_length > 1 and outlier_main > 0 else 0
        )
        layer = cls(
            settings.get("out_features", int),
            settings.get("in_features", int),
            length,
            main,
            max(residual, 0),
            settings.get("group_num", int),
            outliers,
            outlier_length,
            outlier_main,
            settings.get("enable_perm", bool, False),
            settings.get("enable_norm", bool, False),
        )
        bits = sum((count - 1).bit_length() for count in (main, layer.residual) if count > 0)
        if (
            min(layer.rows, layer.columns, length, layer.groups) < 1
            or main < 2
            or outliers < 0
            or outliers >= layer.columns
            or (layer.columns - outliers) % layer.groups
            or not 0 < bits <= 32
        ):
            raise CheckpointError(
                f"{settings.where}: the numbers do not fit each other: "
                f"{short(dict(settings.values))}"
            )
        if settings.get("group_size", int, layer.group_columns) != layer.group_columns:
            raise CheckpointError(
                f"{settings.where}: `group_size` is "
                f"{settings.values['group_size']}; {layer.groups} groups of "
                f"{layer.columns - outliers} columns imply {layer.group_columns}"
            )
        return layer


def _spread(settings: Settings, checkpoint: Source, prefix: str) -> Settings:
    """One module's numbers from GPTQModel's flat ones, which leave shapes to the model and outliers
    to a percentage.
    """
    rows, columns = implied_shape(checkpoint.config, prefix)
    if rows is None or columns is None:
        raise CheckpointError(
            f"{settings.where}: config.json does not tell the shape of {prefix!r}"
        )
    if settings.get("enable_norm", bool, False) and settings.get("norm_dim", int, 0) != 0:
        raise UnsupportedError(
            f"{settings.where}: `norm_dim` 1 scales outputs; only scales of inputs (0) are handled"
        )
    percent = settings.values.get("npercent") or 0
    if type(percent) not in (int, float) or not 0 <= percent < 100:
        raise CheckpointError(
            f"{settings.where}: `npercent` is {short(percent)}, a share from 0 to 100 is wanted"
        )
    (outlier_length, _), (outlier_main, _) = (
        _pair(settings, key) for key in ("vector_lens", "num_centroids")
    )
    outliers = math.ceil(percent / 100 * columns) if outlier_length > 0 and outlier_main > 1 else 0
    size, groups = settings.group_size("group_size", -1), settings.group_size("group_num", -1)
    if groups > 0 and outliers:
        # columns left over by the division join the outliers
        outliers += (columns - outliers) % groups
    groups = groups if groups > 0 else max(1, -(-(columns - outliers) // size)) if size > 0 else 1
    if (columns - outliers) % groups or (size > 0 and groups * size != columns - outliers):
        raise UnsupportedError(
            f"{settings.where}: the last group of {prefix!r} is padded ({columns - outliers} "
            f"columns in {groups} groups), which is not handled"
        )
    numbers = {
        key: settings.values.get(key)
        for key in (
            "vector_lens",
            "num_centroids",
            "num_res_centroids",
            "enable_norm",
            "enable_perm",
        )
    }
    return Settings(
        numbers
        | {
            "out_features": rows,
            "in_features": columns,
            "group_num": groups,
            "outlier_size": outliers,
            "is_indice_packed": True,
        },
        settings.where,
    )


def _pair(settings: Settings, key: str) -> tuple[int, int]:
    pair = settings.get(key, list)
    if len(pair) != 2 or not all(
        isinstance(number, int) and not isinstance(number, bool) for number in pair
    ):
        raise CheckpointError(
            f"{settings.where}: `{key}` is {short(pair)}, two whole numbers are wanted"
        )
    return pair[0], pair[1]


def _codebook(checkpoint: Source, name: str, shape: tuple[int, int, int]) -> Tensor:
    groups, count, length = shape
    return take(checkpoint, name, dtypes=FLOATS, shape=(groups, count * length)).reshape(shape)


def _unsigned(tensor: Tensor) -> Tensor:
    """16 bits are unsigned on disk, whatever their type says."""
    return (
        tensor.to(torch.int32) & 0xFFFF if tensor.dtype != torch.int64 else tensor.to(torch.int32)
    )


def _short(tensor: Tensor) -> Tensor:
    return torch.where(tensor >= 1 << 15, tensor - (1 << 16), tensor).to(torch.int16)


def _check_indices(tensor: VectorQuant, where: str) -> None:
    """An index past its codebook would read another layer's memory on a GPU."""
    perm = tensor.perm
    if perm is not None and not torch.equal(
        perm.sort().values, torch.arange(len(perm), dtype=perm.dtype)
    ):
        raise CheckpointError(f"{where}: `perm` is no permutation of the inputs")
    pairs = [(tensor.outlier_indices, tensor.outlier_codebook)]
    if any(
        book is not None and book.shape[-2] & (book.shape[-2] - 1)
        for book in (tensor.codebook, tensor.residual)
    ):
        # the bits of a whole power of two cannot point too far
        main, residual = tensor.split_indices()
        pairs += [(main, tensor.codebook), (residual, tensor.residual)]
    if any(
        index is not None and book is not None and int(index.max()) >= book.shape[-2]
        for index, book in pairs
    ):
        raise CheckpointError(f"{where}: an index points past its codebook")


def _describe(tensor: VectorQuant, bias: bool) -> dict[str, Any]:
    """Keys that newer releases of the package reject (`norm_dim`, `enable_proxy_error`) are left
    out.
    """
    outlier = (-1, -1) if tensor.outlier_codebook is None else tensor.outlier_codebook.shape[::-1]
    residual = -1 if tensor.residual is None else tensor.residual.shape[-2]
    return {
        "in_features": tensor.in_features,
        "out_features": tensor.out_features,
        "vector_lens": [outlier[0], tensor.length],
        "num_centroids": [outlier[1], tensor.codebook.shape[-2]],
        "num_res_centroids": [-1, residual],
        "group_num": tensor.codebook.shape[-3],
        "group_size": tensor.group_columns,
        "outlier_size": tensor.outliers,
        "indices_as_float": False,
        "enable_norm": tensor.scale is not None,
        "enable_perm": tensor.perm is not None,
        "is_indice_packed": True,
        "bias": bias,
    }
