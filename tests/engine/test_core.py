"""The step loop with a toy model: however a request is batched, cut, thrown out and resumed, its
tokens are its own.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from toy_engine import VOCABULARY, alone, params, run, toy_engine

from flyweight.engine.request import Constraint, SamplingParams
from flyweight.errors import RequestError

PROMPTS = [
    [(7 * i + j * j) % VOCABULARY for j in range(length)]
    for i, length in enumerate((3, 30, 11, 1, 21, 4, 17, 8))
]
STYLES = {
    "greedy": lambda i: params(max_tokens=5 + 2 * i),
    "seeded": lambda i: params(max_tokens=5 + 2 * i, temperature=1.5, top_p=0.9, seed=i),
    "penalized": lambda i: params(
        max_tokens=5 + 2 * i, temperature=0.8, seed=i, repetition_penalty=1.4, frequency_penalty=0.5
    ),
}
SETTINGS = {
    "batched": dict(max_num_batched_tokens=256),
    "chunked": dict(max_num_batched_tokens=8),
    "preempted": dict(blocks=13, max_model_len=52),
    "without a prefix cache": dict(prefix_cache=False),
    "one block per token": dict(block_size=1, blocks=256),
    "captured": dict(captured=True),
    "captured, chunked": dict(captured=True, max_num_batched_tokens=8),
    "captured, preempted": dict(captured=True, blocks=13, max_model_len=52),
    "captured, in turns": dict(captured=True, turns=True, prompt_tokens_beside=5),
    "captured, in turns, preempted": dict(captured=True, turns=True, blocks=13, max_model_len=52),
    "launched ahead, not captured": dict(overlap=True),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_request_gets_the_same_tokens_among_others_as_alone(setting, style):
    engine = toy_engine(**SETTINGS[setting])
    groups = [engine.submit(prompt, STYLES[style](i)) for i, prompt in enumerate(PROMPTS)]
    assert run(engine, *groups) == [
        alone(prompt, STYLES[style](i)) for i, prompt in enumerate(PROMPTS)
    ]
    preempted = sum(group[0].preemptions for group in groups)
    assert (preempted > 0) == ("preempted" in setting)
    if "captured" in SETTINGS[setting]:
        assert engine.runner.steps.taken, "no step was taken from the rows on the device"


def test_chunks_and_answers_share_steps():
    engine = toy_engine()
    run(engine, *(engine.submit(prompt, params()) for prompt in PROMPTS))
    batches = engine.runner.model.batches
    assert any(
        {1}
        < {
            end - start
            for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)
        }
        for batch in batches
    )
    assert max(len(batch.tokens) for batch in batches) <= 16


def test_a_known_prefix_is_not_computed_again_and_changes_nothing():
    engine = toy_engine()
    prompt = list(range(20))
    first = engine.submit(prompt, params())
    expected = run(engine, first)
    computed = sum(len(batch.tokens) for batch in engine.runner.model.batches)
    second = engine.submit(prompt, params())
    assert run(engine, second) == expected
    assert (first[0].cached, second[0].cached) == (0, 16)
    assert (
        sum(len(batch.tokens) for batch in engine.runner.model.batches) - computed == computed - 16
    )


def test_the_answer_of_one_turn_is_the_known_prefix_of_the_next():
    engine = toy_engine()
    answer = run(engine, engine.submit(list(range(10)), params(max_tokens=11)))[0]
    following = engine.submit([*range(10), *answer, 5, 6], params())
    run(engine, following)
    assert following[0].cached == 20, "10 prompt and 10 computed answer tokens"


def test_without_a_prefix_cache_only_samples_of_one_prompt_share():
    engine = toy_engine(prefix_cache=False, max_num_batched_tokens=64)
    again = [engine.submit(list(range(20)), params(n=2)) for _ in range(2)]
    run(engine, *again)
    assert [request.cached for group in again for request in group] == [0, 16, 0, 16]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_prompt_differ_and_repeat_with_the_seed(prefix_cache):
    options = params(n=4, temperature=2.0, seed=3)
    runs = []
    for other in ([], [5, 6, 7]):
        engine = toy_engine(prefix_cache=prefix_cache)
        group = engine.submit(PROMPTS[1], options)
        others = [engine.submit(other, params(temperature=1.0))] if other else []
        runs.append(run(engine, group, *others)[:4])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_the_engines_seed_decides_where_the_caller_gives_none():
    def tokens(seed):
        engine = toy_engine(seed=seed)
        return run(engine, *(engine.submit([1, 2], params(temperature=3.0)) for _ in range(2)))

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(1)[0] != tokens(1)[1], "two requests of one engine draw differently"


def test_end_tokens_stop_unless_told_otherwise():
    reference = alone([1, 2, 3], params(max_tokens=20))
    end = reference[6]
    first = reference.index(end)
    engine = toy_engine(end_ids=[end, 96])
    stopped, ignoring, late, named = (
        engine.submit([1, 2, 3], options)[0]
        for options in (
            params(max_tokens=20),
            params(max_tokens=20, ignore_eos=True),
            params(max_tokens=20, min_tokens=first + 2),
            params(max_tokens=20, stop_token_ids=[reference[2]]),
        )
    )
    run(engine, [stopped, ignoring, late, named])
    assert (stopped.tokens[3:], stopped.finish_reason, stopped.stop_reason) == (
        reference[: first + 1],
        "stop",
        None,
    )
    assert (ignoring.tokens[3:], ignoring.finish_reason) == (reference, "length")
    assert end not in late.tokens[3 : 3 + first + 2] and late.generated >= first + 2
    assert named.stop_reason == reference[2] and named.tokens[-1] == reference[2]


def test_a_step_is_launched_before_the_last_ones_tokens_are_read():
    engine, seen = toy_engine(captured=True), []
    request = engine.submit(
        [1, 2, 3], params(max_tokens=4), listener=lambda chunk: seen.append(chunk.token_ids[0])
    )[0]
    counts = []
    while engine.busy:
        counts.append((engine.step(), len(seen)))
    assert counts == [(3, 0), (1, 1), (1, 2), (1, 3), (0, 4)], (
        "no step is launched for a token past the limit"
    )
    assert seen == request.tokens[3:] == alone([1, 2, 3], params(max_tokens=4))


@pytest.mark.parametrize("size", [1, 4])
def test_a_token_that_ends_a_request_late_costs_a_step_and_no_block(size):
    reference = alone([1, 2, 3], params(max_tokens=20))
    first = reference.index(reference[6])
    engine = toy_engine(captured=True, end_ids=[reference[6]], block_size=size, blocks=256 // size)
    request = engine.submit([1, 2, 3], params(max_tokens=20))[0]
    assert run(engine, [request])[0] == reference[: first + 1] and request.finish_reason == "stop"
    assert len(engine.runner.model.batches) == first + 2
    following = engine.submit(request.tokens, params(max_tokens=3))
    assert run(engine, following)[0] == alone(request.tokens, params(max_tokens=3)), (
        "the late step is in nobody's prefix"
    )


def test_a_decode_step_uploads_only_new_blocks(monkeypatch):
    from flyweight.engine import rows, runner, sampling

    sent = []
    for module in (rows, runner, sampling):
        monkeypatch.setattr(
            module,
            "upload",
            lambda device, *arrays, original=module.upload: (
                sent.append([array.size for array in arrays]) or original(device, *arrays)
            ),
        )
    engine = toy_engine(captured=True)
    engine.submit([1, 2], params(max_tokens=20))
    engine.submit(
        [1, 2, 3], params(max_tokens=20, temperature=1.0, top_p=0.5, frequency_penalty=1.0)
    )
    for _ in range(3):
        engine.step()
    sent.clear()
    for _ in range(8):
        engine.step()
    assert all(sizes == [1, 1] for sizes in sent) and len(sent) == 4, (
        "two sequences cross two block boundaries each"
    )


def test_rows_close_up_as_requests_leave_and_modes_follow():
    engine = toy_engine(captured=True)
    lengths = (3, 9, 5, 12, 4)
    groups = [
        engine.submit(
            [i + 1] * 2,
            params(max_tokens=lengths[i], temperature=i % 2, seed=i, presence_penalty=i / 4),
        )
        for i in range(5)
    ]
    got = run(engine, *groups)
    assert got == [alone(group[0].prompt, group[0].params) for group in groups]
    counts = [count for count, _ in engine.runner.steps.taken]
    assert counts == sorted(counts, reverse=True) and set(counts) == {5, 4, 3, 2, 1}
    assert {mode.random for count, mode in engine.runner.steps.taken if count < 3} == {True}


class Alternating(Constraint):
    """Even tokens and odd ones by turns."""

    def __init__(self):
        self.asked = []

    def allowed(self, generated):
        self.asked.append(list(generated))
        return torch.arange(VOCABULARY) % 2 == len(generated) % 2


@pytest.mark.parametrize("captured", [True, False])
def test_a_constraint_sees_every_token_before_it_masks_the_next(captured):
    engine, constraint = toy_engine(captured=captured), Alternating()
    free = engine.submit([5, 6], params(max_tokens=9))
    bound = engine.submit(
        [1, 2, 3], params(max_tokens=6, logprobs=1), constraint=lambda: constraint
    )
    tokens = run(engine, free, bound)
    assert tokens[0] == alone([5, 6], params(max_tokens=9)), "others are not masked"
    assert [token % 2 for token in tokens[1]] == [0, 1, 0, 1, 0, 1]
    assert constraint.asked == [tokens[1][:i] for i in range(6)]


@pytest.mark.parametrize("captured", [True, False])
def test_a_cancelled_request_frees_its_row_and_blocks_with_a_step_in_flight(captured):
    engine = toy_engine(captured=captured)
    keep, leave = engine.submit([1, 2, 3], params()), engine.submit([4, 5], params())
    for _ in range(3):
        engine.step()
    held = len(keep[0].blocks)
    engine.cancel(leave)
    assert engine.pool.available == engine.pool.blocks - held
    late = engine.submit([7, 8, 9], params())
    assert run(engine, keep, late) == [alone([1, 2, 3], params()), alone([7, 8, 9], params())]


def letters(tokens):
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_stop_strings_across_tokens_end_the_text_before_them():
    reference = letters(alone([1, 2, 3], params(max_tokens=20)))
    stop = reference[5:8]
    at = reference.index(stop)
    engine = toy_engine(decode=letters)
    chunks = []
    request = engine.submit(
        [1, 2, 3], params(max_tokens=20, stop=["zzzz", stop]), listener=chunks.append
    )[0]
    run(engine, [request])
    assert (request.text, request.finish_reason, request.stop_reason) == (
        reference[:at],
        "stop",
        stop,
    )
    assert request.generated == at + 3
    assert "".join(chunk.text for chunk in chunks) == reference[:at]
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "stop"]


def test_the_context_bounds_the_answer():
    engine = toy_engine(max_model_len=10)
    request = engine.submit([1, 2, 3], params(max_tokens=None))[0]
    run(engine, [request])
    assert (len(request.tokens), request.finish_reason) == (10, "length")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 300, {}, "the prompt has 300 tokens, but the context holds 256"),
        ([], {}, "the prompt is empty"),
        (
            [1, VOCABULARY],
            {},
            f"token id {VOCABULARY} in the prompt is outside the vocabulary of {VOCABULARY}",
        ),
        ([1], {"logit_bias": {-1: 1.0}}, "token id -1 in logit_bias"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(prompt, options, message):
    engine = toy_engine()
    with pytest.raises(RequestError) as error:
        engine.submit(prompt, params(**options))
    assert message in str(error.value) and not engine.busy


def test_logprobs_are_given_for_answer_and_prompt_however_it_is_computed():
    found = []
    for options in (
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 8},
        {"blocks": 12},
        {"captured": True},
    ):
        engine = toy_engine(**options)
        older = engine.submit(PROMPTS[0], params(max_tokens=30))
        request = engine.submit(PROMPTS[1], params(logprobs=2, prompt_logprobs=3))[0]
        run(engine, older, [request])
        assert (request.preemptions > 0) == ("blocks" in options)
        assert [item.token_id for item in request.logprobs] == request.tokens[30:]
        assert all(
            next(iter(item.top)) == item.token_id and len(item.top) == 2
            for item in request.logprobs
        )
        assert request.prompt_logprobs[0] is None
        assert [item.token_id for item in request.prompt_logprobs[1:]] == PROMPTS[1][1:]
        found.append((request.logprobs, request.prompt_logprobs))
    assert found[0] == found[1] == found[2] == found[3]


def test_cancelling_returns_all_blocks_at_once_and_tells_the_listener():
    engine, chunks = toy_engine(), []
    running = engine.submit(PROMPTS[1], params(), listener=chunks.append)
    waiting = engine.submit(PROMPTS[2], params(), listener=chunks.append)
    engine.step()
    assert engine.pool.available < engine.pool.blocks
    engine.cancel([*running, *waiting])
    assert engine.pool.available == engine.pool.blocks and not engine.busy
    assert [chunk.finish_reason for chunk in chunks] == ["cancelled", "cancelled"]
    engine.cancel(running)  # twice does no harm
    assert not engine.busy


@pytest.mark.parametrize("captured", [True, False])
def test_a_failing_step_ends_its_requests_and_leaves_a_usable_engine(captured):
    engine = toy_engine(captured=captured)
    reference = run(engine, engine.submit(PROMPTS[1], params()))
    engine.runner.model.fails = True
    chunks = []
    engine.submit(PROMPTS[1], params(), listener=chunks.append)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        engine.step()
    assert chunks[0].finish_reason == "failed" and "bus" in chunks[0].stop_reason
    engine.runner.model.fails = False
    assert run(engine, engine.submit(PROMPTS[1], params())) == reference


@pytest.mark.parametrize("captured", [True, False])
def test_a_listener_that_raises_ends_its_own_request_only(captured):
    """Also at a failing step, where all of them are told."""
    engine = toy_engine(captured=captured)
    reference = run(engine, engine.submit(PROMPTS[1], params()))
    chunks = []

    def rude(chunk):
        raise ValueError("not now")

    first = engine.submit(PROMPTS[2], params(), listener=rude)
    second = engine.submit(PROMPTS[1], params(), listener=chunks.append)
    with pytest.warns(UserWarning, match=r"raised ValueError\('not now'\)"):
        assert run(engine, first, second)[1] == reference[0]
    assert (first[0].finish_reason, first[0].stop_reason) == (
        "failed",
        "its listener raised ValueError('not now')",
    )
    assert chunks[-1].finish_reason == "length" and engine.pool.available == engine.pool.blocks
    groups = [
        engine.submit(PROMPTS[2], params(), listener=rude),
        engine.submit(PROMPTS[1], params(), listener=chunks.append),
    ]
    engine.runner.model.fails = True
    with (
        pytest.raises(RuntimeError, match="fell off the bus"),
        pytest.warns(UserWarning, match="not now"),
    ):
        engine.step()
    assert (
        all(group[0].finish_reason == "failed" for group in groups)
        and chunks[-1].finish_reason == "failed"
    )
    assert not engine.busy and engine.pool.available == engine.pool.blocks


@pytest.mark.parametrize(("captured", "turns"), [(True, True), (True, False), (False, False)])
def test_a_storm_of_requests_in_a_small_pool_all_end_right(captured, turns):
    """Random lengths, styles, cancels; every answer that was not cancelled is the one the request
    gets alone.
    """
    chance = random.Random(0)
    engine = toy_engine(blocks=16, max_model_len=60, max_num_seqs=6, captured=captured, turns=turns)
    requests = []
    for number in range(60):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))]
        if number % 3 == 0 and requests:  # shares a prefix with an earlier one
            prompt = (requests[-1].prompt[:20] + prompt)[:40]
        requests += engine.submit(
            prompt,
            params(
                max_tokens=chance.randrange(1, 20), temperature=chance.choice([0, 1.0]), seed=number
            ),
        )
        for _ in range(chance.randrange(3)):
            engine.step()
        if number % 7 == 0:
            engine.cancel([chance.choice(requests)])
    run(engine, requests)
    for request in requests:
        expected = alone(request.prompt, request.params, max_model_len=60)
        got = request.tokens[len(request.prompt) :]
        assert (
            got == expected[: len(got)] if request.finish_reason == "cancelled" else got == expected
        )
    assert sum(request.preemptions for request in requests) > 0


def test_timing_and_counts_are_kept_for_each_chunk():
    engine = toy_engine()
    request = engine.submit([1, 2], SamplingParams(max_tokens=3, temperature=0).with_defaults({}))[
        0
    ]
    run(engine, [request])
    timing = request.completion().timing
    assert [count for _, count in timing.chunks] == [1, 1, 1]
    assert timing.arrival <= timing.first_token <= timing.finished


def test_parameters_that_nobody_filled_in_are_plain_sampling_and_harm_no_neighbour():
    """`SamplingParams(temperature=1.0)` leaves top_k, top_p and the penalty to a model's
    defaults.
    """
    engine = toy_engine()
    neighbour = engine.submit(PROMPTS[1], params(max_tokens=6))
    open_ones = engine.submit(PROMPTS[2], SamplingParams(temperature=1.0, seed=4, max_tokens=6))
    filled = SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=4, max_tokens=6
    )
    wanted = [alone(PROMPTS[1], params(max_tokens=6)), alone(PROMPTS[2], filled)]
    assert run(engine, neighbour, open_ones) == wanted


def test_a_request_that_is_refused_leaves_the_others_alone():
    engine = toy_engine()
    neighbour = engine.submit(PROMPTS[1], params(max_tokens=6))
    engine.step()
    for bias in (float("nan"), float("inf"), 10**400):
        with pytest.raises(RequestError, match="logit_bias"):
            engine.submit(PROMPTS[2], params(logit_bias={1: bias}))
    assert run(engine, neighbour) == [alone(PROMPTS[1], params(max_tokens=6))]


def test_steps_launched_ahead_are_timed_by_the_device(monkeypatch):
    """The host reads a step when the next one runs already: what it took is what lay between two
    ends on the device.
    """
    monkeypatch.setattr("flyweight.transfer.Download.seconds_since", lambda self, before: 0.25)
    engine = toy_engine(captured=True)
    taught = []
    engine.scheduler.pace = SimpleNamespace(
        tokens=lambda most: most,
        learn=lambda seconds, **counts: taught.append((seconds, *counts.values())),
    )
    run(engine, engine.submit([1, 2, 3], params(max_tokens=4)))
    assert taught[0][0] < 0.25 and taught[0][1:] == (3, 0), "nothing ran before the first one"
    assert taught[1:] == [(0.25, 0, 1)] * 3
