"""The sampling kernel's own source on the CPU: which tokens it keeps and draws, against float64."""

import math
from dataclasses import replace

import host_cuda
import pytest
import torch
from sampling_rows import Asked, kept_by, table_of

from flyweight.engine.sampling import gumbel_noise
from flyweight.kernels.sample import Guessed, Masks, Plan, Sampler, When
from flyweight.kernels.sample_reference import Filters, kept

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
VOCABULARY = 1300  # three chunks of a thread, the last of them ragged
TWO = Plan(2, 32)


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)


def sample(logits, asked, *, plan=TWO, table=None, **options):
    """(tokens, bounds) of these rows."""
    table = table or table_of(asked, logits.shape[1])
    bounds = torch.full((len(logits),), -1)
    Sampler(logits.shape[1], torch.device("cpu"), plan=plan)(
        logits, table, bounds=bounds, **options
    )
    return table.tokens, bounds.tolist()


FILTERS = [
    Filters(),
    Filters(0.0),
    Filters(top_k=1),
    Filters(top_k=20),
    Filters(0.7, top_k=700),
    Filters(top_p=0.9),
    Filters(1.3, top_p=0.999),
    Filters(top_p=1e-5),
    Filters(min_p=0.05),
    Filters(0.6, top_k=20, top_p=0.95),
    Filters(2.0, top_k=5000, top_p=0.5, min_p=0.01),
    Filters(0.01, top_p=0.5),
]
LOGITS = {
    "usual": lambda: torch.randn(VOCABULARY) * 3,
    "flat": lambda: torch.randn(VOCABULARY) * 1e-3,
    "equal": lambda: torch.zeros(VOCABULARY),
    "ties": lambda: torch.randint(-2, 3, (VOCABULARY,)).float(),
    "one far ahead": lambda: torch.cat(
        [torch.randn(700), torch.tensor([80.0]), torch.randn(VOCABULARY - 701)]
    ),
    "negative": lambda: -torch.rand(VOCABULARY) * 1e4,
}


@pytest.mark.parametrize("kind", LOGITS)
def test_what_is_kept_is_what_float64_keeps(kind):
    logits = LOGITS[kind]().expand(len(FILTERS), -1).contiguous()
    asked = [Asked(filters, seed=i) for i, filters in enumerate(FILTERS)]
    tokens, bounds = sample(logits, asked)
    for i, filters in enumerate(FILTERS):
        if filters.temperature == 0:
            assert tokens[i] == (logits[i] == logits[i].max()).int().argmax()
            continue
        want = kept(logits[i], filters)
        mass = ((logits[i].double() - logits[i].max()) / filters.temperature).exp()
        found = kept_by(bounds[i], logits[i]) & (mass >= filters.min_p)
        assert not ((found != want.tokens) & ~want.close & (mass > 1e-12)).any(), filters
        assert want.tokens[tokens[i]] or want.close[tokens[i]]


@pytest.mark.parametrize(
    ("plan", "dtype"), [(Plan(1, 64), torch.bfloat16), (Plan(2, 32), torch.float16)], ids=str
)
def test_every_plan_and_type_keeps_and_draws_the_same(plan, dtype):
    asked = [Asked(FILTERS[which], seed=7 * which) for which in (0, 3, 5, 9, 10)]
    logits = (torch.randn(len(asked), VOCABULARY + 3) * 2).to(dtype)
    # the second: rows that begin anywhere
    for given in (logits[:, :VOCABULARY].contiguous(), logits[:, 3:]):
        tokens, bounds = sample(given, asked, plan=plan)
        want, want_bounds = sample(given.float().contiguous(), asked)
        assert tokens.tolist() == want.tolist() and bounds == want_bounds


