"""A whole decoder on the ops of CUDA devices, interpreted on the CPU, gives the logits that transformers gives."""

import inspect

import pytest
import torch
from model_helpers import assert_same_logits, load, run_paged, tokens_of, transformers_model

from flyweight.kernels import dispatch, reference
from flyweight.models import decoder

ops = pytest.importorskip("flyweight.kernels.cuda_ops", reason="triton is not installed")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here: CPU tensors are for the interpreter")


@interpreted
@pytest.mark.usefixtures("interpreted_loops")
@pytest.mark.parametrize("name", ["llama odd heads", "mistral window", "qwen3 yarn"])
def test_packed_chunks_match_transformers(name, monkeypatch):
    monkeypatch.setattr(decoder, "decoder_ops", lambda device: ops)
    model = transformers_model(name)
    sequences = [tokens_of(count, seed=count) for count in (9, 13, 1)]
    for found, tokens in zip(run_paged(load(model), sequences, [7, 1, 5]), sequences, strict=True):
        with torch.no_grad():
            assert_same_logits(found, model(torch.tensor([tokens])).logits[0])


def test_cuda_devices_get_these_ops_and_others_the_plain_ones():
    assert dispatch.decoder_ops("cuda:0") is ops and dispatch.decoder_ops("cpu") is reference


def test_without_triton_the_plain_ops_say_so_once(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._cuda_ops.cache_clear()
    try:
        with pytest.warns(UserWarning, match="triton is not installed"):
            assert dispatch.decoder_ops("cuda") is reference
        assert dispatch.decoder_ops("cuda") is reference
    finally:
        dispatch._cuda_ops.cache_clear()


@pytest.mark.parametrize("name", [name for name in ops.__all__ if hasattr(reference, name)])
def test_ops_take_the_arguments_of_the_plain_ones(name):
    plain, fast = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (reference, ops))
    assert [p.name for p in plain] == [p.name for p in fast[: len(plain)]]
    assert all(p.default is not inspect.Parameter.empty for p in fast[len(plain) :])
