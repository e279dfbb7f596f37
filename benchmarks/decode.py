#!/usr/bin/env python3
"""Time decode steps of whole models with random weights by replaying their CUDA graph: the engine without its host side.

    python benchmarks/decode.py OUT.jsonl [--models qwen3-8b:int4 qwen3-8b:w8a8 …] [--dtype bf16] [--input 256] [--output 512]

Greedy, batch 1, the tokens staying on the device; contexts run from input + 1 to input + output, as in the decode-bound
workload. Prefill is left out, so rows say `engine: graph` and are not end-to-end figures.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from flyweight.bench.rows import environment_row, make_row
from flyweight.engine.batch import KVStorage
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.rows import Rows
from flyweight.engine.sampling import GREEDY
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

MODELS = ["qwen3-8b:int4", "qwen3-8b:w8a8", "qwen3-8b:bf16", "qwen3-4b:w8a8", "qwen3-4b:w8a16", "qwen3-4b:bf16", "qwen2-7b:int4"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAGE = 16


def measure(model: str, dtype: torch.dtype, before: int, output: int, repeats: int = 3) -> list[dict]:
    preset, scheme = model.split(":")
    device = torch.device("cuda", 0)
    decoder = Decoder.load(PresetWeights(preset, scheme, device=device), device=device, dtype=dtype)
    config, pages = decoder.config, -(-(before + output + 1) // PAGE)
    shape = (pages, PAGE, config.kv_heads, config.head_dim)
    caches = [KVStorage(torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))
              for _ in range(config.layers)]
    begin = time.perf_counter()
    state = Rows(1, pages=pages, vocabulary=config.vocab_size, device=device)
    graphs = DecodeGraphs(decoder, caches, state)
    graphs.warm_up([1])
    captured = time.perf_counter() - begin
    state.tables[0] = torch.randperm(pages, device=device).int()
    state.tokens[0] = 7
    rows = []
    for repeat in range(repeats + 1):
        state.lengths.fill_(before + 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(output - 1):
            graphs.advance(1, GREEDY)
        torch.cuda.synchronize()
        each = (time.perf_counter() - begin) / (output - 1)
        if repeat:  # the first is the warm-up
            rows.append(dict(backend="native", engine="graph", model=preset, scheme=scheme, weights="random",
                             checkpoint="random:0", dtype=str(dtype).removeprefix("torch."), batch=1, input=before,
                             output=output, repeat=repeat,
                             tpot_ms=round(each * 1e3, 4), decode_tok_s=round(1 / each, 1), capture_s=round(captured, 2),
                             allocated_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="PRESET:SCHEME")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=512)
    args = parser.parse_args()
    environment = environment_row("cuda")
    with args.out.open("a") as file:
        file.write(json.dumps(environment) + "\n")
        for model in args.models:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for fields in measure(model, DTYPES[args.dtype], args.input, args.output):
                file.write(json.dumps(make_row("latency", environment["id"], **fields)) + "\n")
                print(fields["model"], fields["scheme"], fields["decode_tok_s"], "tok/s", flush=True)


if __name__ == "__main__":
    main()
