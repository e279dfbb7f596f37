"""Captured passes on a GPU: the very bits of the same pass launched kernel by kernel, and the
logits of unpadded ones.
"""

import sys
from pathlib import Path

import pytest
import torch
from gpu_models import CUDA, PAGE, gap_where_parted, load, make_engine, params, prompts, run
from padded_story import Story

from flyweight.engine.passes import PassGraphs, unsupported_reason
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from families import small_config

pytestmark = pytest.mark.gpu
# W8A8 rounds otherwise where attention's last bit differs
BOUND = {"bf16": 0.03, "int4": 0.03, "w8a16": 0.03, "w8a8": 0.1}
# prompts alone, below and above where torch's attention takes them; prompts beside answers and
# chunks
STEPS = [
    [(0, 300)],
    [(1, 40)],
    [(2, 384)],
    [(3, 16)],
    [(0, 1), (1, 1), (4, 200)],
    [(2, 1), (3, 1), (5, 190)],
    [(0, 1), (2, 1), (6, 210)],
    [(1, 120)],
    [(0, 1), (1, 1), (2, 1), (3, 1), (5, 1)],
    [(7, 600)],
    [(4, 100), (5, 60), (0, 1)],
    [(3, 500), (6, 90), (2, 1)],
]


@pytest.mark.parametrize("scheme", BOUND)
def test_captured_passes_are_the_passes_launched_one_by_one(scheme):
    decoder = load("tiny", scheme, CUDA, torch.bfloat16)
    assert unsupported_reason(decoder, PAGE) is None
    story = Story(decoder, tolerance=BOUND[scheme], page=PAGE, length=640)
    graphs = PassGraphs(decoder, story.padded, story.rows)

    def forward(batch):
        # by the third time from a graph
        first, second, third = (graphs.forward(batch).clone() for _ in range(3))
        assert torch.equal(first, second) and torch.equal(first, third)
        return third

    story.forward = forward
    for spans in STEPS:
        story.step(*spans, into=graphs.inputs)
    assert len(graphs.held) < len(STEPS) and all(
        one.graph is not None for one in graphs.held.values()
    )


def test_prompts_of_latent_attention_are_captured_where_they_are_alone():
    config = small_config("deepseek-v2-lite", 2, tiny=True)
    decoder = Decoder.load(
        PresetWeights(config, "bf16", device=CUDA), device=CUDA, dtype=torch.bfloat16
    )
    story = Story(decoder, tolerance=BOUND["bf16"], page=PAGE, length=640)
    graphs = PassGraphs(decoder, story.padded, story.rows, alone=True)
    story.forward = graphs.forward
    for spans in ([(0, 300)], [(1, 40)], [(2, 384)], [(3, 310)], [(4, 384)]):
        story.step(*spans, into=graphs.inputs)
    assert len(graphs.held) == 3 and all(one.graph is not None for one in graphs.held.values())


@pytest.mark.parametrize("turns", [False, True])
def test_requests_that_come_while_others_answer_are_served_by_captured_passes(turns):
    decoder = load("tiny", "bf16", CUDA, torch.bfloat16)
    asked, answers = prompts(decoder.config, 40, longest=200), []
    for captured in (False, True):
        engine = make_engine(decoder)
        if not captured:
            engine.runner.passes = None
        elif turns:
            engine.scheduler.turn_tokens = 512
            engine.runner.passes.warm_up()
            engine.runner.passes.warm_up_parts()
        requests = []
        for prompt in asked:  # one every third step, so that most passes are mixed
            requests += engine.submit(prompt, params(max_tokens=24, logprobs=8))
            for _ in range(3):
                engine.step()
        run(engine, requests)
        answers.append(requests)
    assert sum(one.graph is not None for one in engine.runner.passes.held.values()) > 3
    first = [(one.logprobs[0], other.logprobs[0]) for one, other in zip(*answers, strict=True)]
    assert sum(one.token_id == other.token_id for one, other in first) > 36
    assert all(
        abs(one.logprob - other.logprob) < 0.1
        for one, other in first
        if one.token_id == other.token_id
    )
    parted = [
        gap
        for one, other in zip(*answers, strict=True)
        if (gap := gap_where_parted(one, other)) is not None
    ]
    assert all(gap < 0.2 for gap in parted), (
        "where answers part, two tokens were as good as each other"
    )
