"""Which shapes are ours on which GPU."""

import dataclasses

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.plugins import limits
from flyweight.plugins.limits import Wanted, unsupported_reason

H200 = GPUS["sm_90a"]
QKV = Wanted("int4", 6144, 4096, 128)


@pytest.mark.parametrize("form", ["int4", "int8", "w8a8", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_linears_of_an_8b_model_and_their_shards_are_ours_on_an_h200(form, ranks):
    """qkv, o, gate/up and down of Qwen3-8B: the first and third are cut by outputs."""
    group = 128 if form in ("int4", "int8") else 64
    shapes = [
        (6144 // ranks, 4096),
        (4096, 4096 // ranks),
        (2 * 12288 // ranks, 4096),
        (4096, 12288 // ranks),
    ]
    for outputs, inputs in shapes:
        assert unsupported_reason(Wanted(form, outputs, inputs, group), H200) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(inputs=4160), "whole groups"),
        (dict(group=96, inputs=4032), "groups of 96"),
        (dict(dtype=torch.float32), "float32"),
        (dict(outputs=6136), "sixteens"),
    ],
)
def test_what_is_not_says_why(change, words):
    assert words in unsupported_reason(dataclasses.replace(QKV, **change), H200)


def test_a_gpu_without_numbers_is_left_alone_unless_asked(monkeypatch):
    other = dataclasses.replace(H200, multi_processor_count=100)
    monkeypatch.delenv(limits.ANY_GPU, raising=False)
    assert "flyweight doctor --tune" in unsupported_reason(QKV, other)
    monkeypatch.setenv(limits.ANY_GPU, "1")
    assert unsupported_reason(QKV, other) is None


def test_an_old_gpu_is_named():
    assert "sm_75" in unsupported_reason(QKV, dataclasses.replace(H200, major=7, minor=5))


def test_a_cpu_takes_what_divides():
    assert unsupported_reason(dataclasses.replace(QKV, dtype=torch.float32), None) is None
    assert "whole groups" in unsupported_reason(dataclasses.replace(QKV, inputs=4000), None)
