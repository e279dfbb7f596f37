"""AWQ, the GEMM layout: 4 bits packed along out_features, eight columns to a word in a mixed order.

    qweight int32 [K, N/8] · qzeros int32 [G, N/8] · scales fp16 [G, N]; nibble i of word c is
        output 8c + ORDER[i]

Zero points are stored as they are. No reader of the format takes anything but 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
    fault,
    group_labels,
    most_common,
    present,
    rounded_scales,
    take,
)
from flyweight.errors import UnsupportedError
from flyweight.packing import pack, unpack
from flyweight.tensors import IntGroup, QuantTensor

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
INVERSE = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Awq(Format):
    name: ClassVar[str] = "awq"
    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    group_size: int = 128

    @classmethod
    def parse(cls, settings: Settings) -> Awq:
        old = "w_bit" in settings.values  # quant_config.json of AutoAWQ
        settings.bits("w_bit" if old else "bits", (4,))
        layout = next(
            (key for key in ("version", "checkpoint_format", "format") if key in settings.values),
            "version",
        )
        settings.choice(layout, ("gemm",), "gemm")
        return cls(
            settings.group_size(
                "q_group_size" if "q_group_size" in settings.values else "group_size"
            )
        )

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not present(checkpoint, prefix, self):
            return None
        qweight = take(checkpoint, f"{prefix}.qweight", dtypes=INT32, shape=(None, None))
        columns, words = qweight.shape
        group_size = columns if self.group_size == -1 else self.group_size
        if not columns or not words or columns % group_size:
            raise fault(
                checkpoint,
                f"tensor '{prefix}.qweight' has shape {[columns, words]}, not "
                f"whole groups of {group_size}",
            )
        groups = columns // group_size
        qzeros = take(checkpoint, f"{prefix}.qzeros", dtypes=INT32, shape=(groups, words))
        scales = take(checkpoint, f"{prefix}.scales", dtypes=FLOATS, shape=(groups, words * 8))
        zeros = unpack_columns(qzeros).T.contiguous()
        symmetric = bool((zeros == 8).all())
        return IntGroup.from_values(
            unpack_columns(qweight).T,
            scales.T.contiguous(),
            None if symmetric else zeros,
            bits=4,
            group_size=group_size,
        )

    def refuses(self, tensor: QuantTensor) -> str | None:
        if not isinstance(tensor, IntGroup):
            return f"a {tensor.kind} weight would have to be quantized again (4-bit groups only)"
        if tensor.bits != 4:
            return (
                f"every reader of AWQ files takes 4 bits only, not {tensor.bits}; use "
                f"compressed-tensors"
            )
        if tensor.g_idx is not None:
            return (
                "its columns are grouped in the order of activations (g_idx), which AWQ files "
                "have no place for; use gptq"
            )
        if tensor.matrix_shape[0] % 8:
            return f"{tensor.matrix_shape[0]} outputs do not fill its words of 8"
        if tensor.in_features % tensor.group_size:
            return (
                f"{tensor.in_features} inputs are not a multiple of the group size "
                f"{tensor.group_size}"
            )
        return rounded_scales(tensor.scales)

    def pack(self, tensor: IntGroup) -> dict[str, Tensor]:
        zeros = (
            torch.full_like(tensor.scales, 8, dtype=torch.int32)
            if tensor.zeros is None
            else tensor.zeros
        )
        return {
            "qweight": pack_columns(tensor.values().T),
            "qzeros": pack_columns(zeros.T),
            "scales": tensor.scales.T.to(torch.float16),
        }

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        sizes = group_labels(layers)
        common = most_common(sizes.values())
        if other := next((prefix for prefix, size in sizes.items() if size != common), None):
            raise UnsupportedError(
                f"{other}: group size {sizes[other]}, most layers have {common}, and AWQ files "
                "have one; use compressed-tensors"
            )
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": common,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignore) or None,
        }


def unpack_columns(words: Tensor) -> Tensor:
    """int32 [rows, N/8] → values [rows, N] in the order of the outputs."""
    return unpack(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))[..., INVERSE].flatten(1)


def pack_columns(values: Tensor) -> Tensor:
    return pack(values.unflatten(1, (-1, 8))[..., ORDER].flatten(1), 4)
