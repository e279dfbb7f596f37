"""Every name of SGLang 0.5.23 that the plug-in touches exists there, with those arguments.

`sglang-0.5.23.json` was recorded from SGLang's sources by sglang_seams.py. Where the sources are
(SGLang installed, or SGLANG_SITE naming the folder that holds them), the record is checked against
them, and the hooks run in SGLang's own registry.
"""

import ast
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import pytest
import sglang_seams
import torch

from flyweight.plugins import sglang as plugin
from flyweight.plugins.sglang import linears

FOLDER = Path(__file__).parent
(VERSION,) = plugin.VERSIONS
RECORD = json.loads((FOLDER / f"sglang-{VERSION}.json").read_text(encoding="utf-8"))
CONFIGS = {
    "awq": ("awq.awq.AWQConfig", "awq.awq.AWQMarlinConfig"),
    "gptq": ("gptq.gptq.GPTQMarlinConfig",),
}
LINEAR = "sglang.srt.layers.linear.LinearBase"
# of torch, and ours
BESIDES = {"data", "device", "params_dtype"}


def functions():
    tree = ast.parse(inspect.getsource(linears))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def attributes(kind, *owners):
    """What a reader asks of these names, attributes of attributes left out."""
    found = set()
    for node in ast.walk(functions()[f"read_{kind}"]):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in owners:
                found.add(name)
    return found


@pytest.mark.parametrize("target", plugin.TARGETS)
def test_hooks_take_what_sglang_calls_its_methods_with(target):
    methods = RECORD[target]["methods"]
    prepare = linears.preparing(linears.read_awq)
    asked = {"process_weights_after_loading": prepare, "apply_weights": linears.apply}
    for method, hook in asked.items():
        given = ["original", *methods[method]]
        own = list(inspect.signature(hook).parameters)
        inspect.signature(hook).bind(*given)
        assert own[2 : len(given)] == given[2:]  # behind the original and self, also by name


@pytest.mark.parametrize(("target", "kind"), plugin.TARGETS.items())
def test_readers_find_what_they_ask_for(target, kind):
    known = RECORD[target]
    assert attributes(kind, "scheme") <= set(known["attributes"])
    asked = attributes(kind, "layer") - BESIDES
    assert asked <= set(known["parameters"])
    assert "params_dtype" in RECORD[LINEAR]["attributes"]
    for config in CONFIGS.get(kind, ()):
        wanted = attributes(kind, "config") | ({"group_size"} if kind == "awq" else set())
        assert wanted <= set(RECORD[f"{sglang_seams.QUANTIZATION}.{config}"]["attributes"])


def test_the_registry_takes_our_hooks():
    registry = RECORD["sglang.srt.plugins.hook_registry.HookRegistry"]["methods"]
    assert registry["register"] == ["cls", "target", "hook", "hook_type"]
    assert "AROUND" in RECORD["sglang.srt.plugins.hook_registry.HookType"]["members"]


# -- where the sources are ---------------------------------------------------------------------


@pytest.fixture
def site():
    named = os.environ.get("SGLANG_SITE")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang's sources are not here (SGLANG_SITE)")
    return Path(spec.origin).parents[1]


def test_the_sources_are_as_recorded(site):
    assert sglang_seams.record(site) == RECORD


class Scheme:
    """Stands for one of SGLang's, under its own registry."""

    def process_weights_after_loading(self, layer):
        layer.theirs = True

    def apply_weights(self, layer, x, bias):
        return "theirs"


def test_sglangs_own_registry_runs_the_hooks(site, monkeypatch):
    path = site / "sglang/srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("sglang_hook_registry", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "Hooked", type("Hooked", (Scheme,), {}), raising=False)
    target = f"{__name__}.Hooked"

    def refuse(scheme, layer):
        raise ValueError("not this one")

    around = module.HookType.AROUND
    prepare = linears.preparing(refuse)
    module.HookRegistry.register(f"{target}.process_weights_after_loading", prepare, around)
    module.HookRegistry.register(f"{target}.apply_weights", linears.apply, around)
    module.HookRegistry.apply_hooks()
    layer = torch.nn.Module()
    scheme = here.Hooked()
    scheme.process_weights_after_loading(layer)
    assert layer.theirs and scheme.apply_weights(layer, torch.ones(1), bias=None) == "theirs"
