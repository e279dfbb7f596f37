"""Sampling: masks exact, frequencies right, noise that depends on nothing but (seed, position,
token).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.sampling import (
    GREEDY,
    PREFIX,
    Mode,
    SamplingTable,
    apply_penalties,
    candidates,
    gumbel_noise,
    sample,
    seed_of,
    top_logprobs,
)

VOCABULARY = 13


def request(number=0, *, prompt=(1, 2), answer=(), seed=0, end_ids=(), **options):
    options = {"temperature": 1.0} | options
    return Request(
        number=number,
        prompt=list(prompt),
        tokens=[*prompt, *answer],
        seed=seed,
        limit=100,
        params=SamplingParams(**options).with_defaults({}),
        end_ids=frozenset(end_ids),
    )


def batch(rows, vocabulary=VOCABULARY):
    """The parameters of these requests as a step sees them."""
    table, mode = SamplingTable(len(rows), vocabulary, torch.device("cpu")), GREEDY
    table.enter(range(len(rows)), rows)
    for row in rows:
        mode = mode.join(Mode.of(row, vocabulary), vocabulary)
    return table.batch(mode, torch.tensor([len(row.tokens) for row in rows]), slice(0, len(rows)))


def choose(logits, rows):
    return sample(logits, batch(rows, logits.shape[-1]))


def draw(logits, count, **options):
    """Token counts over `count` seeds, one row each."""
    shared = request(**options).params
    rows = [
        Request(number=i, prompt=[1], seed=seed_of(5, i), limit=100, params=shared)
        for i in range(count)
    ]
    tokens = choose(logits.expand(count, -1), rows)
    return torch.bincount(tokens, minlength=len(logits))


def kept_by_definition(logits, *, temperature, top_k, top_p, min_p):
    """The filters one by one, in plain Python: temperature, top_k, top_p of what is left, min_p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    left = order[:top_k] if top_k else order
    total, mass, kept = sum(weights[i] for i in left), 0.0, []
    for i in left:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        mass += weights[i]
        kept.append(i)
    return {i for i in kept if weights[i] >= min_p * weights[order[0]] or i == order[0]}


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, VOCABULARY),
    top_p=st.floats(0.05, 1),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_the_filters_keep_exactly_the_tokens_of_their_definition(
    seed, temperature, top_k, top_p, min_p
):
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _, ids, keep = candidates(logits[None] / temperature, batch([request(**filters)]), VOCABULARY)
    assert set(ids[keep].tolist()) == kept_by_definition(logits.tolist(), **filters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.8},
    ],
)
def test_frequencies_follow_the_softmax_of_what_the_filters_keep(options):
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5
    count = 20_000
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    kept = sorted(kept_by_definition(logits.tolist(), **settings))
    expected = torch.softmax(logits[kept] / settings["temperature"], 0) * count
    counts = draw(logits, count, **options)
    assert counts.sum() == counts[kept].sum(), "a token was drawn that the filters exclude"
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    degrees = len(kept) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees), (
        "five standard deviations from what chance gives"
    )


def test_positions_of_one_seed_are_as_independent_as_seeds():
    logits, count = torch.zeros(8), 16_000
    rows = [request(i, seed=77, answer=[0] * i) for i in range(16)]
    ids = torch.arange(8)
    noise = gumbel_noise(torch.full((count,), 77), torch.arange(count), ids)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=8)
    assert ((counts - count / 8) ** 2 / (count / 8)).sum() < 7 + 5 * math.sqrt(14)
    pairs = torch.bincount((noise[:-1].argmax(-1) * 8 + noise[1:].argmax(-1)), minlength=64)
    assert ((pairs - count / 64) ** 2 / (count / 64)).sum() < 63 + 5 * math.sqrt(126)
    assert len({choose(logits[None], [row]).item() for row in rows}) > 1


def test_noise_is_finite_and_has_the_moments_of_a_gumbel():
    noise = gumbel_noise(torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.arange(4096))
    assert noise.isfinite().all()
    assert (
        abs(noise.mean().item() - 0.5772) < 0.02 and abs(noise.var().item() - math.pi**2 / 6) < 0.03
    )


def test_a_row_draws_the_same_alone_and_among_others():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    rows = [
        request(0, seed=1),
        request(1, seed=2, top_k=5),
        request(2, temperature=0),
        request(3, seed=2, top_p=0.5),
        request(4, seed=9, min_p=0.1, repetition_penalty=1.3),
        request(5, seed=4, temperature=2.0),
    ]
    together = choose(logits, rows).tolist()
    assert together == [choose(logits[i : i + 1], [row]).item() for i, row in enumerate(rows)]


def test_a_wide_nucleus_is_searched_beyond_the_first_candidates():
    """A flat distribution over a large vocabulary: top_p keeps more than the CPU looks at first."""
    logits = torch.zeros(4 * PREFIX)
    counts = draw(logits + torch.linspace(0, 1e-3, 4 * PREFIX), 300, top_p=0.9)
    assert (counts > 0).sum() > 250


