"""Sampling on a GPU, by one kernel: the tokens of the CPU's ops for the same logits, whatever the
options.
"""

import pytest
import torch
from gpu_models import CUDA, load, make_engine, params, prompts, run

from flyweight.engine.graphs import Choice
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows

pytestmark = pytest.mark.gpu
VOCABULARY, ROWS = 5000, 21
STYLES = {
    "greedy": {},
    "plain": dict(temperature=0.9),
    "few": dict(temperature=0.9, top_k=20, top_p=0.9),
    "nucleus": dict(temperature=1.2, top_p=0.8),
    "least share": dict(temperature=1.2, min_p=0.05),
    "penalized": dict(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "biased": dict(logit_bias={3: 5.0, 4: -5.0}),
    "held": dict(temperature=1.0, min_tokens=9),
}


def rows_of(styles, device):
    rows = Rows(len(styles), pages=4, vocabulary=VOCABULARY, device=torch.device(device))
    rows.enter(
        [
            Request(
                number=i,
                prompt=list(range(i + 1)),
                seed=i * 77,
                limit=100,
                end_ids=frozenset([1, 2]),
                params=SamplingParams(**({"temperature": 0} | STYLES[style])).with_defaults({}),
            )
            for i, style in enumerate(styles)
        ]
    )
    rows.lengths[: len(styles)] = torch.arange(1, len(styles) + 1, dtype=torch.int32)
    return rows


@pytest.mark.parametrize(
    "styles",
    [*([style] * ROWS for style in STYLES), [*STYLES] * 3],
    ids=lambda styles: "all" if len(set(styles)) > 1 else styles[0],
)
def test_the_kernel_chooses_what_the_ops_of_the_cpu_choose(styles):
    here, there = rows_of(styles, "cpu"), rows_of(styles, "cuda")
    assert here.mode == there.mode and here.sampler is None and there.sampler is not None
    count, different = len(styles), 0
    for turn in range(6):
        logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(turn)) * 3
        on_gpu = logits.cuda()
        allowed = {2: torch.arange(VOCABULARY) % 3 == turn % 3} if turn > 2 else None
        if turn % 2:  # as behind a captured step
            here.advance(logits.argmax(-1))
            there.advance(on_gpu.argmax(-1))
            tokens = here.choose(logits, allowed=allowed)
            found = there.choose(on_gpu, allowed=allowed)
        else:  # as behind a pass, in any order
            order = torch.randperm(count)
            for rows in (here, there):
                rows.lengths[:count] += 1
            tokens = here.choose(logits, order, allowed)
            found = there.choose(on_gpu, order.cuda(), allowed)
            assert torch.equal(there.tokens[order.cuda()], found)
        different += int((found.cpu() != tokens).sum())
        here.tokens.copy_(there.tokens)
        if here.mode.penalized:
            here.sampling.seen[1].copy_(there.sampling.seen[1])
        assert torch.equal(here.lengths, there.lengths.cpu())
    assert different <= 1, (
        "logarithms may differ in the last bit, and so may one token in a hundred"
    )


def test_a_captured_step_draws_what_is_drawn_behind_it(monkeypatch):
    """And one graph is enough for every mix of temperatures and filters."""
    decoder = load("tiny", "int4", CUDA, torch.bfloat16)
    kinds = ["plain", "few", "nucleus", "held", "greedy"]
    mixes = [kinds, ["nucleus"] * 5, ["greedy", "few", "biased", "least share", "plain"]]
    asked = prompts(decoder.config, 5, longest=40)

    def answers(engine, kinds):
        options = [
            params(**STYLES[kind], max_tokens=20, seed=7 + i) for i, kind in enumerate(kinds)
        ]
        return run(
            engine,
            [engine.submit(prompt, each)[0] for prompt, each in zip(asked, options, strict=True)],
        )

    engine = make_engine(decoder)
    inside = [answers(engine, mixes[0])]
    captured = set(engine.runner.steps.graphs)
    assert (8, Choice.SAMPLED) in captured
    inside += [answers(engine, mix) for mix in mixes[1:]]
    assert set(engine.runner.steps.graphs) == captured
    monkeypatch.setattr(Rows, "samples_in_step", False)
    assert inside == [answers(make_engine(decoder), mix) for mix in mixes]
