"""A decoder of a few lines whose every logit depends on the whole sequence as the paged cache holds
it.

A wrong block, slot, position or length gives other tokens, so comparing runs compares the engine's
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.engine.core import Engine
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows
from flyweight.engine.runner import Runner
from flyweight.engine.sampling import Mode, mix
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.engine.work import Work

VOCABULARY = 97
SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=1, dtype=torch.float32)


class ToyModel:
    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.fails = False

    def forward(self, batch: Batch, caches: list[KVStorage]) -> Tensor:
        if self.fails:
            raise RuntimeError("the device fell off the bus")
        self.batches.append(batch)
        keys, values = caches[0].keys.flatten(), caches[-1].values.flatten()
        keys[batch.slots] = batch.tokens.float()
        values[batch.slots] = batch.positions.float()
        rows = []
        for row in batch.output_rows.tolist():
            sequence = next(i for i, start in enumerate(batch.query_starts[1:]) if row < start)
            length = int(batch.positions[row]) + 1
            slots = torch.cat(
                [
                    torch.arange(caches[0].block_size) + block * caches[0].block_size
                    for block in batch.block_tables[sequence].tolist()
                ]
            )[:length]
            assert values[slots].tolist() == list(range(length)), (
                "the cache holds other positions than it should"
            )
            # order counts
            state = mix(mix(keys[slots].long() + 131 * torch.arange(length) + 1).sum() & 0xFFFFFFFF)
            rows.append(mix(torch.arange(VOCABULARY) + state & 0xFFFFFFFF).float() / 2**30)
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)


class EagerSteps:
    """What CUDA graphs do, on the CPU: whole steps from nothing but the rows on the device, padded
    to the next size.
    """

    def __init__(self, runner: Runner, largest: int = 8, rows: Rows | SharedRows | None = None):
        self.model = runner.model
        self.caches = runner.caches
        self.rows = rows or runner.rows
        self.largest = largest
        self.taken: list[tuple[int, Mode | None]] = []  # what each step was asked for

    def logits(self, count: int) -> Tensor:
        self.taken.append((count, None))
        return self._launch(count)[:count]

    def advance(self, count: int) -> Tensor:
        self.taken.append((count, getattr(self.rows, "mode", None)))
        logits = self._launch(count)
        self.rows.advance(logits.argmax(-1))
        return logits[:count]

    def _launch(self, count: int) -> Tensor:
        rows = self.rows
        size = min(1 << (count - 1).bit_length(), self.largest)
        page = self.caches[0].block_size
        lengths = rows.lengths[:count].long()
        assert (lengths > 0).all() and not rows.lengths[count:].any(), (
            "padding has length 0, and nothing else has"
        )
        at = lengths - 1
        slots = rows.tables[:count].long().gather(1, at[:, None] // page)[:, 0] * page + at % page
        batch = Batch(
            tokens=rows.tokens[:count].clone(),
            positions=at,
            slots=slots,
            block_tables=rows.tables[:count],
            query_starts=list(range(count + 1)),
            kv_lengths=lengths.tolist(),
            output_rows=torch.arange(count),
        )
        logits = self.model.forward(batch, self.caches)
        return torch.cat([logits, torch.zeros(size - count, logits.shape[1])])


class EagerPasses:
    """What captured passes do, on the CPU: all other steps, padded to a power of two."""

    inputs = None
    alone = False

    def __init__(self, runner: Runner):
        self.runner, self.taken = runner, []

    def padded_tokens(self, works: Sequence[Work]) -> int:
        self.taken.append(max(4, 1 << (sum(work.count for work in works) - 1).bit_length()))
        return self.taken[-1]

    def forward(self, batch: Batch) -> Tensor:
        assert (
            len(batch.tokens)
            == len(batch.positions)
            == len(batch.slots)
            == batch.query_starts[-1]
            == self.taken[-1]
        )
        return self.runner.model.forward(batch, self.runner.caches)


def imitate_capture(runner: Runner) -> None:
    """Steps, passes and steps with guesses as captured ones on a GPU."""
    runner.steps = EagerSteps(runner)
    runner.passes = EagerPasses(runner)
    runner.shared_steps = EagerSteps(runner, 64, runner.shared_rows)


def toy_engine(
    *, blocks: int = 64, captured: bool = False, turns: bool = False, **options
) -> Engine:
    """`captured`: steps as on a GPU, launched ahead; `turns`: and answers apart from prompts, as in
    a server there.
    """
    defaults = dict(
        vocabulary=VOCABULARY,
        device=torch.device("cpu"),
        max_model_len=256,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        overlap=captured,
    )
    engine = Engine(ToyModel(), SHAPE, blocks=blocks, **(defaults | options))
    if captured:
        imitate_capture(engine.runner)
    if turns:
        engine.scheduler.turn_tokens = engine.scheduler.prompt_tokens_beside
    return engine


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12} | options)).with_defaults({})


def run(engine: Engine, *groups: list[Request]) -> list[list[int]]:
    """Step to the end; the generated tokens of every request."""
    requests = [request for group in groups for request in group]
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    assert all(request.finished for request in requests)
    assert engine.pool.available == engine.pool.blocks, "blocks were lost"
    return [request.tokens[len(request.prompt) :] for request in requests]


def alone(prompt: list[int], options: SamplingParams, **engine_options) -> list[int]:
    """What the request gives in an engine of its own, in one piece."""
    engine = toy_engine(max_num_batched_tokens=256, prefix_cache=False, **engine_options)
    return run(engine, engine.submit(prompt, options))[0]
