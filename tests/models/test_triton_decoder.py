"""A whole decoder on the ops of CUDA devices, interpreted on the CPU, gives the logits that
transformers gives."""

import inspect

import pytest
import torch
from model_helpers import assert_same_logits, load, run_paged, tokens_of, transformers_model

from flyweight.kernels import dispatch, reference
from flyweight.models import decoder, layer

ops = pytest.importorskip("flyweight.kernels.cuda_ops", reason="triton is not installed")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles here: CPU tensors are for the interpreter"
)


@pytest.fixture(autouse=True)
def forgotten():
    """The choice is made once a process: not so here."""
    dispatch._cuda_ops.cache_clear()
    yield
    dispatch._cuda_ops.cache_clear()


@interpreted
@pytest.mark.usefixtures("interpreted_loops")
@pytest.mark.parametrize("name", ["llama odd heads", "mistral window", "qwen3 yarn"])
def test_packed_chunks_match_transformers(name, monkeypatch):
    for module in (decoder, layer, dispatch):
        monkeypatch.setattr(module, "decoder_ops", lambda device: ops)
    model = transformers_model(name)
    sequences = [tokens_of(count, seed=count) for count in (9, 13, 1)]
    for found, tokens in zip(run_paged(load(model), sequences, [7, 1, 5]), sequences, strict=True):
        with torch.no_grad():
            assert_same_logits(found, model(torch.tensor([tokens])).logits[0])


def test_cuda_devices_get_these_ops_and_others_the_plain_ones(monkeypatch):
    monkeypatch.setattr(dispatch, "unsupported_by_triton", lambda: None)
    assert dispatch.decoder_ops("cuda:0") is ops and dispatch.decoder_ops("cpu") is reference


@pytest.mark.parametrize(
    "place, missing, reason",
    [
        ("importlib.util.find_spec", None, "triton is not installed"),
        ("shutil.which", None, "needs a C compiler"),
        ("sysconfig.get_path", "/nowhere", "needs /nowhere/Python.h"),
    ],
)
def test_what_triton_lacks_is_said_once_and_the_plain_ops_run(place, missing, reason, monkeypatch):
    monkeypatch.setattr(f"flyweight.kernels.dispatch.{place}", lambda name: missing)
    with pytest.warns(UserWarning, match=reason) as warned:
        assert dispatch.decoder_ops("cuda") is dispatch.decoder_ops("cuda:1") is reference
    assert len(warned) == 1


@pytest.mark.parametrize("name", [name for name in ops.__all__ if hasattr(reference, name)])
def test_ops_take_the_arguments_of_the_plain_ones(name):
    plain, fast = (
        list(inspect.signature(getattr(module, name)).parameters.values())
        for module in (reference, ops)
    )
    assert [p.name for p in plain] == [p.name for p in fast[: len(plain)]]
    assert all(p.default is not inspect.Parameter.empty for p in fast[len(plain) :])