def test_penalties_follow_their_formula():
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4)) * 3
    prompt, answer = [1, 1, 2], [2, 3, 3, 3]
    row = request(
        prompt=prompt,
        answer=answer,
        temperature=0,
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    )
    expected = logits.clone()
    for token in {*prompt, *answer}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(answer):
        expected[token] -= 0.3 + 0.2 * answer.count(token)
    torch.testing.assert_close(apply_penalties(logits[None], batch([row]))[0], expected)


@pytest.mark.parametrize("rows", [slice(0, 2), torch.tensor([1, 0])])
def test_the_history_grows_with_the_answer(rows):
    table, mode = SamplingTable(2, VOCABULARY, torch.device("cpu")), Mode(penalized=True)
    table.enter(
        [0, 1], [request(i, prompt=[1], temperature=0, frequency_penalty=1.0) for i in range(2)]
    )
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 5], logits[:, 6] = 2.5, 2.0
    for expected in (5, 6, 5, 6, 5):  # each choice costs its token 1.0
        tokens = sample(logits, table.batch(mode, torch.zeros(2, dtype=torch.int64), rows))
        assert tokens.tolist() == [expected] * 2
        table.count(mode, tokens, rows)
    table.enter([1], [request(2, prompt=[1], answer=[5], temperature=0, frequency_penalty=1.0)])
    assert table.seen[1][:, 5].tolist() == [3, 1], "a row's history is that of the request in it"


def test_a_row_takes_its_parameters_and_history_along():
    rows = [
        request(0, temperature=0),
        request(1, seed=3, top_k=4, logit_bias={2: 9.0}),
        request(2, frequency_penalty=2.0, answer=[7]),
    ]
    table = SamplingTable(3, VOCABULARY, torch.device("cpu"))
    table.enter(range(3), rows)
    table.move(torch.tensor([1, 2]), torch.tensor([2, 0]), [(1, 2), (2, 0)])
    mode, positions = Mode(True, VOCABULARY, True, True), torch.tensor([5, 5])
    moved, fresh = table.batch(mode, positions, torch.tensor([2, 0])), batch([rows[1], rows[2]])
    for name in ("values", "top_k", "seeds"):
        assert torch.equal(getattr(moved, name), getattr(fresh, name))
    for ours, theirs in zip((*moved.bias, *moved.seen), (*fresh.bias, *fresh.seen), strict=True):
        assert torch.equal(ours, theirs)
    table.enter([2], [rows[0]])
    assert not table.bias[1][2].any(), "the next request in the row has no bias"


def test_a_step_sorts_no_more_candidates_than_its_rows_need():
    vocabulary = 5000

    def mode(*rows):
        joined = GREEDY
        for row in rows:
            joined = joined.join(Mode.of(row, vocabulary), vocabulary)
        return joined

    greedy, free, few, many, nucleus = (
        request(**options)
        for options in (
            {"temperature": 0, "top_k": 5},
            {},
            {"top_k": 20},
            {"top_k": 900},
            {"top_p": 0.9},
        )
    )
    assert mode(greedy, greedy) == GREEDY
    assert mode(greedy, free) == Mode(random=True)
    assert [mode(greedy, row).candidates for row in (few, many, nucleus)] == [64, 1024, vocabulary]
    assert (
        mode(few, many).candidates == 1024
        and mode(few, free).candidates == vocabulary == mode(free, few).candidates
    )
    assert mode(request(temperature=0, min_tokens=3)) == GREEDY, "there is no end to hold back"
    assert mode(request(temperature=0, min_tokens=3, end_ids=[1])) == Mode(biased=True)


def test_bias_and_min_tokens_move_only_their_tokens():
    logits = torch.arange(float(VOCABULARY))[None]
    assert choose(logits, [request(temperature=0, logit_bias={3: 100.0})]).item() == 3
    last = VOCABULARY - 1
    early, late = (
        request(temperature=0, min_tokens=2, end_ids=[last], answer=answer)
        for answer in ([0], [0, 0])
    )
    assert [choose(logits, [row]).item() for row in (early, late)] == [last - 1, last]


def test_logprobs_are_those_of_the_model_before_any_filter():
    logits = torch.randn(2, VOCABULARY)
    chosen, best, ids = top_logprobs(logits, torch.tensor([4, 0]), 3)
    reference = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, reference[[0, 1], [4, 0]])
    torch.testing.assert_close(best, reference.sort(descending=True).values[:, :3])
    assert ids[0, 0] == logits[0].argmax()


def test_seeds_of_any_size_are_kept_apart():
    seeds = [
        seed_of(seed, index) for seed in (0, 1, -5, 2**40, 2**63, 2**64 - 1) for index in range(50)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_one_candidate_is_always_taken():
    logits = torch.randn(500, VOCABULARY)
    rows = [request(i, seed=i, top_k=1) for i in range(500)]
    assert torch.equal(sample(logits, batch(rows)), logits.argmax(-1))
