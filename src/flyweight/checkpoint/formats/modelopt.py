"""Folders of NVIDIA's Model Optimizer: NVFP4 weights, and float8 with one scale a matrix.

    NVFP4   weight uint8 [N, K/2] of e2m1 codes, the first of two in the low half · weight_scale
            float8_e4m3fn [N, K/16] · weight_scale_2 float32 (one)
    FP8     weight float8_e4m3fn [N, K] · weight_scale float32 (one); input_scale

`input_scale` of NVFP4 is for activations in 4 bits. They keep their 16 bits here, which is only
more precise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    Format,
    Layers,
    Settings,
    Source,
    fault,
    take,
)
from flyweight.checkpoint.formats.fp8 import Fp8
from flyweight.errors import UnsupportedError
from flyweight.tensors import FLOAT8, NvFloat4, QuantTensor

GROUP = 16
CACHE = ("*.k_proj.k_scale", "*.v_proj.v_scale")  # of keys and values in 8 bits


@dataclass(frozen=True)
class ModelOpt(Format):
    name: ClassVar[str] = "modelopt"
    marks: ClassVar[tuple[str, ...]] = ("weight_scale_2",)
    suffixes: ClassVar[tuple[str, ...]] = ("weight_scale_2", "weight_scale", "input_scale")

    @classmethod
    def parse(cls, settings: Settings) -> Format:  # type: ignore[override]
        kind = settings.get("quant_algo", str, "").upper()
        if kind == "FP8":
            return Fp8(static=True)
        if kind not in ("NVFP4", "NVFP4_AWQ"):
            raise UnsupportedError(
                f"{settings.where}: `quant_algo` is {kind!r}; NVFP4 and FP8 are read"
            )
        return cls()

    @property
    def spare(self) -> tuple[str, ...]:
        return (*CACHE, "*.pre_quant_scale_inv")

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not checkpoint.has(f"{prefix}.weight_scale_2"):
            return None
        if checkpoint.has(f"{prefix}.pre_quant_scale"):
            raise UnsupportedError(
                f"{checkpoint.folder}: {prefix!r} multiplies its input first (pre_quant_scale), "
                "which is not done here; export without AWQ"
            )
        if checkpoint.has(f"{prefix}.input_scale"):  # named, so that nothing is left over
            _one(checkpoint, f"{prefix}.input_scale")
        return read_nvfp4(
            checkpoint, prefix, "weight", _one(checkpoint, f"{prefix}.weight_scale_2")
        )

    def refuses(self, tensor: QuantTensor) -> str | None:
        if not isinstance(tensor, NvFloat4):
            return f"a {tensor.kind} weight would have to be quantized again (NVFP4 only)"
        scale = tensor.global_scale
        if not scale.is_meta and not bool((scale == scale[:1]).all()):
            return "its outputs have more than one global scale"
        return None

    def pack(self, tensor: NvFloat4) -> dict[str, Tensor]:
        return {
            "weight": tensor.codes,
            "weight_scale": tensor.scales,
            "weight_scale_2": tensor.global_scale[0, 0],
        }

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": list(ignore),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }


def _one(checkpoint: Source, name: str) -> Tensor:
    shape = checkpoint.shape(name)
    return take(checkpoint, name, dtypes=FLOATS, shape=shape if shape == (1,) else ())


def read_nvfp4(checkpoint: Source, prefix: str, codes: str, whole: Tensor) -> NvFloat4:
    """`whole`: the global scale, one number that multiplies."""
    packed = take(checkpoint, f"{prefix}.{codes}", dtypes=(torch.uint8,), shape=(None, None))
    rows, half = packed.shape
    if not packed.numel() or 2 * half % GROUP:
        raise fault(
            checkpoint,
            f"'{prefix}.{codes}' has shape {[rows, half]}: no whole groups of {GROUP} inputs",
        )
    shape = (rows, 2 * half // GROUP)
    scales = take(checkpoint, f"{prefix}.weight_scale", dtypes=(FLOAT8,), shape=shape)
    if not bool(whole.isfinite().all()):
        raise fault(checkpoint, f"the global scale of {prefix!r} is not finite")
    return NvFloat4(packed, scales, whole.float().reshape(1, 1).expand(rows, 1).contiguous())
