"""The engine with the CPU's own kernels: the same requests, the same scheduler, another
executor.
"""

from unittest import mock

import pytest
import torch

from flyweight import LLM, SamplingParams
from flyweight.engine.embedding import Embedder
from flyweight.errors import OptionError
from flyweight.kernels.native import library
from flyweight.models.presets import PresetWeights

needs_compiler = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]


@needs_compiler
def test_exact_native_kernels_choose_the_tokens_of_the_torch_decoder():
    own, torch_own = (
        LLM("preset:tiny:int4", device="cpu", max_model_len=64, exact=True, native=native)
        for native in (True, False)
    )
    assert [one.token_ids for one in own.generate(PROMPTS, GREEDY)] == [
        one.token_ids for one in torch_own.generate(PROMPTS, GREEDY)
    ]
    assert own.memory().weights < 0.5 * torch_own.memory().weights, "four bits stay four bits"


@needs_compiler
def test_a_batch_gives_what_each_request_gives_alone():
    llm = LLM("preset:tiny:w8a16", device="cpu", max_model_len=64, native=True)
    together = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert together == [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def test_native_kernels_of_another_device_are_refused(monkeypatch):
    monkeypatch.setattr("flyweight.engine.llm.pick_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(
        "flyweight.engine.llm.open_model",
        lambda model, device: (PresetWeights("tiny", "int4", 0), None),
    )
    monkeypatch.setattr("flyweight.engine.llm.choose_dtype", lambda *_: torch.bfloat16)
    with pytest.raises(OptionError, match="native kernels are for a CPU"):
        LLM("preset:tiny:int4", native=True)


@needs_compiler
def test_keys_and_values_take_16_bits_unless_exactness_is_asked_for():
    options = dict(device="cpu", max_model_len=64, blocks=16, block_size=4)
    narrow = LLM("preset:tiny:int4", **options).memory()
    wide = LLM("preset:tiny:int4", exact=True, **options).memory()
    assert 2 * narrow.kv == wide.kv and narrow.kv_tokens == wide.kv_tokens


@needs_compiler
def test_native_kernels_run_unless_told_otherwise_and_the_model_says_so():
    own = LLM("preset:tiny:int4", device="cpu", max_model_len=64)
    assert own.executor.startswith("native kernels (")
    off = LLM("preset:tiny:int4", device="cpu", max_model_len=64, native=False)
    assert off.executor == "torch (no native kernels: turned off)"


def test_a_model_that_they_do_not_know_runs_on_torch_and_says_why(monkeypatch):
    monkeypatch.setattr(
        "flyweight.models.native.unsupported_reason", lambda config: "they do not know it"
    )
    llm = LLM("preset:tiny:int4", device="cpu", max_model_len=64)
    assert llm.executor == "torch (no native kernels: they do not know it)"
    assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
    with pytest.raises(OptionError, match="they do not know it"):
        LLM("preset:tiny:int4", device="cpu", max_model_len=64, native=True)


@needs_compiler
def test_hidden_states_are_those_of_the_torch_decoder():
    own, other = (
        LLM("preset:tiny:int4", device="cpu", max_model_len=64, exact=True, native=native)
        for native in (True, False)
    )
    found, expected = (Embedder(llm).embed(PROMPTS, "mean") for llm in (own, other))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "asked",
    [
        dict(temperature=0),
        dict(temperature=0.9, top_p=0.9, seed=3),
        dict(temperature=0, repetition_penalty=1.4, logprobs=2),
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_steps_of_the_table_choose_what_packed_steps_choose(asked):
    """Blocks for half of the requests: some start over, rows move, and others come in beside
    them.
    """
    params = SamplingParams(max_tokens=14, ignore_eos=True, **asked)

    def answers(llm):
        return [
            (one.token_ids, one.completions[0].logprobs)
            for one in llm.generate([*PROMPTS, [2, 3]], params)
        ]

    options = dict(device="cpu", max_model_len=64, blocks=12, block_size=4, max_num_seqs=3)
    llm, packed = (LLM("preset:tiny:int4", **options) for _ in range(2))
    steps = mock.Mock(wraps=llm.engine.runner.steps, largest=llm.engine.runner.steps.largest)
    llm.engine.runner.steps = steps
    packed.engine.runner.steps = None
    assert answers(llm) == answers(packed)
    assert {call.args[0] for call in steps.advance.call_args_list} >= {1, 2}, (
        "rows alone and together"
    )


@needs_compiler
@pytest.mark.parametrize("norm, chosen", [(float("nan"), 0), (0.0, 0)], ids=["NaN", "ties"])
def test_the_likeliest_token_is_the_first_of_equals_as_numpy_has_it(norm, chosen):
    llm = LLM("preset:tiny:int4", device="cpu", max_model_len=64)
    llm.decoder.parts.final_norm.fill_(norm)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == [chosen] * 10
