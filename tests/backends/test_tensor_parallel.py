"""The documented commands for several GPUs start vLLM with the right arguments on the right
folder."""

import importlib.machinery
import json
import shlex
import sys
import types
from pathlib import Path

import pytest

from flyweight.backends.base import EngineOptions, Limits
from flyweight.backends.vllm import Vllm
from flyweight.bench.cases import Case
from flyweight.bench.facts import ModelFacts, Variant
from flyweight.cli import app
from flyweight.commands import bench_sweep

DOCUMENT = Path(__file__).parents[2] / "docs" / "measure.md"
COMMANDS = [
    line
    for line in DOCUMENT.read_text().splitlines()
    if line.startswith("flyweight") and "--tensor-parallel" in line
]

LAYERS = {"qwen2-72b": 80, "qwen2-57b-a14b": 28, "qwen1.5-32b": 64}


@pytest.fixture
def started(monkeypatch):
    """What vLLM's LLM is called with."""
    calls = []

    class LLM:
        def __init__(self, **arguments):
            calls.append(arguments)
            self.llm_engine = types.SimpleNamespace(
                model_config=types.SimpleNamespace(dtype="torch.bfloat16")
            )
            self.gpus = arguments["tensor_parallel_size"]

        def apply_model(self, function):
            return [{function.__name__: 1}] * self.gpus

    fake = types.ModuleType("vllm")
    fake.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    fake.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    return calls


def parse(command, monkeypatch):
    found = {}
    monkeypatch.setattr(
        bench_sweep,
        "run",
        lambda plan, models, backends, out, **more: found.update(
            plan=plan, models=models, backends=backends, **more
        ),
    )
    app(args=shlex.split(command)[1:], prog_name="flyweight", standalone_mode=False)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_starts_vllm_as_it_says(command, started, monkeypatch):
    found, gpus = (
        parse(command, monkeypatch),
        int(command.split("--tensor-parallel ")[1].split()[0]),
    )
    assert found["backends"] == ["vllm"]
    limits = Limits.of((work.batch, work.context) for work in found["plan"].workloads)
    for model in found["models"]:
        variant = Variant.parse(model)
        engine = Vllm(variant.model, found["options"])
        engine.start(limits)
        assert engine.linear_kernels == {"kernels_of": 1}  # of one GPU: all have the same
        given = started.pop()
        config = json.loads((Path(given["model"]) / "config.json").read_text())
        assert (
            given["tensor_parallel_size"] == gpus
            and not given["enable_prefix_caching"]
            and given["load_format"] == "dummy"
        )
        assert config["num_hidden_layers"] == LAYERS[variant.model.split(":")[1]]
        assert ("quantization_config" in config) == (variant.name != "BF16")
        for option in command.split("--option ")[1:]:
            name, value = option.split()[0].split("=")
            assert given[name] == json.loads(value)


def test_there_are_commands_for_every_number_of_gpus_of_the_report():
    assert {command.split("--tensor-parallel ")[1].split()[0] for command in COMMANDS} == {"2", "4"}
    assert any("throughput" in command for command in COMMANDS) and any(
        "qwen2-57b-a14b" in command for command in COMMANDS
    )


def test_rows_of_two_and_of_four_gpus_are_different_rows():
    facts = ModelFacts("qwen2-72b", "BF16", "random:0")
    engine = types.SimpleNamespace(options=EngineOptions())
    assert Case(facts, engine, "vllm", gpus=2).key() != Case(facts, engine, "vllm", gpus=4).key()
