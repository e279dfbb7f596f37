"""Models whose layers keep states: the pool of slots, and answers that never see a wrong state."""

from __future__ import annotations

import random

import pytest
import torch

from flyweight.engine import llm as engine
from flyweight.engine import memory
from flyweight.engine.llm import LLM
from flyweight.engine.request import SamplingParams
from flyweight.engine.states import StatePool
from flyweight.errors import OptionError
from flyweight.models.presets import PresetWeights, preset_config

TINY = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=61,
    max_position_embeddings=256,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    dtype="float32",
    eos_token_id=1,
    bos_token_id=2,
    pad_token_id=0,
)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture
def open_tiny(monkeypatch):
    weights = PresetWeights(preset_config("qwen3-next-80b-a3b") | TINY, "fp32")
    monkeypatch.setattr(engine, "open_model", lambda model, device: (weights, None))
    return lambda **options: LLM("tiny", device="cpu", dtype="float32", **options)


def check(llm, outputs):
    """Every reported probability is that of the whole sequence computed anew."""
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        expected = llm.decoder.forward_whole(torch.tensor([tokens]))[0].log_softmax(-1)
        for at, entry in enumerate(
            output.completions[0].logprobs, len(output.prompt_token_ids) - 1
        ):
            assert entry.logprob == pytest.approx(float(expected[at, entry.token_id]), abs=2e-4)
    llm.engine.scheduler.check_integrity()


def test_prompts_with_common_beginnings_never_see_a_wrong_state(open_tiny):
    """Rounds of prompts cut out of two texts, in a pool too small for all copies of states."""
    llm = open_tiny(max_num_seqs=3, max_num_batched_tokens=24, block_size=8, max_model_len=128)
    assert llm.memory().state_slots == 3 + 4 and "states" in str(llm.memory())
    rng = random.Random(0)
    texts = [[rng.randrange(3, 61) for _ in range(96)] for _ in range(2)]
    found = 0
    for _ in range(6):
        prompts = [
            rng.choice(texts)[: rng.randrange(3, 90)] + [rng.randrange(3, 61)] for _ in range(4)
        ]
        outputs = llm.generate(prompts, GREEDY)
        check(llm, outputs)
        found += sum(output.completions[0].cached_tokens for output in outputs)
    assert found > 0 and found % 8 == 0


def test_preempted_sequences_begin_again(open_tiny):
    """Blocks for little more than one sequence: the younger ones give theirs up, and their
    states.
    """
    llm = open_tiny(max_num_seqs=3, block_size=8, max_model_len=64, blocks=10)
    prompts = [list(range(3 + i, 30 + i)) for i in range(3)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    requests = [
        one for prompt in prompts for one in llm.engine.submit(prompt, params.with_defaults({}))
    ]
    while llm.engine.busy:
        llm.engine.step()
    assert any(request.preemptions for request in requests)
    for request in requests:
        expected = llm.decoder.forward_whole(torch.tensor([request.tokens]))[0]
        for at in range(len(request.prompt), len(request.tokens)):
            best = expected[at - 1].topk(2)
            if best.values[0] - best.values[1] > 1e-3:
                assert request.tokens[at] == int(best.indices[0])
    llm.engine.scheduler.check_integrity()


def test_samples_of_one_prompt_and_fewer_slots_than_sequences(open_tiny, monkeypatch):
    monkeypatch.setattr(memory, "count_states", lambda *args, **options: 2)
    llm = open_tiny(max_num_seqs=4, prefix_cache=False)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=3)
    (output,) = llm.generate([list(range(3, 40))], params)
    assert len({tuple(one.token_ids) for one in output.completions}) == 1
    llm.engine.scheduler.check_integrity()


def test_speculation_is_refused_before_any_weight_is_loaded(open_tiny, monkeypatch):
    monkeypatch.setattr(engine, "load_decoder", None)
    with pytest.raises(OptionError, match="keep a state that a wrong guess"):
        open_tiny(speculate="ngram")


# -- the pool ----------------------------------------------------------------------------------


def test_a_copy_is_found_from_the_next_step_on():
    pool = StatePool(3)
    slot = pool.keep(b"a")
    assert pool.find([b"a"]) == (0, -1) and pool.keep(b"a") is None
    pool.begin_step()
    assert pool.find([b"a", b"b"]) == (1, slot)
    pool.check_integrity([])


def test_sequences_come_before_copies_and_the_oldest_copy_goes_first():
    pool = StatePool(3)
    first, second = pool.keep(b"a"), pool.keep(b"b")
    pool.begin_step()
    held = [pool.take()]
    assert pool.find([b"a"]) == (1, first)
    held.append(pool.take())
    assert held[1] == second  # b was used before a
    assert pool.take() is None  # this step reads a
    pool.begin_step()
    assert pool.take() == first
    pool.release(first)
    pool.check_integrity(held)


def test_forgotten_copies_are_free_again():
    pool = StatePool(2)
    pool.keep(b"a")
    pool.begin_step()
    pool.keep(b"b")
    pool.forget()
    assert pool.find([b"a"]) == (0, -1) and sorted(pool.free) == [0, 1]