def test_the_draw_is_the_largest_of_noise_and_logits_among_what_is_kept():
    """The noise of the torch path, bit by bit up to the last bits of logarithms."""
    filters = [Filters(0.8), Filters(top_p=0.8), Filters(top_k=9), Filters(min_p=0.1)]
    asked = [Asked(filters[i % 4], seed=(i * 77) << 29, length=3 + i) for i in range(24)]
    logits = torch.randn(24, VOCABULARY) * 2
    tokens, _ = sample(logits, asked)
    noise = gumbel_noise(
        torch.tensor([row.seed for row in asked]),
        torch.tensor([row.length - 1 for row in asked]),
        torch.arange(VOCABULARY),
    )
    for i, row in enumerate(asked):
        allowed = kept(logits[i], row.filters).tokens
        score = torch.where(allowed, logits[i] / row.filters.temperature + noise[i], -torch.inf)
        assert score[tokens[i]] >= score.max() - 1e-5


def test_a_row_gets_the_same_alone_among_others_and_at_another_place():
    asked = [Asked(filters, seed=5 * i + 1) for i, filters in enumerate(FILTERS)]
    logits = torch.randn(len(asked), VOCABULARY)
    together, bounds = sample(logits, asked)
    table = table_of(asked, VOCABULARY)
    order = torch.tensor([7, 2, 5])
    chosen = torch.zeros(3, dtype=torch.int64)
    _, at = sample(logits[order].contiguous(), None, table=table, rows=order, chosen=chosen)
    assert chosen.tolist() == together[order].tolist() == table.tokens[order].tolist()
    assert at == [bounds[i] for i in order]
    assert (table.tokens == -1).sum() == len(asked) - 3, "other rows are left alone"


