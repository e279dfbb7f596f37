"""Which drafts are kept: those that the model's own sampler chooses.

The sampler runs on every row of a draft as if the guesses before it were true. Its noise is a
function of (seed, position), not of the step, so the token that it chooses after a right guess is
the very token that it would have chosen without any guess:

    guesses          d1   d2   d3
    rows        t    d1   d2   d3
    chosen      c1   c2   c3   c4        c1 = d1, c2 = d2, c3 ≠ d3   →   keep c1, c2, c3

So an answer does not depend on its drafts: greedy or sampled, it is the answer of the same seed
without speculation, and its distribution is the model's own. The usual rejection sampling has the
same distribution, but gives other tokens for a seed and needs the drafter's probabilities. A
drafter that samples with the same noise (`model.py`) is right nearly as often: with probability at
least (1 − d) / (1 + d), where d is the distance of the two distributions, instead of 1 − d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from flyweight.engine.rows import Rows
from flyweight.engine.sampling import GREEDY, SamplingBatch, likeliest, sample
from flyweight.engine.work import Work
from flyweight.kernels.sample import Guessed
from flyweight.transfer import upload


def count_accepted(drafts: Sequence[int], chosen: Sequence[int], first: int = 0) -> int:
    """How many drafts the sampler chose too, up to the first that it did not. `first`: where the
    first of them is among `chosen`.
    """
    for right, guess in enumerate(drafts):
        if guess != chosen[first + right]:
            return right
    return len(drafts)


def choose_after_drafts(
    logits: Tensor,
    rows: Rows,
    works: Sequence[Work],
    at: Tensor,
    positions: Tensor,
    guessed: Guessed | None = None,
) -> Tensor:
    """A token after each row of `works`, which all sample: [outputs of all works]. By the sampling
    kernel where there is one.

    `at`, `positions`: of each such row, its sequence's place in `rows` and the position to fill.
    `guessed`: the guesses on the device, where every row of the step is sampled from; penalties
    count them. Without it torch's ops do.
    """
    if rows.mode == GREEDY:
        return likeliest(logits)
    if rows.sampler is not None and (guessed is not None or not rows.mode.penalized):
        chosen = torch.empty_like(at)
        table = rows.sampling.for_kernel(rows.tokens, rows.lengths)
        if rows.mode.penalized:
            table = replace(table, guessed=guessed)
        rows.sampler(logits, table, rows=at, positions=positions, chosen=chosen)
        return chosen
    batch = rows.sampling.batch(rows.mode, positions, at)
    if batch.seen is not None:
        batch = _count_drafts(batch, works, guessed, rows.device)
    return sample(logits.float(), batch)


def _count_drafts(
    batch: SamplingBatch, works: Sequence[Work], guessed: Guessed | None, device: torch.device
) -> SamplingBatch:
    """Penalties of a row count the guesses before it."""
    assert batch.seen is not None
    places: list[int] = []
    sources: list[int] = []  # rows whose tokens these are
    tokens: list[int] = []
    row = 0
    for work in works:
        for known in range(work.outputs):
            places += [row] * known
            sources += range(row - known + 1, row + 1)
            if guessed is None:
                tokens += work.drafts[:known]
            row += 1
    in_prompt, in_answer = batch.seen
    if not places:
        return batch
    listed = tokens if guessed is None else sources
    row_numbers, ids = upload(device, numpy.array(places), numpy.array(listed))
    if guessed is not None:
        ids = guessed.tokens.index_select(0, ids)
    ones = torch.ones_like(ids, dtype=in_answer.dtype)
    counted = in_answer.index_put((row_numbers, ids), ones, accumulate=True)
    return replace(batch, seen=(in_prompt, counted))
