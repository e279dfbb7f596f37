"""Perplexity: every token scored once, and the number a plain transformers evaluation gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyweight.errors import OptionError
from flyweight.quant.evaluate import Remembered, Window, compare, cut_windows, perplexity
from flyweight.quant.subject import encode

TEXT = (
    "The lighthouse keeper counted the ships as they passed, one by one, into the grey of the "
    "evening. There had been\nseven in the morning and nine by noon, and now, with the wind "
    "turning north, he expected no more than two. He wrote the\nnumbers into the book, closed "
    "it, and went up the stairs to light the lamp. It had burned every night for a hundred and\n"
    "four years, through three wars and one very long winter, and nobody could say any longer "
    "who had lit it first. "
)


@settings(max_examples=200)
@given(
    length=st.integers(2, 60),
    window=st.integers(2, 20),
    share=st.floats(0.05, 1),
    bos=st.sampled_from([None, 99]),
)
def test_every_token_is_scored_once_with_the_context_the_stride_promises(
    length, window, share, bos
):
    stride = max(1, int(window * share))
    scored = []
    for item in cut_windows(list(range(length)), window=window, stride=stride, bos=bos):
        body = item.tokens if bos is None else item.tokens[1:]
        assert len(body) <= window and (bos is None or item.tokens[0] == bos)
        scored += item.tokens[-item.scored :]
        if scored[-1] > window and len(body) == window:
            assert len(body) - item.scored >= min(window - stride, 1)
    expected = [
        token
        for token in range(length)
        if bos is not None or token % stride or (token and stride < window)
    ]
    assert scored == expected


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 9), (8, -1)])
def test_windows_that_do_not_fit_are_refused(window, stride):
    with pytest.raises(OptionError, match="window"):
        cut_windows([1, 2, 3], window=window, stride=stride)
    with pytest.raises(OptionError, match="too short"):
        cut_windows([1], window=8)


class Uniform:
    """Knows nothing: every token has the same probability."""

    device = torch.device("cpu")

    def forward_whole(self, tokens):
        return torch.zeros(*tokens.shape, 50)


def test_knowing_nothing_is_as_perplexing_as_the_vocabulary():
    seen = []
    result = perplexity(
        Uniform(), list(range(40)), window=16, batch=4, progress=lambda *now: seen.append(now)
    )
    assert math.isclose(result.perplexity, 50, rel_tol=1e-6) and result.error < 1e-6
    assert result.tokens == 37 and seen[-1][:2] == (37, 37)


def test_the_standard_error_is_that_of_the_mean_loss():
    class Random(Uniform):
        def forward_whole(self, tokens):
            return torch.randn(
                *tokens.shape, 50, generator=torch.Generator().manual_seed(int(tokens[0, 0]))
            )

    tokens = list(range(50))
    losses = []
    for item in cut_windows(tokens, window=10):
        assert isinstance(item, Window)
        ids = torch.tensor(item.tokens)
        logprobs = Random().forward_whole(ids[None])[0].double().log_softmax(-1)
        losses += [-logprobs[i, ids[i + 1]].item() for i in range(9)]
    losses = torch.tensor(losses)
    result = perplexity(Random(), tokens, window=10)
    assert math.isclose(result.perplexity, losses.mean().exp().item(), rel_tol=1e-5)
    assert math.isclose(
        result.error, (losses.mean().exp() * losses.std() / math.sqrt(45)).item(), rel_tol=1e-4
    )


def test_perplexity_agrees_with_plain_transformers_to_four_digits(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.models.decoder import Decoder

    ids, bos = encode(AutoTokenizer.from_pretrained(smollm2), TEXT)
    assert bos is None
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    decoder = Decoder.load(Checkpoint(smollm2), device="cpu", dtype=torch.float32, exact=True)
    for stride in (48, 20):
        expected, count = perplexity_of_transformers(model, ids, window=48, stride=stride)
        result = perplexity(decoder, ids, window=48, stride=stride)
        assert result.tokens == count
        assert math.isclose(result.perplexity, expected, rel_tol=5e-5)


def perplexity_of_transformers(model, ids, *, window, stride):
    """As its documentation does it; and of how many tokens."""
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        targets = inputs.clone()
        targets[:, : -(end - previous)] = -100
        scored = int((targets[:, 1:] != -100).sum())
        with torch.inference_mode():
            total += float(model(inputs, labels=targets).loss) * scored
        count, previous = count + scored, end
        if end == len(ids):
            break
    return math.exp(total / count), count


def test_an_original_is_run_once_however_many_are_compared_with_it():
    class Counted(Uniform):
        runs = 0

        def forward_whole(self, tokens):
            self.runs += 1
            return super().forward_whole(tokens)

    counted = Counted()
    original = Remembered(counted)
    perplexity(original, list(range(40)), window=16)
    for _ in range(2):
        compare(original, Uniform(), list(range(40)), window=16)
    assert counted.runs == 3  # windows
    original.ROOM = 0
    perplexity(original, list(range(1, 41)), window=16)
    assert len(original.kept) == 3


def test_models_whose_vocabularies_are_padded_differently_are_compared_on_what_both_know():
    """Qwen2.5 has 151,936 rows in its small models and 152,064 in its large ones."""

    class Padded(Uniform):
        def __init__(self, padding):
            self.padding = padding

        def forward_whole(self, tokens):
            generator = torch.Generator().manual_seed(3)
            logits = torch.randn(1, tokens.shape[1], 50, generator=generator)
            return torch.nn.functional.pad(logits, (0, self.padding), value=-1.0)

    tokens = list(range(40))
    for first, second in ((0, 7), (7, 0)):
        found, agreement = compare(Padded(first), Padded(second), tokens, window=16)
        alone = perplexity(Padded(second), tokens, window=16)
        assert found.perplexity == pytest.approx(alone.perplexity), "as without a comparison"
        assert agreement.kl == pytest.approx(0, abs=1e-6) and agreement.top1 == 1
