"""Tuning of the whole model on its predictions."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import ResourceError
from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm
from flyweight.models.attention import Whole
from flyweight.models.config import ModelConfig
from flyweight.models.rope import rope_tables
from flyweight.models.standard import plan_of
from flyweight.quant.movable import Part
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe
from flyweight.quant.rtn import rtn
from flyweight.quant.tune import HELD, HELD_MOVING, Chain, Predictions, TunedBlock, Tuning
from flyweight.quant.work import WorkBlock
from flyweight.tensors import IntGroup, VectorQuant


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=2)


def make(model, tmp_path, name, **keys):
    (tmp_path / "text.txt").write_text(TEXT)
    recipe = Recipe.from_dict({"tune_batch": 4, "tune_rate": 0.01} | keys, name)
    return quantize(
        model,
        output=tmp_path / name,
        recipe=recipe,
        calibration=str(tmp_path / "text.txt"),
        samples=16,
        length=48,
        device="cpu",
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"base": "gptq-int3", "tune_steps": 8},
        {"base": "gptq-int4", "tune_rounding": 0.3, "tune_steps": 32},
        {"base": "vptq-2bit", "vector_length": 2, "centroids": 16, "refits": 0, "tune_steps": 8},
    ],
    ids=["scales", "codes", "books"],
)
def test_tuning_lowers_the_divergence_on_samples_that_it_does_not_see(keys, model, tmp_path):
    summary = make(model, tmp_path, "out", **keys)
    facts = json.loads((summary.output / "flyweight.json").read_text())
    assert facts["tuned"]["after"] < facts["tuned"]["before"]
    before = make(model, tmp_path, "plain", **keys | {"tune_steps": 0})
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")
    for name in names:  # the same bits are stored, with other values
        tuned, plain = (
            Checkpoint(folder).linear(name) for folder in (summary.output, before.output)
        )
        assert tuned.nbytes == plain.nbytes and not torch.equal(
            tuned.dequantize(), plain.dequantize()
        )
    assert summary.bytes_after == before.bytes_after


@pytest.mark.parametrize(
    ("rounding", "words"), [(1.0, "tune_rounding = 0"), (0.0, "tune_steps = 0")]
)
def test_a_model_without_room_for_tuning_is_refused_before_the_work(
    rounding, words, model, tmp_path, monkeypatch
):
    weights = 2 * sum(
        sum(group.sizes) * group.in_features
        for group in plan_of(ModelConfig.from_dict(Checkpoint(model).config)).layers[0].groups
    )
    room = weights * (HELD_MOVING if rounding else HELD)
    monkeypatch.setattr("flyweight.quant.quantize.available_memory", lambda: room - 1)
    keys = {"base": "gptq-int4", "tune_steps": 1, "tune_rounding": rounding}
    with pytest.raises(ResourceError, match=words):
        make(model, tmp_path, "out", **keys)
    assert not list(tmp_path.glob("*out*"))
    monkeypatch.setattr("flyweight.quant.quantize.available_memory", lambda: room)
    make(model, tmp_path, "out", **keys)


def test_what_does_not_help_is_thrown_away(model, tmp_path):
    summary = make(model, tmp_path, "wild", base="gptq-int3", tune_steps=2, tune_rate=3.0)
    plain = make(model, tmp_path, "plain", base="gptq-int3")
    for name in Checkpoint(plain.output).names():
        assert torch.equal(
            Checkpoint(summary.output).tensor(name), Checkpoint(plain.output).tensor(name)
        ), name


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_part_starts_as_the_tensor_that_it_is_made_of(symmetric):
    tensor = IntGroup.random(
        (12, 64), bits=4, group_size=32, symmetric=symmetric, dtype=torch.float16
    )
    vectors = VectorQuant.random((16, 64), length=4, main=32, residual=8, dtype=torch.float16)
    for part in (
        Part(tensor, rounding=False),
        Part(tensor, rounding=True),
        Part(vectors, rounding=False),
    ):
        torch.testing.assert_close(part.weight().detach(), part.tensor.dequantize())
        torch.testing.assert_close(part.result().dequantize(), part.tensor.dequantize())


def test_a_code_moves_to_its_neighbour_once_it_is_half_way_there_and_never_off_the_grid():
    tensor = IntGroup.random((4, 64), bits=3, group_size=32, dtype=torch.float16)
    part = Part(tensor, rounding=True)
    with torch.no_grad():
        part.codes += 0.4
    assert torch.equal(part.result().values(), tensor.values())
    with torch.no_grad():
        part.codes += 2.2
    part.stay_inside()
    assert torch.equal(part.result().values(), (tensor.values() + 3).clamp(max=7))


def test_a_code_that_moves_starts_where_the_weight_was_and_rounds_to_what_it_is():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    layer = Recipe.from_dict({"base": "rtn-int4", "bits": 2, "group_size": 32}, "x").layer
    tensor = rtn(weight, layer.integers(torch.float32))
    part = Part(tensor, rounding=True, original=weight)
    assert torch.equal(part.result().values(), tensor.values())
    lies = part.codes.detach() * tensor.scales.float()[..., None]
    assert (lies.flatten(1) - weight).norm() < 0.5 * (tensor.dequantize() - weight).norm()


def test_gradients_block_by_block_are_those_of_the_whole(model):
    """Two blocks run apart give the same gradient as one graph through both and the head."""
    source = Checkpoint(model)
    config, device = ModelConfig.from_dict(source.config), torch.device("cpu")
    context = Whole(12, rope_tables(config, device), reference)
    generator = torch.Generator().manual_seed(0)
    x, wanted = (torch.randn(2, 12, 64, generator=generator) for _ in range(2))
    norm, head = source.tensor("model.norm.weight"), source.tensor("model.embed_tokens.weight")
    predictions, blocks = Predictions(Norm(norm, config.epsilon), head), []
    for index in range(2):
        work = WorkBlock.load(source, config, index, device=device, dtype=torch.float32)
        layer = Recipe.from_dict({"base": "rtn-int4", "group_size": 32}, "x").layer.integers(
            torch.float32
        )
        work.quantized = {name: rtn(weight, layer) for name, weight in work.weights.items()}
        blocks.append(TunedBlock(work, context, Tuning(rate=0.0)))
    seen = []
    for block in blocks:  # keep the gradients that the step would use up
        block.adam.step = lambda block=block: seen.append(
            [p.grad.clone() for p in block.adam.param_groups[0]["params"]]
        )
    with torch.no_grad():
        middle = blocks[0].forward(x)
        gradient = predictions.gradient(blocks[1].forward(middle), wanted)
        gradient = blocks[0].backward(x, blocks[1].backward(middle, gradient, 1.0), 1.0)
    start = x.clone().requires_grad_()
    last = blocks[1].forward(blocks[0].forward(start))
    found, target = (predictions.logits(part).log_softmax(-1) for part in (last, wanted))
    (target.exp() * (target - found)).sum(-1).mean().backward()
    torch.testing.assert_close(gradient, start.grad, rtol=1e-3, atol=1e-7)
    for block, gradients in zip(reversed(blocks), seen, strict=True):
        for parameter, found in zip(block.adam.param_groups[0]["params"], gradients, strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-7)


def test_graphs_that_are_held_give_what_running_every_block_again_gives(model):
    source = Checkpoint(model)
    config, device = ModelConfig.from_dict(source.config), torch.device("cpu")
    context = Whole(12, rope_tables(config, device), reference)
    generator = torch.Generator().manual_seed(0)
    x, wanted = (torch.randn(2, 12, 64, generator=generator) for _ in range(2))
    norm, head = source.tensor("model.norm.weight"), source.tensor("model.embed_tokens.weight")
    layer = Recipe.from_dict({"base": "rtn-int4", "bits": 2, "group_size": 32}, "x").layer
    made = []
    for keep in (False, True):
        works = []
        for index in range(2):
            work = WorkBlock.load(source, config, index, device=device, dtype=torch.float32)
            integers = layer.integers(torch.float32)
            work.quantized = {name: rtn(weight, integers) for name, weight in work.weights.items()}
            works.append(work)
        blocks = [TunedBlock(work, context, Tuning(steps=4, rounding=2.0)) for work in works]
        chain = Chain(works, Predictions(Norm(norm, config.epsilon), head), context)
        with torch.no_grad():
            for step in range(4):
                chain.step(blocks, x, wanted, 1 - step / 4, keep=keep)
        made.append([part.result() for block in blocks for part in block.parts.values()])
    for again, held in zip(*made, strict=True):
        assert torch.equal(again.codes, held.codes) and torch.equal(again.scales, held.scales)


def test_two_runs_of_tuning_are_the_same(model, tmp_path):
    for run in ("a", "b"):
        make(model, tmp_path, run, base="rtn-int4", tune_steps=3)
    first, second = (Checkpoint(tmp_path / run) for run in ("a", "b"))
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.names())


def test_a_block_of_codebooks_is_tuned_towards_the_output_of_the_originals(model, tmp_path):
    books = {"base": "vptq-2bit", "vector_length": 2, "centroids": 16, "refits": 0, "tune_steps": 0}
    summary = make(model, tmp_path, "out", **books, learn_steps=8, learn_batch=4, learn_rate=0.01)
    facts = json.loads((summary.output / "flyweight.json").read_text())["transforms"]
    assert len(facts) == 2 and all(
        0 < one["learned"]["after"] < one["learned"]["before"] for one in facts.values()
    )
