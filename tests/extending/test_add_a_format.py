"""docs/add-a-format.md, done: a toy 6-bit weight that is solved, saved, loaded, run and reported,
without a kernel of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import flyweight
from flyweight import tensors
from flyweight.checkpoint import formats
from flyweight.checkpoint.formats.base import Format, Settings
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.summary import summarize
from flyweight.kernels.dispatch import prepare
from flyweight.models.decoder import Decoder
from flyweight.models.random_folder import write_preset
from flyweight.packing import pack, unpack
from flyweight.quant import recipe, solve
from flyweight.quant.recipe import Layer, Recipe
from flyweight.tensors import QuantTensor

BITS = 6


@dataclass(frozen=True, eq=False)
class SixBit(QuantTensor):
    """Six-bit codes around their middle, one scale for each output."""

    kind: ClassVar[str] = "six"
    file_format: ClassVar[str | None] = "six"
    codes: Tensor  # int32 words [out, words], a dense stream
    scales: Tensor  # float32 [out, 1]
    in_features: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.codes.shape[-2], self.in_features

    def _dequantize(self) -> Tensor:
        return (unpack(self.codes, BITS, self.in_features).float() - 32) * self.scales


def solve_six(weight: Tensor, layer: Layer, statistics: object) -> SixBit:
    scales = weight.abs().amax(1, keepdim=True) / 31
    codes = (weight / scales).round().clamp(-32, 31) + 32
    return SixBit(pack(codes.to(torch.int32), BITS), scales, weight.shape[1])


@dataclass(frozen=True)
class SixBitFiles(Format):
    name: ClassVar[str] = "six"
    marks: ClassVar[tuple[str, ...]] = ("six_codes",)
    suffixes: ClassVar[tuple[str, ...]] = ("six_codes", "six_scales", "six_inputs")

    @classmethod
    def parse(cls, settings: Settings) -> SixBitFiles:
        return cls()

    def read(self, checkpoint: formats.Source, prefix: str) -> QuantTensor | None:
        if not checkpoint.has(f"{prefix}.six_codes"):
            return None
        codes, scales, inputs = (
            checkpoint.tensor(f"{prefix}.{suffix}") for suffix in self.suffixes
        )
        return SixBit(codes, scales, int(inputs))

    def refuses(self, tensor: QuantTensor) -> str | None:
        return None if isinstance(tensor, SixBit) else "it holds six-bit weights only"

    def write(self, prefix: str, tensor: QuantTensor) -> dict[str, Tensor]:
        assert isinstance(tensor, SixBit)
        parts = (tensor.codes, tensor.scales, torch.tensor(tensor.in_features))
        return {
            f"{prefix}.{suffix}": part for suffix, part in zip(self.suffixes, parts, strict=True)
        }

    def config(
        self, layers: formats.base.Layers, *, ignore: object = (), biased: object = ()
    ) -> dict[str, object]:
        return {"quant_method": "six"}


@pytest.fixture
def six(monkeypatch):
    """Registered here, and forgotten afterwards."""
    for module, name in (
        (tensors, "KINDS"),
        (formats, "READABLE"),
        (formats, "WRITABLE"),
        (solve, "OTHERS"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr("flyweight.quant.store.KINDS", tensors.KINDS)
    for name in ("SOLVERS", "UNCALIBRATED"):
        monkeypatch.setattr(recipe, name, type(getattr(recipe, name))(getattr(recipe, name)))
        monkeypatch.setattr(solve, name, getattr(recipe, name))
    tensors.register(SixBit)
    formats.register(SixBitFiles())
    solve.register("six", solve_six, calibrated=False)


def test_a_toy_format_is_quantized_saved_loaded_run_and_reported(six, tmp_path: Path):
    source = write_preset("preset:tiny:fp32", tmp_path / "model")
    wanted = Recipe("six", Layer("six"))
    folder = tmp_path / "six"
    flyweight.quantize(source, output=folder, recipe=wanted)

    checkpoint = Checkpoint(folder)
    found = checkpoint.linear("model.layers.0.mlp.down_proj")
    assert isinstance(found, SixBit) and found.bits_per_weight < 6.3
    assert torch.equal(
        found.dequantize(),
        solve_six(
            Checkpoint(source).tensor("model.layers.0.mlp.down_proj.weight"), Layer("six"), None
        ).dequantize(),
    )

    tokens = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(0))
    logits = [
        Decoder.load(Checkpoint(path), device="cpu", dtype=torch.float32).forward_whole(tokens)
        for path in (source, folder)
    ]
    assert 0 < (logits[1] - logits[0]).norm() / logits[0].norm() < 0.1, (
        "six bits are near, and not the same"
    )

    group = next(
        group
        for group in summarize(
            checkpoint, lambda tensor: prepare(tensor, dtype=torch.float32)
        ).groups
        if group.module == "mlp.down_proj"
    )
    assert (
        group.kernel in ("torch.linear", "fbgemm.fp16")
        and "six" in group.why
        and "dequantized" in group.why
    )


def test_a_name_is_registered_once(six):
    for register, what in ((tensors.register, SixBit), (formats.register, SixBitFiles())):
        with pytest.raises(ValueError, match="six already"):
            register(what)
    assert dataclasses.is_dataclass(SixBit)
