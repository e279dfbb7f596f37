"""How long a step without guesses takes, tried out before any was needed."""

from __future__ import annotations

import torch

from flyweight.engine.runner import Runner

TRIED = 4  # steps


@torch.inference_mode()
def try_step(runner: Runner, count: int) -> float | None:
    """Seconds that a captured step of so many answers takes the device, a little less than with
    their tokens before them: for so long its rows are nobody's, so nothing is written. None where
    none is captured.
    """
    steps, lengths = runner.steps, runner.rows.lengths
    if runner.device.type != "cuda" or steps is None or not 0 < count <= steps.largest:
        return None
    held = lengths.clone()
    lengths.zero_()
    steps.logits(count)  # captures it
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TRIED):
        steps.logits(count)
    end.record()
    lengths.copy_(held)
    end.synchronize()
    return begin.elapsed_time(end) / TRIED / 1000
