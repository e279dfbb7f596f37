"""Guesses checked in captured steps: the logits of one row at a time, and the same answers."""

import pytest
import torch
from gpu_models import BEST, CUDA, PAGE, gap_where_parted, load, make_engine, params, prompts, run

from flyweight.batch import KVStorage
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.request import Request
from flyweight.engine.rows import Rows
from flyweight.engine.speculation.lengths import Fixed
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.plain_step import try_step
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.engine.speculation.speculator import Speculator
from flyweight.engine.work import Work

pytestmark = pytest.mark.gpu
GAP = 0.1  # of logprobs: kernels differ by the number of rows and sum in another order
BOUND = {"bf16": 0.02, "int4": 0.02, "w8a8": 0.06}


class Oracle:
    """Knows the answers, and errs at every fifth token of the text; where a text parted from them
    it is silent, and at every fourth step, so that others are launched behind tokens in flight.
    """

    guesses_ahead = True

    def __init__(self, texts):
        self.texts = texts
        self.calls = 0

    def warm_up(self):
        pass

    def learn(self, works, seconds):
        pass

    def promising(self, request):
        return True

    def propose(self, requests, most):
        found = {}
        self.calls += 1
        for request in requests if self.calls % 4 else ():
            text = next(
                (text for text in self.texts if text[: len(request.tokens)] == request.tokens), []
            )
            begin = len(request.tokens) + request.pending
            at = range(begin, min(len(text), begin + most[request.number]))
            found[request.number] = [text[i] + (i % 5 == 0) for i in at]
        return found

    def observe(self, request, drafts, accepted):
        pass

    def forget(self, request):
        pass


@pytest.mark.parametrize("counts", [(8, 5), (3, 1)], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("scheme", BOUND)
@torch.inference_mode()
def test_rows_of_one_sequence_give_the_logits_of_a_step_each(scheme, counts):
    """Two sequences at once, of 300 and 29 tokens: pages, runs and other rows lie between."""
    decoder = load("tiny", scheme, CUDA, torch.bfloat16)
    config, pages = decoder.config, 32
    tokens = torch.randint(10, 900, (2, 310), generator=torch.Generator().manual_seed(3)).tolist()
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(4)).tolist()
    blocks = [order[:pages], order[pages:]]
    starts = (300, 29)
    results = []
    for shared in (False, True):
        caches = [
            KVStorage(
                *(
                    torch.zeros(
                        2 * pages,
                        PAGE,
                        config.kv_heads,
                        config.head_dim,
                        dtype=torch.bfloat16,
                        device=CUDA,
                    )
                    for _ in range(2)
                )
            )
            for _ in range(config.layers)
        ]
        rows = Rows(2, pages=pages, vocabulary=config.vocab_size, device=CUDA)
        requests = [
            Request(i, text[:start], params(), seed=0, limit=400, blocks=blocks[i])
            for i, (text, start) in enumerate(zip(tokens, starts, strict=True))
        ]
        rows.enter(requests)
        rows.extend()
        graphs = DecodeGraphs(decoder, caches, rows)
        for position in range(max(starts) - 1):  # fill the caches, one token at a time
            for i, start in enumerate(starts):
                at = min(position, start - 2)
                rows.tokens[i], rows.lengths[i] = tokens[i][at], at + 1
            graphs.logits(2)
        if shared:
            places = SharedRows(rows)
            works = [
                Work(request, start - 1, count, True, tuple(tokens[i][start : start + count - 1]))
                for i, (request, start, count) in enumerate(
                    zip(requests, starts, counts, strict=True)
                )
            ]
            assert places.takes(works)
            steps = DecodeGraphs(decoder, caches, places)
            assert steps.step(4).decode.separate is None, "four rows go through qkv_attention.cu"
            for _ in range(2):  # captured, and once more: nothing of the first is left behind
                logits = steps.logits(places.fill(works)).float().clone()
            results.append(logits)
            continue
        one_by_one = []
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            rows.lengths.zero_()
            for at in range(start - 1, start - 1 + count):
                rows.tokens[i], rows.lengths[i] = tokens[i][at], at + 1
                one_by_one.append(graphs.logits(2)[i : i + 1].float().clone())
        results.append(torch.cat(one_by_one))
    want, got = results
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).tolist()
    print(scheme, [f"{one:.4f}" for one in error])
    assert max(error) < BOUND[scheme]


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_answers_are_the_same_with_guesses(scheme):
    decoder = load("tiny", scheme, CUDA, torch.bfloat16)
    asked = prompts(decoder.config, 5)
    plain = make_engine(decoder)
    want = [plain.submit(prompt, params(logprobs=BEST)) for prompt in asked]
    run(plain, [one for (one,) in want])
    texts = [one.tokens for (one,) in want]
    for drafter, follows in ((Oracle(texts), False), (Oracle(texts), True), (NgramDrafter(), True)):
        engine = make_engine(decoder)
        engine.speculator = Speculator(drafter, Fixed(4))
        engine.speculator.follows = lambda works, wanted=follows: wanted
        got = [engine.submit(prompt, params(logprobs=BEST)) for prompt in asked]
        run(engine, [one for (one,) in got])
        gaps = [gap_where_parted(one, other) for (one,), (other,) in zip(want, got, strict=True)]
        print(
            scheme,
            type(drafter).__name__,
            follows,
            engine.speculator.accepted,
            "of",
            engine.speculator.drafted,
            gaps,
        )
        assert all(gap is None or gap < GAP for gap in gaps)
        if isinstance(drafter, Oracle):
            assert engine.runner.shared_steps is not None and engine.runner.shared_steps.graphs
            assert engine.speculator.accepted > 60


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_sampled_answers_are_the_same_with_guesses(penalty):
    """The same seed draws the same noise, whatever was guessed."""
    decoder = load("tiny", "bf16", CUDA, torch.bfloat16)
    asked = prompts(decoder.config, 3)
    options = [
        params(
            temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=penalty, seed=seed, logprobs=1
        )
        for seed in range(3)
    ]
    plain = make_engine(decoder)
    want = [plain.submit(prompt, one) for prompt, one in zip(asked, options, strict=True)]
    texts = run(plain, [one for (one,) in want])
    engine = make_engine(decoder)
    engine.speculator = Speculator(
        Oracle([prompt + text for prompt, text in zip(asked, texts, strict=True)]), Fixed(5)
    )
    engine.speculator.follows = lambda works: True
    got = run(
        engine, [engine.submit(prompt, one)[0] for prompt, one in zip(asked, options, strict=True)]
    )
    same = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(texts, got, strict=True)
    ]
    print("tokens alike:", same, "of", [len(one) for one in texts])
    assert engine.speculator.accepted > 40 and max(same) == 48


def test_trying_a_step_out_leaves_rows_and_caches_as_they_are():
    decoder = load("tiny", "bf16", CUDA, torch.bfloat16)
    engine = make_engine(decoder)
    (request,) = engine.submit(prompts(decoder.config, 1)[0], params())
    engine.step()
    runner = engine.runner
    before = [one.clone() for one in (runner.rows.tokens, runner.rows.lengths)]
    caches = [one.keys.clone() for one in runner.caches]
    assert try_step(runner, 0) is None and try_step(runner, 10_000) is None
    assert 0 < try_step(runner, 1) < 1
    torch.cuda.synchronize()
    assert torch.equal(before[0], runner.rows.tokens)
    assert torch.equal(before[1], runner.rows.lengths)
    assert all(torch.equal(a, b.keys) for a, b in zip(caches, runner.caches, strict=True))
    engine.cancel([request])
