"""What SGLang is told at its start, and what a layer of it becomes; a small tree stands for it."""

import logging
import subprocess
import sys
import tomllib
from collections import defaultdict
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from vllm_parameters import assert_near, inputs_first, outputs_first

from flyweight.checkpoint.formats.awq import pack_columns
from flyweight.plugins import sglang as plugin
from flyweight.plugins.sglang import linears
from flyweight.tensors import Int8Channel, IntGroup

ROOT = Path(__file__).parents[2]
SHAPE = (48, 128)


class HookType(Enum):
    AROUND = auto()


class Scheme:
    """Of SGLang: keeps what it was asked, and multiplies by nothing."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def process_weights_after_loading(self, layer):
        layer.theirs = True

    def apply_weights(self, layer, x, bias=None):
        return "theirs"


def install(monkeypatch, version="0.5.23"):
    """A registry as SGLang's, which tells its hooks."""

    class HookRegistry:
        hooks: ClassVar = defaultdict(list)

        @classmethod
        def register(cls, target, hook, hook_type):
            assert hook_type is HookType.AROUND
            cls.hooks[target].append(hook)

    names = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang"].__version__ = version
    sys.modules[names[-1]].HookRegistry = HookRegistry
    sys.modules[names[-1]].HookType = HookType
    return HookRegistry.hooks


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    monkeypatch.delenv(plugin.SETTING, raising=False)
    linears.tell_once.cache_clear()


def test_the_entry_point_names_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["sglang.srt.plugins"]["flyweight"]
    assert value == f"{plugin.__name__}:{plugin.register.__name__}"


def test_the_plug_in_imports_nothing_before_it_is_called():
    code = "import sys, flyweight.plugins.sglang; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr


def test_every_class_has_both_hooks_once(monkeypatch):
    hooks = install(monkeypatch)
    for _ in range(3):
        assert plugin.register() == list(plugin.TARGETS)
    assert len(hooks) == 2 * len(plugin.TARGETS)
    assert all(len(found) == 1 for found in hooks.values())


@pytest.mark.parametrize("version", ["0.5.22", "0.5.230", "0.6.0", "unknown"])
def test_another_version_gets_one_line_and_nothing_else(monkeypatch, caplog, version):
    hooks = install(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        assert plugin.register() == []
    (record,) = caplog.records
    assert version in record.getMessage() and not hooks


def test_it_can_be_turned_off_and_a_wrong_word_is_told(monkeypatch, caplog):
    hooks = install(monkeypatch)
    monkeypatch.setenv(plugin.SETTING, "off")
    assert plugin.register() == []
    monkeypatch.setenv(plugin.SETTING, "none")
    with caplog.at_level(logging.WARNING):
        assert plugin.register() == []
    assert "none" in caplog.text and not hooks


def loaded(**parameters):
    """A layer with parameters as SGLang's loader has filled them."""
    layer = torch.nn.Module()
    for name, one in parameters.items():
        parameter = torch.nn.Parameter(one.data, requires_grad=False)
        for key, value in vars(one).items():
            if key != "data":
                setattr(parameter, key, value)
        layer.register_parameter(name, parameter)
    layer.params_dtype = torch.float32
    return layer


def awq(weight):
    data = {
        "qweight": pack_columns(weight.values().T),
        "qzeros": pack_columns(weight.zeros.T.int()),
        "scales": weight.scales.T.contiguous(),
    }
    layer = loaded(**{name: SimpleNamespace(data=one) for name, one in data.items()})
    return Scheme(quant_config=SimpleNamespace(group_size=64)), layer


def gptq(weight, **config):
    codes, scales, _ = inputs_first(weight)
    settings = dict(weight_bits=4, group_size=64, desc_act=False) | config
    return Scheme(quant_config=SimpleNamespace(**settings)), loaded(qweight=codes, scales=scales)


def wna16(weight, **fields):
    names = ("weight_packed", "weight_scale", "weight_zero_point")
    found = dict(zip(names, outputs_first(weight), strict=True))
    layer = loaded(**{name: one for name, one in found.items() if one is not None})
    symmetric = weight.zeros is None
    settings = dict(has_g_idx=False, symmetric=symmetric, pack_factor=8, group_size=64)
    return Scheme(**settings | fields), layer


CASES = {
    "awq": (awq, False),
    "gptq": (gptq, True),
    "wna16": (wna16, True),
    "wna16 with zero points": (wna16, False),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_taken_and_its_originals_let_go(case, with_bias):
    make, symmetric = CASES[case]
    weight = IntGroup.random(SHAPE, symmetric=symmetric, group_size=64, dtype=torch.float32)
    scheme, layer = make(weight)
    kept = sum(one.numel() for one in layer.parameters())
    bias = torch.randn(SHAPE[0]) if with_bias else None
    layer.bias = None if bias is None else torch.nn.Parameter(bias)
    prepare = linears.preparing(linears.READERS[case.split()[0]])
    prepare(Scheme.process_weights_after_loading, scheme, layer)
    assert not hasattr(layer, "theirs") and kept > 800
    assert sum(one.numel() for one in layer.parameters()) < 100, "the originals' memory is free"
    x = torch.randn(3, SHAPE[1])
    found = linears.apply(Scheme.apply_weights, scheme, layer, x, layer.bias)
    expected = weight.matmul_reference(x) + (0 if bias is None else bias)
    assert_near(found.double(), expected)


def refused():
    integers = IntGroup.random(SHAPE, symmetric=True, group_size=64, dtype=torch.float32)
    channels = Int8Channel.random(SHAPE)
    parts = dict(weight=channels.codes, weight_scale=channels.scales)
    layer = loaded(**{name: SimpleNamespace(data=one) for name, one in parts.items()})
    by_tensor = Scheme(strategy="tensor", input_symmetric=True)
    by_channel = Scheme(strategy="channel", input_symmetric=True)
    return {
        "gptq": (*gptq(integers, desc_act=True), "act-order"),
        "wna16": (*wna16(integers, has_g_idx=True), "act-order"),
        "w8a8": (by_channel, layer, "a GPU is needed"),
        "w8a8 ": (by_tensor, layer, "one scale for all outputs"),
    }


@pytest.mark.parametrize("case", ["gptq", "wna16", "w8a8", "w8a8 "])
def test_what_is_not_taken_goes_to_sglang_unharmed_with_one_line(case, caplog):
    scheme, layer, reason = refused()[case]
    before = {name: one.clone() for name, one in layer.named_parameters()}
    prepare = linears.preparing(linears.READERS[case.strip()])
    with caplog.at_level(logging.INFO, logger="sglang.flyweight"):
        for _ in range(2):
            prepare(Scheme.process_weights_after_loading, scheme, layer)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert layer.theirs
    assert all(one.equal(before[name]) for name, one in layer.named_parameters())
    assert linears.apply(Scheme.apply_weights, scheme, layer, torch.ones(1, SHAPE[1])) == "theirs"
