"""The sampling kernel on a GPU: the sets and frequencies of float64, and rows that know nothing of
each other.
"""

import math
import os

import pytest
import torch
from sampling_rows import Asked, kept_by, table_of

from flyweight.kernels.sample import Masks, Plan, Sampler
from flyweight.kernels.sample_reference import Filters, kept

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
DRAWS = int(os.environ.get("FLYWEIGHT_DRAWS", 10**6))
FILTERS = [
    Filters(),
    Filters(top_k=1),
    Filters(top_k=20),
    Filters(0.7, top_k=5000),
    Filters(top_p=0.9),
    Filters(1.3, top_p=0.999),
    Filters(top_p=1e-5),
    Filters(min_p=0.05),
    Filters(0.6, top_k=20, top_p=0.95),
    Filters(2.0, top_k=50_000, top_p=0.5, min_p=0.01),
    Filters(0.01, top_p=0.5),
    Filters(0.7, top_p=0.9),
]
MODES = {
    "temperature": Filters(0.8),
    "top_k": Filters(top_k=20),
    "top_p": Filters(0.9, top_p=0.9),
    "min_p": Filters(min_p=0.02),
    "all": Filters(0.6, top_k=20, top_p=0.95, min_p=0.01),
    "wide": Filters(1.5, top_p=0.999),
}
LOGITS = {
    "usual": lambda size: torch.randn(size) * 3,
    "flat": lambda size: torch.randn(size) * 1e-3,
    "ties": lambda size: torch.randint(-2, 3, (size,)).float(),
    "equal": torch.zeros,
    "one far ahead": lambda size: torch.randn(size).index_fill_(0, torch.tensor([size // 2]), 60.0),
    "one alone": lambda size: torch.full((size,), -math.inf).index_fill_(
        0, torch.tensor([size - 3]), -2.0
    ),
    "masked": lambda size: (torch.randn(size) * 2).masked_fill_(torch.rand(size) < 0.99, -math.inf),
}


def sample(logits, asked, *, table=None, plan=None, **options):
    """(tokens, bounds) of these rows."""
    table = table or table_of(asked, logits.shape[1], DEVICE)
    bounds = torch.full((len(logits),), -1, device=DEVICE)
    Sampler(logits.shape[1], DEVICE, plan=plan)(logits, table, bounds=bounds, **options)
    return table.tokens.cpu(), bounds.tolist()


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (32_000, torch.bfloat16),
        (32_001, torch.float32),
        (128_256, torch.float16),
        (151_936, torch.bfloat16),
        (262_144, torch.float32),
    ],
)
def test_what_is_kept_is_what_float64_keeps(kind, size, dtype):
    one = LOGITS[kind](size).to(dtype).to(DEVICE)
    tokens, bounds = sample(
        one.expand(len(FILTERS), -1), [Asked(filters, seed=i) for i, filters in enumerate(FILTERS)]
    )
    wide = one.double()
    for i, filters in enumerate(FILTERS):
        want = kept(one.float(), filters)
        mass = ((wide - wide.max()) / filters.temperature).exp()
        found = kept_by(bounds[i], one).to(DEVICE) & (mass >= filters.min_p)
        # nothing that is lighter than 1e-12 of the largest can be told from nothing
        assert not ((found != want.tokens) & ~want.close & (mass > 1e-12)).any(), filters
        assert want.tokens[tokens[i]] or want.close[tokens[i]]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1, 1024),
        *(pytest.param(one, marks=pytest.mark.hopper) for one in (Plan(2, 1024), Plan(4, 512))),
    ],
    ids=str,
)
def test_every_plan_keeps_and_draws_the_same(plan):
    asked = [Asked(filters, seed=i) for i, filters in enumerate(FILTERS)]
    logits = torch.randn(len(asked), 50_257, device=DEVICE)
    tokens, bounds = sample(logits, asked)
    other, other_bounds = sample(logits, asked, plan=plan)
    assert bounds == other_bounds and (tokens != other).sum() == 0


