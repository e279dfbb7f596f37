"""The engine with the CPU's own kernels: the same requests, the same scheduler, another executor."""

import os
import platform

import pytest

from flyweight import LLM, SamplingParams
from flyweight.errors import OptionError
from flyweight.kernels.native import library

# see tests/kernels/native/conftest.py
UNTRIED = platform.machine() != "aarch64" and "FLYWEIGHT_TEST_NATIVE" not in os.environ
REASON = "not tried on such a processor yet" if UNTRIED else library.why_not()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]


@needs_compiler
def test_exact_native_kernels_choose_the_tokens_of_the_torch_decoder():
    own, torch_own = (LLM("preset:tiny:int4", device="cpu", max_model_len=64, exact=True, native=native)
                      for native in (True, False))
    assert [one.token_ids for one in own.generate(PROMPTS, GREEDY)] == [one.token_ids for one in torch_own.generate(PROMPTS, GREEDY)]
    assert own.memory().weights < 0.5 * torch_own.memory().weights, "four bits stay four bits"


@needs_compiler
def test_a_batch_gives_what_each_request_gives_alone():
    llm = LLM("preset:tiny:w8a16", device="cpu", max_model_len=64, native=True)
    together = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert together == [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def test_native_kernels_of_another_device_are_refused(monkeypatch):
    import torch

    monkeypatch.setattr("flyweight.engine.llm.pick_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr("flyweight.engine.llm.open_model", lambda model, device: (type("W", (), {"config": {}})(), None))
    monkeypatch.setattr("flyweight.engine.llm.choose_dtype", lambda *_: torch.bfloat16)
    with pytest.raises(OptionError, match="native kernels are for a CPU"):
        LLM("preset:tiny:int4", native=True)
