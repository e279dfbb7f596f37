"""Sampling on a GPU: the CPU's tokens for the same logits, eager and captured, whatever the options."""

import pytest
import torch

from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows

pytestmark = pytest.mark.gpu
VOCABULARY, ROWS = 5000, 21
STYLES = {
    "greedy": {}, "plain": dict(temperature=0.9), "few": dict(temperature=0.9, top_k=20, top_p=0.9),
    "nucleus": dict(temperature=1.2, top_p=0.8), "least share": dict(temperature=1.2, min_p=0.05),
    "penalized": dict(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "biased": dict(logit_bias={3: 5.0, 4: -5.0}), "held": dict(temperature=1.0, min_tokens=9),
}


def rows_of(styles, device):
    rows = Rows(len(styles), pages=4, vocabulary=VOCABULARY, device=torch.device(device))
    rows.enter([Request(number=i, prompt=list(range(i + 1)), seed=i * 77, limit=100, end_ids=frozenset([1, 2]),
                        params=SamplingParams(**({"temperature": 0} | STYLES[style])).with_defaults({}))
                for i, style in enumerate(styles)])
    rows.lengths[: len(styles)] = torch.arange(1, len(styles) + 1, dtype=torch.int32)
    return rows


@pytest.mark.parametrize("styles", [*([style] * ROWS for style in STYLES), [*STYLES] * 3],
                         ids=lambda styles: "all" if len(set(styles)) > 1 else styles[0])
def test_a_captured_choice_is_that_of_the_cpu(styles):
    here, there = rows_of(styles, "cpu"), rows_of(styles, "cuda")
    assert here.mode == there.mode
    count, size = len(styles), there.capacity
    logits = torch.empty(size, VOCABULARY, device="cuda")

    def step():
        there.advance(there.choose(logits, there.mode, slice(0, size), there.lengths[:size].long()), there.mode, size)

    there.choose(logits.zero_(), there.mode, slice(0, size), there.lengths[:size].long())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    different = 0
    for turn in range(6):
        fresh = torch.randn(size, VOCABULARY, generator=torch.Generator().manual_seed(turn)) * 3
        logits.copy_(fresh)
        graph.replay()
        tokens = here.choose(fresh[:count], here.mode, slice(0, count), here.lengths[:count].long())
        different += int((there.tokens[:count].cpu() != tokens).sum())
        here.advance(there.tokens[:count].cpu(), here.mode, count)
        assert torch.equal(here.lengths[:count], there.lengths[:count].cpu())
        assert not there.lengths[count:].any(), "rows that nobody uses stay at length 0"
    assert different <= 1, "logarithms may differ in the last bit, and so may one token in a hundred"
