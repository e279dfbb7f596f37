"""Sampled answers have the model's own distribution, whoever guesses: chi-square over a hundred thousand continuations."""

import pytest
import torch
from toy_engine import SHAPE

from flyweight.engine.core import Engine
from flyweight.engine.request import SamplingParams
from flyweight.engine.speculation.model import ModelDrafter
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.speculator import Speculator

VOCABULARY, SEQUENCES, TOKENS, GUESSES = 6, 64, 1600, 3


class Chain:
    """What comes next depends on the last token alone, so the true probabilities are a table."""

    def __init__(self, seed: int, mixed_with: torch.Tensor | None = None):
        self.logits = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        if mixed_with is not None:
            self.logits = mixed_with + 0.4 * self.logits

    def forward(self, batch, caches):
        return self.logits[batch.tokens[batch.output_rows]]


class Always:
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
    return ModelDrafter(Chain(9, chain.logits), SHAPE, vocabulary=VOCABULARY, device=torch.device("cpu"), context=TOKENS + 64,
                        sequences=SEQUENCES, blocks=SEQUENCES * (TOKENS // 16 + 4), block_size=16)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_continuations_follow_the_model(kind):
    chain = Chain(1)
    engine = Engine(chain, SHAPE, vocabulary=VOCABULARY, device=torch.device("cpu"), max_model_len=TOKENS + 64,
                    blocks=SEQUENCES * (TOKENS // 16 + 4), block_size=16, max_num_seqs=SEQUENCES, prefix_cache=False,
                    max_num_batched_tokens=SEQUENCES * (1 + GUESSES))
    engine.speculator = Speculator(make_drafter(kind, chain), Always())
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True).with_defaults({})
    requests = [engine.submit([number % VOCABULARY], params)[0] for number in range(SEQUENCES)]
    while engine.busy:
        engine.step()
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for request in requests:
        tokens = torch.tensor(request.tokens)
        counts.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1, dtype=torch.float64), accumulate=True)
    assert counts.sum() >= 100_000
    speculator = engine.speculator
    assert speculator.accepted > 10_000 and speculator.drafted - speculator.accepted > 10_000, "both kinds of guesses were made"
    expected = counts.sum(1, keepdim=True) * chain.logits.double().softmax(-1)
    statistic = ((counts - expected).square() / expected).sum()
    freedom = VOCABULARY * (VOCABULARY - 1)
    p_value = 1 - torch.special.gammainc(torch.tensor(freedom / 2.0, dtype=torch.float64), statistic / 2)
    assert p_value > 0.001, (statistic, freedom)
