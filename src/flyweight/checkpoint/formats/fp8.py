"""The `fp8` family (DeepSeek, Qwen3-FP8, vLLM's own): float8 weights beside a scale that
multiplies, despite its name.

    weight float8_e4m3fn [N, K] · weight_scale_inv [ceil(N/128), ceil(K/128)] with
        `weight_block_size`,
    else weight_scale (one, or [N, 1]) · input_scale where `activation_scheme` is "static"
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    Format,
    Layers,
    Settings,
    Source,
    fault,
    short,
    take,
)
from flyweight.errors import UnsupportedError
from flyweight.tensors import FLOAT8, Float8, QuantTensor


@dataclass(frozen=True)
class Fp8(Format):
    name: ClassVar[str] = "fp8"
    marks: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale")
    suffixes: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale", "input_scale")
    static: bool = False
    block: int | None = None

    @classmethod
    def parse(cls, settings: Settings) -> Fp8:
        settings.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        size = settings.get("weight_block_size", list, None)
        if size is not None and (
            len(size) != 2
            or size[0] != size[1]
            or type(size[0]) is not int
            or not 0 < size[0] <= 1 << 20
        ):
            raise UnsupportedError(
                f"{settings.where}: `weight_block_size` is {short(size)}; square blocks are read"
            )
        scheme = settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        return cls(scheme == "static", None if size is None else size[0])

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        name = next(
            (f"{prefix}.{mark}" for mark in self.marks if checkpoint.has(f"{prefix}.{mark}")), None
        )
        if name is None:
            return None
        weight = take(checkpoint, f"{prefix}.weight", dtypes=(FLOAT8,), shape=(None, None))
        rows, columns = weight.shape
        if not weight.numel():
            raise fault(checkpoint, f"tensor '{prefix}.weight' is empty")
        found = checkpoint.shape(name)
        if self.block:
            scales = take(
                checkpoint,
                name,
                dtypes=FLOATS,
                shape=(-(-rows // self.block), -(-columns // self.block)),
            )
        elif found in ((), (1,), (1, 1)):
            scales = take(checkpoint, name, dtypes=FLOATS, shape=found).reshape(1, 1)
        else:
            scales = take(
                checkpoint, name, dtypes=FLOATS, shape=(rows, 1) if len(found) == 2 else (rows,)
            ).reshape(rows, 1)
        activation = "static" if self.static else "group" if self.block else "token"
        return Float8(weight, scales, activation, self.block, self._input_scale(checkpoint, prefix))

    def _input_scale(self, checkpoint: Source, prefix: str) -> Tensor | None:
        if not self.static:
            return None
        name = f"{prefix}.input_scale"
        scalar = checkpoint.has(name) and checkpoint.shape(name) == ()
        return take(checkpoint, name, dtypes=FLOATS, shape=() if scalar else (1,)).reshape(1)

    def refuses(self, tensor: QuantTensor) -> str | None:
        if not isinstance(tensor, Float8):
            return f"a {tensor.kind} weight would have to be quantized again (float8 only)"
        if tensor.activation == "none" or (tensor.activation == "group") != bool(tensor.block):
            return (
                f"{tensor.activation} activations with these weight scales have no name in it; "
                f"use compressed-tensors"
            )
        if not tensor.block and tensor.scales.numel() > 1:
            return (
                "engines read one scale per tensor or per block here, not one per output; use "
                "compressed-tensors"
            )
        return None

    def pack(self, tensor: Float8) -> dict[str, Tensor]:
        parts = {"weight": tensor.weight}
        parts["weight_scale_inv" if tensor.block else "weight_scale"] = (
            tensor.scales if tensor.block else tensor.scales.flatten()
        )
        return parts if tensor.input_scale is None else parts | {"input_scale": tensor.input_scale}

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        schemes = {
            (tensor.activation == "static", tensor.block)
            for tensor in layers.values()
            if isinstance(tensor, Float8)
        }
        if len(schemes) != 1:
            raise UnsupportedError(
                "an fp8 folder has one block size and one kind of activations; "
                "use compressed-tensors"
            )
        static, block = schemes.pop()
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if static else "dynamic",
            "weight_block_size": [block, block] if block else None,
            "modules_to_not_convert": list(ignore) or None,
        }
