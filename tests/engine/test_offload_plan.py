"""What --offload would mean, before a model is loaded."""

from types import SimpleNamespace

import pytest

from flyweight.engine.offload_plan import layer_bytes, needed, plan


def model(layers=10):
    groups = [
        SimpleNamespace(module="embedding", layers=(), memory=500),
        SimpleNamespace(module="lm_head", layers=(), memory=500),
        SimpleNamespace(module="mlp.down_proj", layers=tuple(range(layers)), memory=1000 * layers),
    ]
    return SimpleNamespace(groups=groups, layers=layers)


MACHINE = SimpleNamespace(read_bytes_per_token=10_500, copy_gb_s=1000.0)


def test_only_layers_move():
    assert layer_bytes(model()) == 1000


def test_the_bus_sets_the_speed_and_two_layers_keep_their_place():
    found = plan(model(), MACHINE, 4, bus_gb_s=50.0)
    assert (found.layers, found.of, found.host_bytes, found.freed_bytes) == (4, 10, 4000, 2000)
    assert found.limit_tok_s == pytest.approx(50e9 / 4000)


def test_no_more_layers_than_there_are():
    assert plan(model(), MACHINE, 99, bus_gb_s=50.0).layers == 10


def test_as_many_as_make_the_room_that_is_missing():
    assert needed(model(), MACHINE, 2500) == 5
    assert plan(model(), MACHINE, needed(model(), MACHINE, 2500), bus_gb_s=1.0).freed_bytes >= 2500
    assert needed(model(), MACHINE, 10**9) == 10
