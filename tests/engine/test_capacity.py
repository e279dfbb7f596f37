"""What `flyweight info` says about the machine: room for the cache and the speed limit."""

import dataclasses

import pytest
import torch

from flyweight.checkpoint.summary import Group, Summary
from flyweight.engine import capacity as module
from flyweight.engine.capacity import capacity, read_per_token
from flyweight.models.config import ModelConfig
from flyweight.models.presets import preset_config


def group(name, memory):
    return Group(name, "bfloat16", 1, (0,), (), memory // 2, memory, memory=memory)


def summary(*groups, tied=True):
    return Summary(
        folder="model",
        architecture="",
        layers=30,
        hidden_size=576,
        heads=9,
        kv_heads=3,
        vocabulary=49152,
        context_length=8192,
        tied_embeddings=tied,
        dtype="bfloat16",
        quantization=None,
        parameters=1,
        disk=1,
        groups=tuple(groups),
    )


LAYERS = (group("embedding", 1000), group("mlp.down_proj", 4000), group("norms, biases", 10))


def test_a_token_reads_every_weight_and_the_embedding_only_as_a_head():
    config = ModelConfig.from_dict(preset_config("smollm2-135m"))
    assert read_per_token(summary(*LAYERS), config) == 5010
    assert read_per_token(summary(*LAYERS, tied=False), config) == 4010


def test_a_token_reads_only_the_experts_it_is_sent_to():
    config = ModelConfig.from_dict(preset_config("qwen2-57b-a14b"))  # 8 of 64
    layers = (group("mlp.experts.*.up_proj", 64_000), group("mlp.shared_expert.up_proj", 500))
    assert read_per_token(summary(*layers), config) == 8500


@pytest.mark.parametrize("memory", [10**9, 10**12])
def test_cache_and_speed_follow_from_memory_and_bandwidth(monkeypatch, memory):
    monkeypatch.setattr(module, "available_memory", lambda: memory)
    config = ModelConfig.from_dict(preset_config("smollm2-135m"))
    found = capacity(
        summary(*LAYERS), config, device=torch.device("cpu"), dtype=torch.float32, bandwidth=10.02
    )
    assert (
        found.kv_bytes == (memory - 5010) // 4 and found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    )
    assert found.kv_tokens == found.kv_bytes // found.kv_bytes_per_token
    assert found.limit_tok_s == pytest.approx(2e6) and found.on_cpu
    assert found.to_dict()["limit_tok_s"] == 2e6


def test_a_model_larger_than_the_memory_leaves_no_cache(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 100)
    config = ModelConfig.from_dict(preset_config("smollm2-135m"))
    found = capacity(
        summary(*LAYERS), config, device=torch.device("cpu"), dtype=torch.float32, bandwidth=1.0
    )
    assert found.kv_bytes == found.kv_tokens == 0
    assert dataclasses.replace(found, kv_bytes=10**6).kv_tokens > 0