def check_frequencies(counts, want, draws):
    """Chi-square of what is kept, tokens that are expected fewer than 5 times taken together."""
    expected = want.probabilities.cpu() * draws
    assert counts.sum() == draws and not counts[~want.tokens.cpu() & ~want.close.cpu()].any()
    few = expected < 5
    if expected[few].sum() >= 5:
        expected = torch.cat([expected[~few], expected[few].sum()[None]])
        counts = torch.cat([counts[~few], counts[few].sum()[None]])
    else:
        expected, counts = expected[~few], counts[~few]
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), (
        "four standard deviations from what chance gives"
    )


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("mode", MODES)
def test_frequencies_are_those_of_float64(mode, rows):
    """Captured launches of so many rows, each at its next position. One row a launch draws a tenth:
    what a row gets depends on nothing else, which is tested below.
    """
    size, draws = 1000, DRAWS // (10 if rows == 1 else 1)
    logits = torch.randn(size, device=DEVICE) * 2
    asked = [Asked(MODES[mode], seed=99, length=1 + i * 10**6) for i in range(rows)]
    table, sampler = table_of(asked, size, DEVICE), Sampler(size, DEVICE)
    counts = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(rows, dtype=torch.int64, device=DEVICE)

    def step():
        sampler(logits.expand(rows, -1), table)
        counts.index_add_(0, table.tokens, ones)
        table.lengths.add_(1)

    step()
    torch.cuda.synchronize()
    counts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(125):
            step()
    replays = draws // (125 * rows)
    for _ in range(replays):
        graph.replay()
    check_frequencies(counts.cpu(), kept(logits, MODES[mode]), replays * 125 * rows)


def test_a_row_gets_the_same_alone_among_others_and_again():
    asked = [Asked(FILTERS[i % len(FILTERS)], seed=i // 3) for i in range(64)]
    logits = (torch.randn(64, 151_936, device=DEVICE) * 2).bfloat16()
    together, bounds = sample(logits, asked)
    again, _ = sample(logits, asked)
    assert torch.equal(together, again)
    for i in range(64):
        token, bound = sample(logits[i : i + 1], [asked[i]])
        assert (token.item(), bound) == (together[i].item(), [bounds[i]])
    turned = torch.arange(63, -1, -1, device=DEVICE)
    table = table_of(asked, 151_936, DEVICE)
    chosen = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    sample(logits[turned].contiguous(), None, table=table, rows=turned, chosen=chosen)
    assert torch.equal(table.tokens.cpu(), together) and torch.equal(chosen.cpu(), together.flip(0))


def test_rows_of_nothing_get_a_token_and_masks_and_biases_hold():
    size = 32_001
    logits = torch.randn(5, size, device=DEVICE)
    logits[0], logits[1] = math.nan, -math.inf
    bits = torch.zeros(2, -(-size // 8), dtype=torch.uint8, device=DEVICE)
    bits[0, -1], bits[1, 7] = 1, 0b11  # the last token; 56 and 57
    masks = Masks(bits, torch.tensor([-1, -1, 0, 1, -1], dtype=torch.int32, device=DEVICE))
    for filters in (Filters(0.0), Filters(), Filters(top_k=30), Filters(0.5, top_k=30, top_p=0.9)):
        asked = [Asked(filters, seed=i) for i in range(4)] + [
            Asked(filters, bias=((5, 99.0, 99), (31_999, 200.0, 4)))
        ]
        tokens, _ = sample(logits, asked, masks=masks)
        assert tokens[:3].tolist() == [0, 0, size - 1] and tokens[3] in (56, 57) and tokens[4] == 5


def test_the_kernel_counts_what_it_has_chosen():
    logits = torch.zeros(2, 151_936, device=DEVICE)
    logits[:, 5], logits[:, 6] = 2.5, 2.0
    asked = [Asked(Filters(0.0), frequency=1.0), Asked(Filters(0.0))]
    table = table_of(asked, 151_936, DEVICE)
    for expected in (5, 6, 5, 6, 5):  # each choice costs its token 1.0
        assert sample(logits, None, table=table)[0].tolist() == [expected, 5]
    assert table.seen[1][0].sum() == 5 and not table.seen[1][1].any()
