"""The models of the GPU tests: a tiny random one in every format, and a real one where
FLYWEIGHT_MODEL names its folder.

Weights are made on the CPU for both devices, because random numbers differ between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from flyweight.batch import Batch, KVStorage
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.streamed import Streamed
from flyweight.engine.core import Engine
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

CUDA = torch.device("cuda", 0)
TINY = PRESETS["qwen3-0.6b"] | dict(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    head_dim=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
FOLDER = os.environ.get("FLYWEIGHT_MODEL")
PAGE = 16
WAYS = {  # of serving the same requests; name → what the engine gets
    "in a batch": {},
    "in chunks": dict(max_num_batched_tokens=64),
    "preempted": dict(blocks=52),
    "read at once": dict(overlap=False),
    "not captured": {},
    "with a prefix cache": dict(prefix_cache=True),
}
# tokens whose logprobs are compared where answers part (more than two may tie); behind all of these
BEST, FAR = 8, 99.0
MODELS = ["tiny", *([FOLDER] if FOLDER else [])]


def load(model: str, scheme: str, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    weights = (
        PresetWeights(TINY, scheme)
        if model == "tiny"
        else Streamed(Checkpoint(model), torch.device(device))
    )
    return Decoder.load(weights, device=device, dtype=dtype)


def make_engine(decoder: Decoder, **options) -> Engine:
    config = decoder.config
    shape = CacheShape(config.layers, config.kv_heads, config.head_dim, decoder.dtype)
    defaults = dict(
        vocabulary=config.vocab_size,
        device=decoder.device,
        max_model_len=640,
        blocks=640,
        block_size=PAGE,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        prefix_cache=False,
    )
    return Engine(decoder, shape, **(defaults | options))


def params(**options) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0, "max_tokens": 48, "ignore_eos": True} | options)
    ).with_defaults({})


def prompts(config, count: int, *, seed: int = 0, longest: int = 300) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [
        torch.randint(10, min(config.vocab_size, 20_000), (length,), generator=generator).tolist()
        for length in lengths
    ]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    while engine.busy:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.pool.available == engine.pool.blocks, "blocks were lost"
    return [request.tokens[len(request.prompt) :] for request in requests]


def both_ways(
    decoder: Decoder, asked: list[list[int]], way: str
) -> tuple[list[Request], list[Request]]:
    """The same greedy requests one after the other, and together in one of the WAYS."""
    options, engine, alone = params(logprobs=BEST), make_engine(decoder), []
    for prompt in asked:
        (request,) = engine.submit(prompt, options)
        run(engine, [request])
        alone.append(request)
    if decoder.device.type == "cuda":
        assert engine.runner.steps is not None and engine.runner.steps.graphs, (
            "alone, steps are captured"
        )
        assert engine.runner.passes is not None and engine.runner.passes.held, "and prompts"
    other = make_engine(decoder, **WAYS[way])
    if way == "not captured":
        other.runner.steps = other.runner.passes = None
    together = [other.submit(prompt, options)[0] for prompt in asked]
    run(other, together)
    return alone, together


def gap_where_parted(one: Request, other: Request) -> float | None:
    """How far the other's token was behind the best where two answers part; FAR, more than any
    bound, if not among the BEST.
    """
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        if ours.token_id != theirs.token_id:
            found = ours.top.get(theirs.token_id)
            return FAR if found is None else max(ours.top.values()) - found
    return None


@torch.inference_mode()
def forced(decoder: Decoder, tokens: torch.Tensor, decoded: int) -> Iterator[torch.Tensor]:
    """Logits of every position: the first in one pass, on a GPU the last as captured steps, alone
    and beside a row that nobody uses.
    """
    config, device = decoder.config, decoder.device
    known = len(tokens) - decoded if device.type == "cuda" else len(tokens)
    pages = len(tokens) // PAGE
    shape = (2 * pages, PAGE, config.kv_heads, config.head_dim)
    caches = [
        KVStorage(*(torch.zeros(shape, dtype=decoder.dtype, device=device) for _ in range(2)))
        for _ in range(config.layers)
    ]
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(2))[:pages].to(
        device, torch.int32
    )
    positions = torch.arange(known, device=device)
    yield decoder.forward(
        Batch(
            tokens=tokens[:known].to(device),
            positions=positions,
            slots=table.long()[positions // PAGE] * PAGE + positions % PAGE,
            block_tables=table[None],
            query_starts=[0, known],
            kv_lengths=[known],
            output_rows=positions,
        ),
        caches,
    )
    if known == len(tokens):
        return
    rows = Rows(2, pages=pages, vocabulary=config.vocab_size, device=device)
    graphs = DecodeGraphs(decoder, caches, rows)
    rows.tables[:] = table
    for at in range(known, len(tokens)):
        rows.tokens[0], rows.lengths[0] = tokens[at].item(), at + 1
        yield graphs.logits(1 + at % 2)[:1].clone()
