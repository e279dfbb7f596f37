"""A decoder of a few lines whose every logit depends on the whole sequence as the paged cache holds it.

A wrong block, slot, position or length gives other tokens, so comparing runs compares the engine's bookkeeping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight.engine.batch import Batch, KVStorage
from flyweight.engine.core import Engine
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.runner import CacheShape
from flyweight.engine.sampling import mix

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
            slots = torch.cat([torch.arange(caches[0].block_size) + block * caches[0].block_size
                               for block in batch.block_tables[sequence].tolist()])[:length]
            assert values[slots].tolist() == list(range(length)), "the cache holds other positions than it should"
            state = torch.tensor(17)
            for token in keys[slots].long():
                state = mix(state * 31 + token + 1 & 0xFFFFFFFF)
            rows.append(mix(torch.arange(VOCABULARY) + state & 0xFFFFFFFF).float() / 2**30)
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)


def toy_engine(*, blocks: int = 64, **options) -> Engine:
    defaults = dict(vocabulary=VOCABULARY, device=torch.device("cpu"), max_model_len=256, block_size=4, max_num_seqs=8,
                    max_num_batched_tokens=16)
    return Engine(ToyModel(), SHAPE, blocks=blocks, **(defaults | options))


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
