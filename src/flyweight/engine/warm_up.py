"""What an engine does before its first request, so that nobody waits for it: compile, capture and
allocate. A server and a measurement of one both call `warm_up`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyweight.engine.request import SamplingParams

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM

ANSWER = 4  # tokens


def warm_up(llm: LLM) -> None:
    """Decode steps and passes of every size, then two requests: a greedy one behind a prompt longer
    than one pass, and a sampled one. Nothing of them stays in the prefix cache.
    """
    llm.warm_up()
    engine = llm.engine
    most = min(engine.max_model_len - 2 * ANSWER, engine.scheduler.max_num_batched_tokens + 1)
    prompts = [[1] * max(1, most), [1, 1, 1]]
    params = [
        SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=ANSWER, ignore_eos=True),
    ]
    llm.generate(prompts, params)
    engine.pool.forget()
