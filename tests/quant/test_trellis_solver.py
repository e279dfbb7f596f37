"""The trellis solver: its codes are what its tensor says, and better than rounding without looking
at inputs.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import OptionError, UnsupportedError
from flyweight.quant import trellis
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Layer, Recipe
from flyweight.quant.statistics import Statistics, layer_error
from flyweight.quant.trellis import (
    Solver,
    TrellisCode,
    even_scales,
    from_circles,
    pieces_of,
    to_circles,
)
from flyweight.tensors import Trellis
from flyweight.tensors.trellis import STATE_BITS, from_matrix


@pytest.fixture
def few_states(monkeypatch):
    """Short states search as long ones do, and in no time."""
    monkeypatch.setitem(STATE_BITS, 2, 10)
    monkeypatch.setitem(STATE_BITS, 3, 13)


def layer(rows=40, columns=320, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator)
    mix *= torch.rand(columns, generator=generator) + 0.2
    statistics = Statistics(columns)
    statistics.add(torch.randn(1000, columns, generator=generator) @ mix)
    return torch.randn(rows, columns, generator=generator) / 20, statistics


def test_pieces_hold_what_the_tensor_says():
    matrix = torch.arange(48 * 320).reshape(48, 320)
    for piece in pieces_of(320, matrix.device):
        circles = to_circles(matrix[:, piece.columns])
        assert torch.equal(from_circles(circles), matrix[:, piece.columns])
        blocks = piece.steps // 8
        begin, end = (0, 256) if blocks == 2 else (256, 320)
        lanes = from_matrix(matrix[:, begin:end], blocks).unflatten(2, (8, 4))
        unit = piece.unit if blocks == 2 else 0
        assert torch.equal(circles, lanes[:, unit, :, piece.quarter].flatten(0, 1))


@pytest.mark.parametrize("bits", [2, 3])
def test_the_tensor_is_what_the_solver_saw(few_states, bits):
    weight, statistics = layer(rows=48)
    solver = Solver(weight, statistics, TrellisCode(bits=bits, sweeps=1))
    states, scales = solver.run()
    tensor = Trellis.from_states(states, scales, bits)
    seen = torch.empty_like(weight)
    seen[:, solver.order] = solver.codes * solver.scales
    torch.testing.assert_close(tensor.dequantize(), seen)


def test_inputs_are_looked_at_and_sweeps_help(few_states):
    weight, statistics = layer()

    def error(statistics_of_solver, **options):
        (found,) = trellis.trellis([weight], statistics_of_solver, TrellisCode(**options))
        assert found.shape == weight.shape
        return layer_error(weight, found.dequantize(), statistics.hessian)

    blind = error(Statistics.uniform(320, "cpu"))
    once, swept, three = error(statistics), error(statistics, sweeps=2), error(statistics, bits=3)
    assert once < 0.7 * blind
    assert swept < once
    assert three < 0.5 * once


def test_siblings_are_solved_as_if_alone(few_states):
    weight, statistics = layer()
    other, _ = layer(rows=16, seed=1)
    options = TrellisCode()
    joined = trellis.trellis([weight, other], statistics, options)
    for part, alone in zip(joined, (weight, other), strict=True):
        (single,) = trellis.trellis([alone], statistics, options)
        assert torch.equal(single.words, part.words)
        assert torch.equal(single.scales, part.scales)


def test_even_scales_lower_the_error_of_uneven_columns(few_states):
    weight, statistics = layer(columns=128)
    weight = weight * torch.logspace(-1, 1, 128)[torch.randperm(128)]
    scales = even_scales(statistics, [weight])

    def error(scales):
        folded = statistics.scaled(scales)
        (found,) = trellis.trellis([weight * scales], folded, TrellisCode())
        return layer_error(weight * scales, found.dequantize(), folded.hessian)

    assert error(scales) < 0.6 * error(torch.ones(128))


def test_a_model_goes_through_files(few_states, tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", hidden_size=64, intermediate_size=192)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    recipe = Recipe(
        "mine",
        Layer("trellis", bits=2, group_size=-1),
        tune_steps=2,
        scale_search=True,
        rotate=True,
    )
    summary = quantize(
        folder,
        output=tmp_path / "out",
        recipe=recipe,
        calibration=str(text),
        samples=8,
        length=32,
        device="cpu",
    )
    assert summary.format == "trellis"
    found = Checkpoint(summary.output).linear("model.layers.0.mlp.down_proj")
    assert isinstance(found, Trellis) and found.bits == 2 and found.shape == (64, 192)


def test_what_does_not_fit_is_refused():
    weight, statistics = layer(columns=100)
    with pytest.raises(UnsupportedError, match="blocks of 64, and this layer has 100"):
        trellis.trellis([weight], statistics, TrellisCode())
    with pytest.raises(OptionError, match="2 or 3 bits, not 4"):
        Layer("trellis")


def test_floats_make_up_for_what_is_solved(few_states, tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", hidden_size=64, intermediate_size=192)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    layer = Layer("trellis", bits=2, group_size=-1)
    recipe = Recipe("mine", layer, rotate=True, heal_steps=12, heal_rate=3e-3)
    output = tmp_path / "out"
    quantize(
        folder,
        output=output,
        recipe=recipe,
        calibration=str(text),
        samples=8,
        length=32,
        device="cpu",
    )
    healed = json.loads((output / "flyweight.json").read_text())["transforms"]
    errors = [stage for block in healed.values() for stage in block["healed"]]
    assert len(errors) == 3 * 4
    assert all(after <= before for before, after in errors)
    before, after = torch.tensor(errors).sum(0)
    assert after < 0.98 * before
