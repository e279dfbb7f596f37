"""The op that engines compile: right products, and one graph for all layers of a shape."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from vllm_parameters import assert_near

from flyweight.plugins import op
from flyweight.tensors import Int8Channel, IntGroup, Sparse24, VectorQuant


def test_a_key_finds_its_own_linear():
    weights = [IntGroup.random((48, 64), seed, group_size=64) for seed in range(3)]
    keys = [op.hold(op.prepare([w], dtype=torch.float32), w.device) for w in weights]
    x = torch.randn(2, 5, 64)
    for weight, key in zip(weights, keys, strict=True):
        y = op.linear(x, key, 48)
        assert y.shape == (2, 5, 48)
        assert_near(y.double(), weight.matmul_reference(x))
    assert sum(op.kernels_held().values()) >= 3


def test_a_linear_goes_with_its_layer():
    layer = torch.nn.Module()
    weight = IntGroup.random((48, 64), group_size=64)
    layer.key = op.hold(op.prepare([weight], dtype=torch.float32), weight.device, owner=layer)
    place = layer.key.data_ptr()
    assert place in op._linears
    del layer
    gc.collect()
    assert place not in op._linears


def test_parts_of_different_kinds_are_one_linear():
    parts = [
        IntGroup.random((32, 64), group_size=64),
        VectorQuant.random((16, 64), length=4, main=16, residual=None),
        Int8Channel.random((16, 64)),
    ]
    key = op.hold(op.prepare(parts, dtype=torch.float32), torch.device("cpu"))
    x = torch.randn(3, 64)
    expected = torch.cat([part.matmul_reference(x) for part in parts], -1)
    assert_near(op.linear(x, key, 64).double(), expected)


def test_a_16_bit_default_of_the_engine_changes_nothing():
    weight = Sparse24.random((32, 64), inner=IntGroup, group_size=64, dtype=torch.float32)
    x = torch.randn(3, 64)
    torch.set_default_dtype(torch.float16)
    try:
        held = op.prepare([weight], dtype=torch.float32)
        assert torch.get_default_dtype() == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    expected = weight.matmul_reference(x)
    assert_near(held(x).double(), expected)


def test_layers_of_one_shape_are_one_graph():
    """The compiler sees no number of a layer: what it has made for one layer serves the next."""
    graphs = []
    for seed in range(2):
        weight = IntGroup.random((32, 64), seed, group_size=64)
        key = op.hold(op.prepare([weight], dtype=torch.float32), weight.device)
        x = torch.randn(3, 64)
        traced = make_fx(lambda x, key: op.linear(x, key, 32) * 2, tracing_mode="fake")(x, key)
        assert_near(traced(x, key), op.linear(x, key, 32) * 2)
        graphs.append(traced.code)
    assert graphs[0] == graphs[1]
    assert "flyweight.linear" in graphs[0]


def test_the_fake_has_shape_and_type_only():
    with FakeTensorMode():
        x = torch.empty(7, 64, dtype=torch.bfloat16)
        fake = op.linear(x, torch.zeros(1, dtype=torch.uint8), 48)
    assert fake.shape == (7, 48)
    assert fake.dtype == torch.bfloat16
