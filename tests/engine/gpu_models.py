"""The models of the GPU tests: a tiny random one in every format, and a real one where FLYWEIGHT_MODEL names its folder.

Weights are made on the CPU for both devices, because random numbers differ between them.
"""

from __future__ import annotations

import os

import torch

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.streamed import Streamed
from flyweight.engine.core import Engine
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, SamplingParams
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

CUDA = torch.device("cuda", 0)
TINY = PRESETS["qwen3-0.6b"] | dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, head_dim=64,
                                    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024)
FOLDER = os.environ.get("FLYWEIGHT_MODEL")
MODELS = ["tiny", *([FOLDER] if FOLDER else [])]


def load(model: str, scheme: str, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    weights = PresetWeights(TINY, scheme) if model == "tiny" else Streamed(Checkpoint(model), torch.device(device))
    return Decoder.load(weights, device=device, dtype=dtype)


def make_engine(decoder: Decoder, **options) -> Engine:
    config = decoder.config
    shape = CacheShape(config.layers, config.kv_heads, config.head_dim, decoder.dtype)
    defaults = dict(vocabulary=config.vocab_size, device=decoder.device, max_model_len=640, blocks=640, block_size=16,
                    max_num_seqs=8, max_num_batched_tokens=2048, prefix_cache=False)
    return Engine(decoder, shape, **(defaults | options))


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 48, "ignore_eos": True} | options)).with_defaults({})


def prompts(config, count: int, *, seed: int = 0, longest: int = 300) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(10, min(config.vocab_size, 20_000), (length,), generator=generator).tolist() for length in lengths]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    while engine.busy:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.pool.available == engine.pool.blocks, "blocks were lost"
    return [request.tokens[len(request.prompt) :] for request in requests]
