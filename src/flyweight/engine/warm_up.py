"""What an engine does before its first request (`LLM.warm_up`), so that nobody waits for it."""

from __future__ import annotations

from flyweight.engine.core import Engine
from flyweight.engine.request import SamplingParams

ANSWER = 4  # tokens


def capture_all(engine: Engine, *, beside_answers: bool) -> None:
    """Greedy decode steps and passes of every size, and where prompts run beside answers also parts
    of passes; nothing on a CPU, which captures none.
    """
    runner = engine.runner
    for captured in (runner.steps, runner.passes):
        if captured is not None:
            captured.warm_up()
    if runner.passes is not None and beside_answers:
        runner.passes.warm_up_parts()
        runner.passes.warm_up_long(engine.scheduler.max_num_batched_tokens)
    if engine.speculator is not None:
        engine.speculator.drafter.warm_up()
        if runner.shared_steps is not None:
            runner.shared_steps.warm_up()


def first_requests(engine: Engine) -> tuple[list[list[int]], list[SamplingParams]]:
    """A greedy one behind a prompt longer than one pass, and a sampled one: what they launch is
    compiled and allocated then.
    """
    most = min(engine.max_model_len - 2 * ANSWER, engine.scheduler.max_num_batched_tokens + 1)
    params = [
        SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=ANSWER, ignore_eos=True),
    ]
    return [[1] * max(1, most), [1, 1, 1]], params
