"""Rows of `vllm` are vLLM's own, those of `vllm-plugin` have our kernels in it."""

import importlib.machinery
import os
import sys
import types

import pytest
import torch

from flyweight.backends.base import EngineOptions, Limits, create
from flyweight.backends.vllm import RANDOM
from flyweight.plugins import vllm as plugin


@pytest.fixture
def engine(monkeypatch):
    """A vLLM that notes what was registered when it started."""
    seen = []

    class LLM:
        def __init__(self, **_):
            seen.append((os.environ.get(plugin.SETTING), list(calls)))
            self.llm_engine = types.SimpleNamespace(
                model_config=types.SimpleNamespace(dtype="torch.float16")
            )

        def apply_model(self, act):
            return [{"TheirKernel": 4}] if act is plugin.kernels_of else [None]

    calls = []
    fake = types.ModuleType("vllm")
    fake.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    fake.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", fake)
    loaders = types.ModuleType("vllm.model_executor.model_loader")
    loaders.register_model_loader = lambda name: lambda loader: loaded.setdefault(name, loader)
    dummy = types.ModuleType("vllm.model_executor.model_loader.dummy_loader")
    dummy.DummyModelLoader = type(
        "DummyModelLoader", (), {"load_weights": lambda self, model, config: None}
    )
    loaded = {}
    for module in (types.ModuleType("vllm.model_executor"), loaders, dummy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fake.loaders = loaded
    monkeypatch.setenv(plugin.SETTING, "mp")
    monkeypatch.setattr(plugin, "register", lambda: calls.append("register"))
    return seen


@pytest.mark.parametrize(
    ("name", "expected"), [("vllm", ("off", [])), ("vllm-plugin", ("mp", ["register"]))]
)
def test_whose_kernels_run(engine, name, expected):
    backend = create(name, "preset:tiny:int4", EngineOptions())
    backend.start(Limits(1, 64, None))
    assert engine == [expected]
    assert backend.linear_kernels == {"TheirKernel": 4}
    linear = torch.nn.Linear(4, 4)
    linear.register_parameter(
        "qweight", torch.nn.Parameter(torch.zeros(64, dtype=torch.int32), requires_grad=False)
    )
    sys.modules["vllm"].loaders[RANDOM]().load_weights(linear, None)
    assert linear.qweight.unique().numel() > 60, "codes as real weights have them"


def test_a_backend_before_does_not_turn_the_plug_in_off(engine):
    create("vllm", "preset:tiny:int4", EngineOptions())
    create("vllm-plugin", "preset:tiny:int4", EngineOptions()).start(Limits(1, 64, None))
    assert engine == [(None, ["register"])]
