"""The command lines that start other engines on the same folder, and what a preset is to them."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from flyweight.backends import servers, sglang, vllm
from flyweight.backends.base import EngineOptions, Limits
from flyweight.errors import ResultError, UnsupportedError

LIMITS = Limits(8, 1024, 8192)


def test_vllm_is_started_with_the_arguments_of_the_benchmark(tmp_path):
    options = EngineOptions(
        quantization="awq_marlin", tensor_parallel=4, extra={"gpu_memory_utilization": 0.85}
    )
    command = vllm.serve_command(str(tmp_path), options, limits=LIMITS, port=99)
    text = " ".join(command)
    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tmp_path),
    ]
    for part in (
        "--tensor-parallel-size 4",
        "--quantization awq_marlin",
        "--gpu-memory-utilization 0.85",
        "--port 99",
        "--no-enable-prefix-caching",
        "--max-model-len 1024",
        "--max-num-seqs 8",
        "--max-num-batched-tokens 8192",
    ):
        assert part in text
    many = vllm.arguments(options, Limits(64, 1024, None))
    assert many["max_num_batched_tokens"] == 16640, (
        "more than all that can be asked makes it read beyond its tables"
    )
    assert "prefix" not in " ".join(vllm.serve_command(str(tmp_path), options)), (
        "who serves users keeps the cache"
    )


def test_codes_of_dummy_weights_become_random_and_nothing_else_changes():
    model = torch.nn.Module()
    for name, dtype in (
        ("qweight", torch.int32),
        ("weight", torch.int8),
        ("scales", torch.float16),
        ("g_idx", torch.int32),
    ):
        model.register_parameter(
            name, torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype).t(), requires_grad=False)
        )
    vllm.make_codes_random(model)
    assert (
        len(model.qweight.unique()) > 4000
        and model.qweight.min() < -(2**30)
        and model.qweight.max() > 2**30
    )
    assert len(model.weight.unique()) > 200 and not model.scales.any() and not model.g_idx.any()


def test_rows_of_sglang_are_without_our_kernels(monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_SGLANG", "on")
    monkeypatch.setattr(servers, "need", lambda module: None)
    sglang.Sglang("x", EngineOptions())
    assert os.environ["FLYWEIGHT_SGLANG"] == "off"


def test_sglang_is_started_on_the_same_folder(tmp_path):
    text = " ".join(
        sglang.serve_command(
            str(tmp_path), EngineOptions(tensor_parallel=2), limits=LIMITS, port=98
        )
    )
    assert (
        f"sglang.launch_server --model-path {tmp_path} --port 98 --tp-size 2" in text
        and "--disable-radix-cache" in text
    )


def test_a_preset_is_a_folder_with_a_config_for_the_dummy_loader():
    folder, more = vllm.model_folder("preset:qwen3-8b:w8a8")
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["hidden_size"] == 4096 and more["load_format"] == "dummy"
    assert (
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["strategy"]
        == "token"
    )
    with pytest.raises(UnsupportedError, match="no dummy weights of scheme 'vptq'"):
        vllm.model_folder("preset:qwen3-8b:vptq")


def test_a_server_that_dies_says_its_last_words(monkeypatch):
    class Broken(servers.Server):
        name = "broken"

        def command(self, folder, limits, port):
            return [sys.executable, "-c", "import sys; sys.exit('no such GPU')"]

    with pytest.raises(ResultError, match="broken ended before it answered: no such GPU"):
        Broken("x", EngineOptions()).start(LIMITS)


def test_flags_are_written_as_command_lines_want_them():
    assert servers.flags({"a": 1, "b": True, "c": None, "d": False, "e": "x"}) == [
        "--a",
        "1",
        "--b",
        "--e",
        "x",
    ]
