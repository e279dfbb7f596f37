"""Layers of experts whose router is another engine's: on a CPU, cut for two ranks, and in vLLM's
method.
"""

import sys
from types import SimpleNamespace

import fake_vllm
import pytest
import torch
from expert_layers import choose, cut, error, expected, make

from flyweight.checkpoint import formats
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.errors import UnsupportedError
from flyweight.kernels import cpu
from flyweight.kernels.dispatch import without_native
from flyweight.plugins import experts
from flyweight.plugins import vllm as plugin

COUNT, CHOSEN, HIDDEN, WIDTH = 5, 2, 128, 128
PREFIX = "model.layers.0.mlp.experts"
FORMATS = {"vptq": "vptq", "mixed": "compressed-tensors", "2:4 int4": "compressed-tensors"}
LINEARS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Not in fewer bits that some processors multiply faster; bounds here are of float32."""
    choose = cpu.choose
    monkeypatch.setattr(cpu, "choose", lambda tensor, *, exact: choose(tensor, exact=True))
    with without_native():
        yield


def prepare(members):
    return experts.prepare(members, activation="silu", chosen=CHOSEN, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["int3", "w8a8", "2:4 int4", "vptq", "mixed"])
def test_two_ranks_add_up_to_the_whole(kind):
    members = make(kind, COUNT, HIDDEN, WIDTH)
    x = torch.randn(7, HIDDEN)
    shares, ids = choose(7, COUNT, CHOSEN)
    wanted = expected(members, x, shares, ids)
    bound = 2e-2 if kind == "w8a8" else 1e-5  # whose inputs are rounded by each rank for itself
    assert error(prepare(members)(x, shares, ids), wanted) < bound
    ranks = [prepare(cut(members, rank, 2))(x, shares, ids) for rank in range(2)]
    assert error(ranks[0] + ranks[1], wanted) < bound


def test_a_group_across_two_ranks_is_refused():
    members = make("int4", 1, HIDDEN, WIDTH)
    with pytest.raises(UnsupportedError, match="down: a group of 64 inputs crosses the border"):
        cut(members, 1, 4)


def test_every_way_of_running_them_one_by_one_is_the_same():
    """Counted, as on a CPU, and with all tokens, as in a captured step."""
    members = make("vptq", COUNT, HIDDEN, WIDTH)
    layer = prepare(members)
    x = torch.randn(9, HIDDEN)
    shares, ids = choose(9, COUNT, CHOSEN)
    ids[3], ids[5, 0] = -1, -1  # another rank's
    wanted = expected(members, x, shares, ids)
    assert isinstance(layer, experts.OneByOne)
    assert error(layer.counted(x, shares, ids), wanted) < 1e-5
    assert error(layer.everywhere(x, shares, ids), wanted) < 1e-5


def test_a_compiler_sees_shapes_alone():
    layer = prepare(make("int4", COUNT, HIDDEN, WIDTH))
    key = experts.hold(layer, torch.device("cpu"))
    x = torch.randn(3, HIDDEN)
    shares, ids = choose(3, COUNT, CHOSEN)
    assert torch.equal(experts.experts(x, key, shares, ids), layer(x, shares, ids))
    traced = experts.experts(*(one.to("meta") for one in (x, key, shares, ids)))
    assert traced.shape == x.shape and traced.dtype == x.dtype


# -- in vLLM's method --------------------------------------------------------------------------


def write(folder, kind):
    """A folder with the experts of one layer."""
    members = make(kind, COUNT, HIDDEN, WIDTH)
    form = formats.named(FORMATS[kind])
    weights = {}
    with CheckpointWriter(folder) as writer:
        for number, expert in enumerate(members):
            for name, weight in zip(LINEARS, expert, strict=True):
                weights[f"{PREFIX}.{number}.{name}"] = weight
                for tensor, value in form.write(f"{PREFIX}.{number}.{name}", weight).items():
                    writer.add(tensor, value)
        sizes = dict(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=COUNT)
        settings = form.config(weights, ignore=[])
        writer.finish(dict(model_type="qwen3_moe", quantization_config=settings, **sizes))
    return members, settings


@pytest.fixture(params=FORMATS)
def model(request, tmp_path, monkeypatch):
    members, settings = write(tmp_path / "model", request.param)
    monkeypatch.setenv(plugin.SETTING, "formats")
    fake_vllm.install(monkeypatch)
    assert plugin.register() == ["formats"]
    registered = sys.modules["vllm.model_executor.layers.quantization"].registered
    config = registered["flyweight"].from_config(settings)
    config.maybe_update_config(str(tmp_path / "model"))
    return SimpleNamespace(config=config, members=members)


def load(model, layer, width):
    """What vLLM does to the experts of a layer."""
    method = model.config.get_quant_method(layer, PREFIX)
    method.create_weights(layer, COUNT, HIDDEN, width, torch.float32, global_num_experts=COUNT)
    for name in method.checkpoint.names():
        _, linear, suffix = name.removeprefix(f"{PREFIX}.").split(".", 2)
        parameter = getattr(layer, ("w2_" if linear == "down_proj" else "w13_") + suffix)
        assert not parameter.weight_loader(param=parameter, loaded_weight=torch.ones(3))
    method.process_weights_after_loading(layer)
    return method


def apply(model, layer, x, shares, ids, width=WIDTH, shared=None):
    return load(model, layer, width).apply(layer, x, shares, ids, shared, x)


def test_vllms_method_runs_the_experts_of_a_folder_whole_and_cut(model):
    x = torch.randn(6, HIDDEN)
    shares, ids = choose(6, COUNT, CHOSEN)
    wanted = expected(model.members, x, shares, ids)
    whole = apply(model, fake_vllm.RoutedExperts(COUNT, CHOSEN), x, shares, ids)
    assert error(whole, wanted) < 1e-5
    ranks = [fake_vllm.RoutedExperts(COUNT, CHOSEN, rank, 2) for rank in range(2)]
    added = sum(apply(model, layer, x, shares, ids, WIDTH // 2) for layer in ranks)
    assert error(added, wanted) < 1e-5
    # with expert parallelism each rank has some of them whole
    places = torch.tensor([[0, -1, 1, -1, 2], [-1, 0, -1, 1, -1]])
    ranks = [fake_vllm.RoutedExperts(COUNT, CHOSEN, places=one) for one in places]
    added = sum(apply(model, layer, x, shares, ids) for layer in ranks)
    assert error(added, wanted) < 1e-5


def test_the_shared_expert_runs_behind_the_others(model):
    layer, asked = fake_vllm.RoutedExperts(COUNT, CHOSEN), []
    x = torch.randn(2, HIDDEN)
    shares, ids = choose(2, COUNT, CHOSEN)
    apply(model, layer, x, shares, ids, shared=lambda *given: asked.append(given))
    assert asked == [(x, fake_vllm.SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)]


def test_experts_that_our_kernels_do_not_know_are_refused_with_the_reason(model):
    layer = fake_vllm.RoutedExperts(COUNT, CHOSEN, activation="relu2")
    with pytest.raises(UnsupportedError, match=r"mlp.experts: the experts' activation relu2"):
        model.config.get_quant_method(layer, PREFIX)
    layer = fake_vllm.RoutedExperts(COUNT, CHOSEN, ranks=3)
    with pytest.raises(UnsupportedError, match=r"outputs: 128 cannot be divided by 3 ranks"):
        load(model, layer, WIDTH // 3)
