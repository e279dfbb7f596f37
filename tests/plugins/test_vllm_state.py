"""What `flyweight doctor` says of the plug-ins."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from flyweight.plugins import sglang
from flyweight.plugins import vllm as plugin
from flyweight.plugins.sglang.state import GROUP as SGLANG_GROUP
from flyweight.plugins.sglang.state import state as sglang_state
from flyweight.plugins.vllm.state import ALLOWED, GROUP, state


@pytest.fixture
def installed(monkeypatch):
    """vLLM of a version, and whether our entry point is found."""

    def install(version, *, point=True, engine="vllm"):
        def found(package):
            if package == engine and version:
                return version
            raise importlib.metadata.PackageNotFoundError(package)

        ours = [SimpleNamespace(name="flyweight")] if point else []
        points = {GROUP: ours, SGLANG_GROUP: ours}
        monkeypatch.setattr(importlib.metadata, "version", found)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points[group])

    for variable in (plugin.SETTING, ALLOWED, sglang.SETTING):
        monkeypatch.delenv(variable, raising=False)
    return install


def test_it_is_active(installed):
    installed("0.33.0")
    assert state().active
    assert "0.33.0" in state().text and "mp, int8" in state().text


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_gpu_is_told(installed, monkeypatch, there):
    installed("0.33.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert ("no GPU is visible" in state().text) is not there


@pytest.mark.parametrize(
    ("version", "point", "setting", "words"),
    [
        (None, True, {}, "not installed"),
        ("0.31.0", True, {}, "0.31.0"),
        ("0.33.0", False, {}, "pip install ."),
        ("0.33.0", True, {plugin.SETTING: "off"}, "turned off"),
        ("0.33.0", True, {plugin.SETTING: "marlin"}, "marlin"),
        ("0.33.0", True, {ALLOWED: "other, one"}, "leaves it out"),
    ],
)
def test_it_is_not_and_why(installed, monkeypatch, version, point, setting, words):
    installed(version, point=point)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert not state().active
    assert words in state().text


@pytest.mark.parametrize(
    ("version", "point", "setting", "words"),
    [
        ("0.5.23", True, "on", "active in SGLang 0.5.23"),
        (None, True, "on", "not installed"),
        ("0.5.22", True, "on", "0.5.22"),
        ("0.5.23", False, "on", "pip install ."),
        ("0.5.23", True, "off", "turned off"),
        ("0.5.23", True, "marlin", "marlin"),
    ],
)
def test_the_one_of_sglang(installed, monkeypatch, version, point, setting, words):
    installed(version, point=point, engine="sglang")
    monkeypatch.setenv(sglang.SETTING, setting)
    assert sglang_state().active is words.startswith("active")
    assert words in sglang_state().text
