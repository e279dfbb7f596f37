"""Hundreds of random requests in a KV cache too small for them, on a tiny decoder, with steps
launched ahead as on a GPU.
"""

import random

import pytest
import torch
from toy_engine import EagerPasses, EagerSteps

from flyweight.engine.core import Engine
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import SamplingParams
from flyweight.engine.sampling import gumbel_noise
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

VOCABULARY, CONTEXT = 64, 64
# device, type, requests, and how close to the best score a token may be: batches of other sizes
# round differently
DEVICES = [
    ("cpu", torch.float32, 400, 1e-4),
    pytest.param("cuda", torch.float16, 1000, 0.1, marks=pytest.mark.gpu),
]
CONFIG = PRESETS["qwen3-0.6b"] | dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    head_dim=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)


def make_engine(device, dtype):
    decoder = Decoder.load(PresetWeights(CONFIG, "fp32"), device=device, dtype=dtype)
    shape = CacheShape(
        decoder.config.layers, decoder.config.kv_heads, decoder.config.head_dim, dtype
    )
    engine = Engine(
        decoder,
        shape,
        vocabulary=VOCABULARY,
        device=decoder.device,
        max_model_len=CONTEXT,
        blocks=15,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        end_ids=[7],
        overlap=True,
    )
    if device == "cpu":
        engine.runner.steps = EagerSteps(engine.runner)
        engine.runner.passes = EagerPasses(engine.runner)
    return engine


def random_params(chance, number):
    stops = chance.sample(range(VOCABULARY), chance.choice([0, 0, 2]))
    return SamplingParams(
        max_tokens=chance.randrange(1, 25),
        temperature=chance.choice([0, 0, 0.7, 1.5]),
        seed=number,
        stop_token_ids=stops,
        repetition_penalty=chance.choice([1.0, 1.0, 1.0, 1.3]),
        ignore_eos=chance.random() < 0.5,
        logprobs=chance.choice([None, None, 2]),
    ).with_defaults({})


def check_answer(decoder, request, gap):
    """Every token is the best one after the tokens before it, by the scores that its parameters ask
    for, or within the gap.

    Returns how many are not the best.
    """
    prompt, answer, params = request.prompt, request.tokens[len(request.prompt) :], request.params
    if not answer:
        return 0
    logits = decoder.forward_whole(torch.tensor([request.tokens[:-1]]))[0, len(prompt) - 1 :]
    near = 0
    for i, token in enumerate(answer):
        score, seen = logits[i].clone(), torch.tensor(prompt + answer[:i]).unique()
        factor = torch.where(
            score[seen] > 0, 1 / params.repetition_penalty, params.repetition_penalty
        )
        score[seen] *= factor
        if params.temperature:
            score = (
                score / params.temperature
                + gumbel_noise(
                    torch.tensor([request.seed]),
                    torch.tensor([len(prompt) + i]),
                    torch.arange(VOCABULARY),
                )[0]
            )
        assert score[token] >= score.max() - gap
        near += int(score.argmax()) != token
    return near


@pytest.mark.parametrize(("device", "dtype", "count", "gap"), DEVICES)
def test_random_requests_end_right_and_every_block_comes_back(device, dtype, count, gap):
    chance, engine = random.Random(1), make_engine(device, dtype)
    requests, chunks = [], {}
    for number in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 36))]
        if number % 4 == 3:  # shares a prefix with an earlier one
            prompt = (chance.choice(requests).prompt[:24] + prompt)[:40]
        heard = chunks[number] = []
        requests += engine.submit(prompt, random_params(chance, number), listener=heard.append)
        for _ in range(chance.randrange(4)):
            engine.step()
        if number % 9 == 0:
            engine.cancel([chance.choice(requests[-12:])])
    while engine.busy:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.pool.available == engine.pool.blocks
    reference = Decoder.load(PresetWeights(CONFIG, "fp32"), device="cpu", dtype=torch.float32)
    near = sum(check_answer(reference, request, gap) for request in requests)
    print(
        f"{near} of {sum(request.generated for request in requests)} tokens are within {gap} of "
        "the best, not the best"
    )
    reasons = {
        reason: sum(request.finish_reason == reason for request in requests)
        for reason in ("stop", "length", "cancelled")
    }
    assert sum(reasons.values()) == count and min(reasons.values()) > 20
    assert sum(request.preemptions for request in requests) > 20
    assert (
        len(engine.runner.steps.taken) > count / 2
        if device == "cpu"
        else engine.runner.steps.graphs
    )
    for number, request in enumerate(requests):
        heard = [token for chunk in chunks[number] for token in chunk.token_ids]
        assert heard == request.tokens[len(request.prompt) :], "the listener hears every token once"
        assert [chunk.finish_reason is not None for chunk in chunks[number]] == [False] * (
            len(chunks[number]) - 1
        ) + [True]
        if request.params.logprobs is not None:
            assert [item.token_id for item in request.logprobs] == heard
        if request.finish_reason == "stop":
            assert heard[-1] in request.end_ids and not set(heard[:-1]) & request.end_ids
        elif request.finish_reason == "length":
            assert len(request.tokens) == request.limit
