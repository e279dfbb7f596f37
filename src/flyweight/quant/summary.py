"""What came out of a run: figures of the whole model and of every linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flyweight.quant import calibrate
from flyweight.quant.store import FinishedBlock
from flyweight.tensors import QuantTensor

Figures = dict[str, dict[str, float]]  # of every linear: its relative output error, its bits


@dataclass(frozen=True)
class Summary:
    output: Path
    scheme: str
    format: str
    bits_per_weight: float  # of the quantized linears, scales and books included
    bytes_before: int
    bytes_after: int
    layers: Figures
    seconds: float
    tokens: int
    peak_gpu_gb: float = 0.0
    finished: bool = True
    notes: tuple[str, ...] = field(default=())

    @property
    def mean_error(self) -> float:
        return sum(layer["error"] for layer in self.layers.values()) / max(len(self.layers), 1)

    @property
    def worst(self) -> tuple[str, float]:
        name = max(self.layers, key=lambda key: self.layers[key]["error"])
        return name, self.layers[name]["error"]


def full_names(finished: Sequence[FinishedBlock]) -> Iterable[tuple[str, FinishedBlock]]:
    """(prefix of the names inside it, block); the head, which comes after the blocks, has its name
    already.
    """
    for index, part in enumerate(finished):
        yield "" if "lm_head" in part.linears else f"model.layers.{index}.", part


def layer_tensors(finished: Sequence[FinishedBlock]) -> dict[str, QuantTensor]:
    found: dict[str, QuantTensor] = {}
    for prefix, part in full_names(finished):
        found |= {prefix + name: tensor for name, tensor in part.linears.items()}
    return found


def layer_figures(finished: Sequence[FinishedBlock]) -> Figures:
    found: Figures = {}
    for prefix, part in full_names(finished):
        for name, figures in part.report.get("layers", {}).items():
            found[prefix + name] = figures
    return found


def expert_notes(layers: Figures) -> tuple[str, ...]:
    """How many experts' linears had too few tokens to be calibrated on."""
    fewest = calibrate.FEWEST_TOKENS
    seen = [figures["tokens"] for figures in layers.values() if "tokens" in figures]
    few = sum(tokens < fewest for tokens in seen)
    if not few:
        return ()
    return (
        f"{few} of {len(seen)} expert linears saw fewer than {fewest} calibration tokens and were "
        "rounded to nearest",
    )


def bits_per_weight(tensors: Iterable[QuantTensor]) -> float:
    bits = 0
    weights = 0
    for tensor in tensors:
        bits += 8 * tensor.nbytes
        weights += tensor.shape[0] * tensor.shape[1]
    return bits / max(weights, 1)