def test_bias_penalties_and_masks_change_logits_before_the_filters():
    logits = torch.randn(4, VOCABULARY).bfloat16().float()
    greedy = Filters(0.0)
    asked = [
        Asked(greedy, length=5, bias=((3, 1.0, 99), (3, 50.0, 99), (1299, 40.0, 99))),
        Asked(greedy, length=5, bias=((700, 90.0, 4), (701, 60.0, 5))),  # the first has ended
        Asked(greedy, repetition=1.5, presence=0.3, frequency=2.0),
        Asked(greedy),
    ]
    table = table_of(asked, VOCABULARY)
    in_prompt, in_answer = table.seen
    best, second = logits[2].topk(2).indices.tolist()
    logits[2, best], logits[2, second] = 6.0, 3.0
    in_answer[2, best] = 1  # 6 / 1.5 − 2 − 0.3 = 1.7
    bits = torch.zeros(1, -(-VOCABULARY // 8), dtype=torch.uint8)
    bits[0, 1], bits[0, -1] = 0b00100100, 0b1000  # tokens 10, 13 and 1299
    masks = Masks(bits, torch.tensor([-1, -1, -1, 0], dtype=torch.int32))
    tokens, _ = sample(logits, None, table=table, masks=masks)
    assert tokens[:3].tolist() == [3, 701, second]
    assert tokens[3] == max((10, 13, 1299), key=lambda i: logits[3, i])
    assert in_answer[2, second] == 1 and in_answer.sum() == 2 and not in_prompt.any()


def test_a_row_with_nothing_to_choose_from_still_gets_a_token():
    nan = torch.full((VOCABULARY,), math.nan)
    holes = torch.randn(VOCABULARY)
    holes[::2], holes[1] = math.nan, math.inf
    few = torch.full((VOCABULARY,), -math.inf)
    few[9], few[12] = 1.0, 1.0
    logits = torch.stack([nan, torch.full((VOCABULARY,), -math.inf), holes, few, few])
    for filters in (Filters(0.0), Filters(), Filters(top_k=30), Filters(0.5, top_k=30, top_p=0.9)):
        tokens, _ = sample(logits, [Asked(filters, seed=i) for i in range(5)])
        assert tokens[:3].tolist() == [0, 0, 1]
        assert {*tokens[3:].tolist()} <= {9, 12}
    tokens, _ = sample(few[None].contiguous(), [Asked(Filters(top_k=1))])
    assert tokens.tolist() == [9], "of equals the first"


def test_rows_that_are_done_are_skipped():
    asked = [
        Asked(Filters(0.0)),
        Asked(Filters(top_k=1)),
        Asked(Filters(0.0), bias=((4, 99.0, 99),)),
    ]
    tokens, _ = sample(torch.randn(3, VOCABULARY), asked, when=When.AFTER_GREEDY)
    assert tokens[0] == -1 and tokens[1] >= 0 and tokens[2] == 4


def test_a_step_counts_the_token_and_leaves_rows_of_nobody_alone():
    """The same tokens as behind the step, whose lengths count them."""
    asked = [Asked(filters, seed=i, length=5 + i) for i, filters in enumerate(FILTERS)]
    logits = torch.randn(len(asked), VOCABULARY)
    want, _ = sample(logits, asked)
    table = table_of(asked, VOCABULARY)
    table.lengths.sub_(1)
    table.lengths[3] = 0
    tokens, _ = sample(logits, None, table=table, when=When.IN_STEP)
    assert table.lengths.tolist() == [0 if i == 3 else row.length for i, row in enumerate(asked)]
    assert tokens[3] == -1 and (tokens != want).nonzero().tolist() == [[3]]


def test_rows_of_one_sequence_are_drawn_for_their_own_positions():
    filters = Filters(0.9, top_p=0.9)
    logits = torch.randn(4, VOCABULARY)
    want, _ = sample(logits, [Asked(filters, seed=8, length=6 + i) for i in range(4)])
    table = table_of([Asked(), Asked(filters, seed=8, length=99)], VOCABULARY)
    chosen = torch.zeros(4, dtype=torch.int64)
    sample(
        logits,
        None,
        table=table,
        rows=torch.full((4,), 1),
        positions=torch.arange(5, 9),
        chosen=chosen,
    )
    assert chosen.tolist() == want.tolist() and table.tokens.tolist() == [-1, -1]


def test_candidates_that_are_too_many_for_one_block_are_counted_instead():
    """Of top_k: all tokens equal, one alone, and many ties; 32 candidates fit here."""
    size = VOCABULARY
    equal, one = torch.zeros(size), torch.full((size,), -math.inf)
    one[1001] = -3.0
    ties = torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(0)).float()
    logits = torch.stack([equal, one, ties])
    top_k = 40
    tokens, bounds = sample(logits, [Asked(Filters(top_k=top_k), seed=i) for i in range(3)])
    for row, token, bound in zip(logits, tokens, bounds, strict=True):
        want = kept(row, Filters(top_k=top_k)).tokens
        assert torch.equal(kept_by(bound, row), want) and want[token]


def test_penalties_count_guesses_before_a_row_and_nothing_that_may_not_stay():
    """Rows of one sequence, each with the guesses up to its own; another one's first row."""
    size = VOCABULARY
    asked = [Asked(Filters(0.0), repetition=2.0, frequency=1.0, length=99)] * 2
    table = table_of(asked, size)
    _, in_answer = table.seen
    in_answer[0, 700] = 1
    logits = torch.zeros(4, size)
    logits[:, 7], logits[:, 700], logits[:, 9] = 8.0, 7.0, 3.5
    before = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    guessed = Guessed(torch.tensor([700, 7, 700, 4]), before)
    chosen = torch.full((4,), -1)
    counts = in_answer.clone()
    sample(
        logits,
        None,
        table=replace(table, guessed=guessed),
        rows=torch.tensor([0, 0, 0, 1]),
        positions=torch.tensor([5, 6, 7, 5]),
        chosen=chosen,
    )
    # 7: 8, then 8 / 2 − 1 = 3; 700: 7 / 2 − 1 = 2.5 in the first row, 1.5 in the third
    assert chosen.tolist() == [7, 9, 9, 7]
    assert torch.equal(in_answer, counts)
    for row in (0, 1, 2):  # as if they stood in the answer
        alone = table_of(asked[:1], size)
        alone.seen[1][0] = counts[0]
        for token in guessed.tokens[1 : 1 + row].tolist():
            alone.seen[1][0, token] += 1
        assert sample(logits[row : row + 1], None, table=alone)[0][0] == chosen[row]
