"""Sampled answers have the model's own distribution, whoever guesses: chi-square over a hundred
thousand continuations.
"""

import pytest
import torch
from toy_engine import SHAPE

from flyweight.engine.core import Engine
from flyweight.engine.request import SamplingParams
from flyweight.engine.rows import Rows
from flyweight.engine.sampling import Mode, sample, seed_of
from flyweight.engine.speculation.model import ModelDrafter
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.speculator import Speculator
from flyweight.engine.speculation.verify import choose_after_drafts, count_accepted

VOCABULARY, SEQUENCES, TOKENS, GUESSES = 6, 64, 160, 3
CONTINUATIONS = 100_000


class Chain:
    """What comes next depends on the last token alone, so the true probabilities are a table."""

    def __init__(self, seed: int, mixed_with: torch.Tensor | None = None):
        self.logits = 1.5 * torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)
        )
        if mixed_with is not None:
            self.logits = mixed_with + 0.4 * self.logits

    def forward(self, batch, caches):
        return self.logits[batch.tokens[batch.output_rows]]


class Always:
    most_sequences = 1000

    def most(self, requests):
        return {request.number: GUESSES for request in requests}

    def learn(self, seconds, rows):
        pass

    def observe(self, request, drafted, accepted):
        pass

    def forget(self, request):
        pass


def make_drafter(kind: str, chain: Chain):
    if kind == "ngram":
        return NgramDrafter()
    return ModelDrafter(
        Chain(9, chain.logits),
        SHAPE,
        vocabulary=VOCABULARY,
        device=torch.device("cpu"),
        context=TOKENS + 64,
        sequences=SEQUENCES,
        blocks=SEQUENCES * (TOKENS // 16 + 4),
        block_size=16,
    )


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of the chi-square statistic of rows of counts, each against its own probabilities."""
    expected = counts.sum(1, keepdim=True) * probabilities
    statistic = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor(counts.shape[0] * (counts.shape[1] - 1) / 2.0, dtype=torch.float64)
    return float(1 - torch.special.gammainc(freedom, statistic / 2))


def guesses(
    kind: str, chain: Chain, rows: Rows, first: torch.Tensor, every: torch.Tensor
) -> torch.Tensor:
    """[continuations, 2]: of the same earlier text for all, or of another chain that draws with the
    same noise.
    """
    if kind == "ngram":
        return torch.tensor([[1, 4], [0, 0], [2, 3], [5, 1], [3, 3], [0, 2]])[first]
    other, found, last = Chain(9, chain.logits), [], first
    for position in (1, 2):
        last = sample(
            other.logits[last],
            rows.sampling.batch(rows.mode, torch.full_like(every, position), every),
        )
        found.append(last)
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_hundred_thousand_continuations_follow_the_model(kind):
    """Two tokens after each of the six: two guesses checked, and where fewer are kept the next
    token sampled plainly.
    """
    chain, every = Chain(1), torch.arange(CONTINUATIONS)
    first = every % VOCABULARY
    rows = Rows(CONTINUATIONS, pages=1, vocabulary=VOCABULARY, device=torch.device("cpu"))
    rows.mode = Mode(random=True)
    rows.sampling.integers[0] = 0
    rows.sampling.integers[1] = torch.tensor(
        [seed_of(3, number) for number in range(CONTINUATIONS)]
    )
    drafts = guesses(kind, chain, rows, first, every)
    inputs = torch.cat([first[:, None], drafts], 1)  # [continuations, 3]
    positions = torch.arange(1, 4).repeat(CONTINUATIONS)
    chosen = choose_after_drafts(
        chain.logits[inputs.flatten()], rows, [], every.repeat_interleave(3), positions
    ).view(-1, 3)
    kept = [count_accepted(*pair) for pair in zip(drafts.tolist(), chosen.tolist(), strict=True)]
    right = torch.tensor(kept) > 0
    assert 0.05 < right.double().mean() < 0.95
    plain = sample(
        chain.logits[chosen[:, 0]], rows.sampling.batch(rows.mode, torch.full_like(every, 2), every)
    )
    second = torch.where(right, chosen[:, 1], plain)
    counts = torch.zeros(VOCABULARY, VOCABULARY**2, dtype=torch.float64)
    counts.index_put_(
        (first, chosen[:, 0] * VOCABULARY + second),
        torch.ones(CONTINUATIONS, dtype=torch.float64),
        accumulate=True,
    )
    chances = chain.logits.double().softmax(-1)
    assert p_value(counts, (chances[:, :, None] * chances[None]).flatten(1)) > 0.001
    assert p_value(counts, (chances[:, :, None] * chances.flip(1)[None]).flatten(1)) < 1e-9, (
        "another chain would be told apart"
    )


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_answers_of_an_engine_follow_the_model(kind):
    chain = Chain(1)
    engine = Engine(
        chain,
        SHAPE,
        vocabulary=VOCABULARY,
        device=torch.device("cpu"),
        max_model_len=TOKENS + 64,
        blocks=SEQUENCES * (TOKENS // 16 + 4),
        block_size=16,
        max_num_seqs=SEQUENCES,
        prefix_cache=False,
        max_num_batched_tokens=SEQUENCES * (1 + GUESSES),
    )
    engine.speculator = Speculator(make_drafter(kind, chain), Always())
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True).with_defaults({})
    requests = [engine.submit([number % VOCABULARY], params)[0] for number in range(SEQUENCES)]
    while engine.busy:
        engine.step()
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for request in requests:
        tokens = torch.tensor(request.tokens)
        counts.index_put_(
            (tokens[:-1], tokens[1:]),
            torch.ones(len(tokens) - 1, dtype=torch.float64),
            accumulate=True,
        )
    assert counts.sum() >= 10_000
    speculator = engine.speculator
    assert speculator.accepted > 500 and speculator.drafted - speculator.accepted > 500, (
        "both kinds of guesses were made"
    )
    assert p_value(counts, chain.logits.double().softmax(-1)) > 0.001
