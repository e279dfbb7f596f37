"""How much of the memory's read bandwidth a decode step of the native CPU engine uses.

    python benchmarks/cpu/read_share.py [--preset qwen2-1.5b] [--scheme int4-sym] [--threads 2]

Random weights of a real model's shape, larger than the caches, head in 8 bits. Each round times
some steps of one sequence and a plain sum over as many bytes by as many threads; `share` is the
median over the rounds of (bytes of weights a step reads / its time) / (the sum's bytes per second).
Rows go to read_share.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from flyweight.engine.core import Engine
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import SamplingParams
from flyweight.kernels.native import library
from flyweight.kernels.native.executor import NativeDecoder
from flyweight.models.native import read_parts
from flyweight.models.presets import PresetWeights

HERE = Path(__file__).parent
CONTEXT = 512
BLOCK = 16
PROMPT = 16
STEPS = 16


def load(preset: str, scheme: str) -> tuple[Engine, NativeDecoder]:
    parts = read_parts(PresetWeights(preset, scheme), head_bits=8)
    decoder = NativeDecoder(parts)
    shape = CacheShape(len(parts.layers), parts.kv_heads, parts.head_dim, torch.float16)
    engine = Engine(
        decoder,
        shape,
        vocabulary=parts.vocabulary,
        device=torch.device("cpu"),
        max_model_len=CONTEXT,
        blocks=CONTEXT // BLOCK,
        block_size=BLOCK,
        max_num_seqs=1,
        prefix_cache=False,
    )
    return engine, decoder


def seconds_a_step(engine: Engine) -> float:
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    engine.submit(list(range(1000, 1000 + PROMPT)), params.with_defaults({}))
    engine.step()  # the prompt
    begin = time.perf_counter()
    while engine.busy:
        engine.step()
    return (time.perf_counter() - begin) / STEPS


def read_seconds(buffer: torch.Tensor) -> float:
    begin = time.perf_counter()
    buffer.sum()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="qwen2-1.5b")
    parser.add_argument("--scheme", default="int4-sym")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", default=str(HERE / "read_share.jsonl"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    engine, decoder = load(options.preset, options.scheme)
    buffer = torch.ones(decoder.step_nbytes // 4)
    seconds_a_step(engine)
    rounds = [(seconds_a_step(engine), read_seconds(buffer)) for _ in range(options.rounds)]
    step, read = (statistics.median(times) for times in zip(*rounds, strict=True))
    row = dict(
        bench="read_share",
        preset=options.preset,
        scheme=options.scheme,
        threads=options.threads,
        rounds=options.rounds,
        step_bytes=decoder.step_nbytes,
        ms_a_token=1e3 * step,
        gb_s=decoder.step_nbytes / step / 1e9,
        read_gb_s=buffer.nbytes / read / 1e9,
        share=statistics.median(read / step for step, read in rounds),
        load_average=os.getloadavg()[0],
        instructions=library.load().instructions().decode(),
    )
    print(json.dumps(row))
    with open(options.output, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
