"""What vLLM is told at its start, and what a layer of it becomes; a small tree stands for it."""

import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import pytest
import torch
from fake_vllm import LayerConfig, PlatformEnum
from vllm_parameters import assert_near, inputs_first

from flyweight.plugins import vllm as plugin
from flyweight.plugins.layer import folded_bias
from flyweight.tensors import IntGroup

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv(plugin.SETTING, raising=False)


def test_the_entry_point_names_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["flyweight"]
    assert value == f"{plugin.__name__}:{plugin.register.__name__}"
    assert "vllm" in project["optional-dependencies"]


def test_the_plug_in_imports_nothing_before_it_is_called():
    code = (
        "import sys, flyweight.plugins.vllm;"
        "print([m for m in ('torch', 'vllm', 'typer', 'rich') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_ours_come_first_and_once(monkeypatch):
    linear = fake_vllm.install(monkeypatch)
    assert plugin.register() == ["mp", "int8", "formats"]
    assert not linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA], "only where it is asked for"
    monkeypatch.setenv(plugin.SETTING, "fp8,int8,mp")
    for _ in range(3):
        assert plugin.register() == ["fp8", "int8", "mp"]
    for table, name in plugin.TABLES.values():
        listed = [kernel.__name__ for kernel in getattr(linear, table)[PlatformEnum.CUDA]]
        assert listed[0] == name and listed.count(name) == 1
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA][-1] is fake_vllm.TheirKernel


def test_they_can_be_withdrawn(monkeypatch):
    linear = fake_vllm.install(monkeypatch)
    plugin.register()
    plugin.withdraw()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] == [fake_vllm.TheirKernel]
    assert linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA] == []


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.330.0", "unknown"])
def test_another_version_gets_one_line_and_nothing_else(monkeypatch, caplog, version):
    linear = fake_vllm.install(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        assert plugin.register() == []
    (record,) = caplog.records
    assert version in record.getMessage() and "0.33" in record.getMessage()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] == [fake_vllm.TheirKernel]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev3"])
def test_versions_that_were_read(version):
    assert plugin.unsupported_version(version) is None


def test_parts_can_be_chosen(monkeypatch, caplog):
    linear = fake_vllm.install(monkeypatch)
    monkeypatch.setenv(plugin.SETTING, "off")
    assert plugin.register() == []
    monkeypatch.setenv(plugin.SETTING, "int8")
    assert plugin.register() == ["int8"]
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] == [fake_vllm.TheirKernel]
    monkeypatch.setenv(plugin.SETTING, "int9")
    with caplog.at_level(logging.WARNING):
        assert plugin.register() == []
    assert "int9" in caplog.text and "fp8" in caplog.text


def kernel_of(monkeypatch):
    linear = fake_vllm.install(monkeypatch)
    plugin.register()
    return linear._POSSIBLE_KERNELS[PlatformEnum.CPU][0]


def loaded_layer(weight: IntGroup, bias=None):
    """A layer of vLLM with the parameters that its loader has filled."""
    layer = torch.nn.Module()
    names = ("qweight", "scales", "qzeros")
    for name, one in zip(names, inputs_first(weight), strict=True):
        if one is None:
            continue
        parameter = torch.nn.Parameter(one.data, requires_grad=False)
        for key, value in vars(one).items():
            if key != "data":
                setattr(parameter, key, value)
        layer.register_parameter(name, parameter)
    layer.bias = None if bias is None else torch.nn.Parameter(bias)
    return layer


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_is_taken_and_its_originals_let_go(monkeypatch, zero_points, with_bias):
    weight = IntGroup.random((48, 128), symmetric=not zero_points, group_size=64)
    kind = fake_vllm.UINT4 if zero_points else fake_vllm.UINT4B8
    config = LayerConfig((128, 48), kind, zero_points=zero_points)
    ours = kernel_of(monkeypatch)
    assert ours.can_implement(config) == (True, None)
    bias = torch.randn(48) if with_bias else None
    layer = loaded_layer(weight, bias)
    kernel = ours(config, "qweight", "scales", "qzeros")
    kernel.process_weights_after_loading(layer)
    assert layer.qweight.numel() == layer.scales.numel() == 0
    x = torch.randn(3, 128)
    expected = weight.matmul_reference(x) + (0 if bias is None else bias)
    found = kernel.apply_weights(layer, x, layer.bias)
    assert_near(found.double(), expected)


def test_a_layer_that_cannot_be_laid_out_goes_to_the_next_kernel_unharmed(monkeypatch, caplog):
    ours = kernel_of(monkeypatch)
    weight = IntGroup.random((48, 128), symmetric=True, group_size=64)
    layer = loaded_layer(weight)
    kernel = ours(LayerConfig((128, 48)), "qweight", "scales", "qzeros")
    monkeypatch.setattr(kernel, "take", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING):
        kernel.process_weights_after_loading(layer)
    assert layer.theirs and torch.equal(layer.qweight.data, weight.codes.t())
    assert kernel.apply_weights(layer, None) == "theirs"
    assert "TheirKernel" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LayerConfig((96, 48), group_size=64), "crosses the border of two ranks"),
        (LayerConfig((128, 48), fake_vllm.ScalarType(3, 4)), "type"),
        (LayerConfig((128, 48), fake_vllm.ScalarType(4, signed=True)), "type"),
        (LayerConfig((128, 48), fake_vllm.UINT4), "type"),  # without zero points: around nothing
        (LayerConfig((128, 48), act_type=torch.int8), "activations"),
        (LayerConfig((128, 48), act_type=torch.float8_e4m3fn), "activations"),
        (LayerConfig((128, 48), out_type=torch.float16), "results"),
    ],
)
def test_what_ours_cannot_do_is_left_with_the_reason(monkeypatch, caplog, config, reason):
    with caplog.at_level(logging.INFO):
        done, why = kernel_of(monkeypatch).can_implement(config)
    assert not done and reason in why
    assert reason in caplog.text and "leaves" in caplog.text


def test_linears_are_counted_by_who_multiplies(monkeypatch):
    ours = kernel_of(monkeypatch)
    model = torch.nn.Module()
    given = ours(LayerConfig((128, 48)), "qweight", "scales")
    passed_on = ours(LayerConfig((128, 48)), "qweight", "scales")
    passed_on.other = fake_vllm.TheirKernel(LayerConfig((128, 48)), "qweight", "scales")
    for i, kernel in enumerate([given, given, passed_on]):
        layer = torch.nn.Module()
        layer.input_size = 128
        layer.skip_bias_add = False
        layer.quant_method = SimpleNamespace(kernel=kernel)
        model.add_module(str(i), layer)
    model.embedding = torch.nn.Module()
    model.embedding.quant_method = object()
    assert plugin.kernels_of(model) == {"FlyweightLinearKernel": 2, "TheirKernel": 1}


def test_a_bias_that_one_rank_adds_is_not_folded():
    bias = torch.nn.Parameter(torch.ones(4))
    columns = SimpleNamespace(bias=bias, skip_bias_add=False)
    assert folded_bias(columns) is not None
    assert folded_bias(SimpleNamespace(bias=bias, skip_bias_add=True)) is None
    assert folded_bias(SimpleNamespace(bias=bias, input_is_parallel=True)) is None
    assert folded_bias(SimpleNamespace(bias=None)) is None
