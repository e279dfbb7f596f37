"""A drafting head in captured steps guesses what it guesses step by step, and answers stay the
same.
"""

import pytest
import torch
from gpu_models import BEST, CUDA, gap_where_parted, load, make_engine, params, prompts, run

from flyweight.engine.speculation.head import HeadDrafter, tap
from flyweight.engine.speculation.late import LateDrafts
from flyweight.engine.speculation.lengths import Fixed
from flyweight.engine.speculation.speculator import Speculator
from flyweight.models.heads import eagle3

pytestmark = pytest.mark.gpu
GAP = 0.1


class Watched:
    """What the head guessed after each text, of which the first two are then replaced by what is
    right.
    """

    def __init__(self, drafter, texts):
        self.drafter = drafter
        self.texts = texts
        self.seen = {}

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def guesses_unread(self, works):
        return False

    def propose(self, requests, most):
        found = self.drafter.propose(requests, most)
        for request in requests:
            if (guesses := found.get(request.number)) is not None:
                self.seen[tuple(request.tokens)] = guesses = list(guesses)
                text = next(
                    (text for text in self.texts if text[: len(request.tokens)] == request.tokens),
                    [],
                )
                begin = len(request.tokens)
                right = text[begin : begin + 1 + begin % 3]
                found[request.number] = [*right, *guesses[len(right) :]][: most[request.number]]
        return found


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_captured_guesses_are_those_made_step_by_step(scheme):
    decoder = load("tiny", scheme, CUDA, torch.bfloat16)
    asked = prompts(decoder.config, 4)
    plain = make_engine(decoder)
    want = [plain.submit(prompt, params(logprobs=BEST)) for prompt in asked]
    run(plain, [one for (one,) in want])
    texts = [one.tokens for (one,) in want]
    head = eagle3.load(
        eagle3.RandomHead(decoder, 512), decoder, bits=4 if scheme == "int4" else None
    )
    tap(decoder, head)
    seen = []
    for captured in (True, False):
        engine = make_engine(decoder)
        drafter = HeadDrafter(head, engine.runner, guesses=3)
        if captured:
            drafter.warm_up()
        else:
            drafter.graphs = None
            engine.runner.steps = engine.runner.shared_steps = engine.runner.passes = None
        watched = Watched(drafter, texts)
        engine.speculator = Speculator(watched, Fixed(3))
        got = [engine.submit(prompt, params(logprobs=BEST)) for prompt in asked]
        run(engine, [one for (one,) in got])
        gaps = [gap_where_parted(one, other) for (one,), (other,) in zip(want, got, strict=True)]
        print(scheme, captured, engine.speculator.accepted, "of", engine.speculator.drafted, gaps)
        assert all(gap is None or gap < GAP for gap in gaps)
        assert engine.speculator.accepted > 60
        seen.append(watched.seen)
    common = seen[0].keys() & seen[1].keys()
    alike = [
        sum(
            seen[0][text][i] == seen[1][text][i]
            for text in common
            if len(seen[0][text]) > i < len(seen[1][text])
        )
        for i in range(3)
    ]
    print(scheme, "alike:", alike, "of", len(common))
    assert len(common) > 40 and alike[0] > 0.85 * len(common) and alike[2] > 0.5 * len(common)


@pytest.mark.parametrize("unread", [False, True])
def test_guesses_that_the_host_has_not_read_are_those_that_are_checked(unread):
    """The guesses are made right on the device, where the step takes them from. `unread`: and steps
    are launched behind them before anybody knows which were right.
    """
    decoder = load("tiny", "bf16", CUDA, torch.bfloat16)
    asked = prompts(decoder.config, 3)
    plain = make_engine(decoder)
    want = [plain.submit(prompt, params(logprobs=BEST)) for prompt in asked]
    run(plain, [one for (one,) in want])
    head = eagle3.load(eagle3.RandomHead(decoder, 1000), decoder)
    tap(decoder, head)
    engine = make_engine(decoder)
    drafter = HeadDrafter(head, engine.runner, guesses=3)
    texts = {tuple(one.prompt): one.tokens for (one,) in want}
    ready, behind = drafter.guesses_unread, []
    drafter.guesses_unread = lambda works: unread and ready(works)
    propose = drafter.propose

    def propose_right(requests, most):
        found = propose(requests, most)
        for request in requests:
            behind.append(request.pending > 1)
            begin = request.length  # those in flight are right
            drafts = found.get(request.number)
            text = texts[tuple(request.prompt)][begin : begin + 3]
            if isinstance(drafts, LateDrafts) and len(text) == 3:
                with torch.inference_mode():
                    drafts.arrival.found[:3, drafts.column] = torch.tensor(text, device=CUDA)
                drafts.arrival.columns[drafts.column] = text
        return found

    drafter.propose = propose_right
    engine.speculator = Speculator(drafter, Fixed(3))
    got = [engine.submit(prompt, params(logprobs=BEST)) for prompt in asked]
    run(engine, [one for (one,) in got])
    gaps = [gap_where_parted(one, other) for (one,), (other,) in zip(want, got, strict=True)]
    print(engine.speculator.accepted, "of", engine.speculator.drafted, gaps)
    assert all(gap is None or gap < GAP for gap in gaps)
    assert engine.speculator.accepted > 0.5 * engine.speculator.drafted
    assert any(behind) == unread
