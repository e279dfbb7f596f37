#!/usr/bin/env python3
"""Time the four linears of a decoder layer as one dependent chain, as decoding runs them.

    python benchmarks/linear_chain.py OUT.jsonl [--preset qwen3-8b] [--kinds int4 int8 w8a8 plain] [--dtypes bf16 fp16]

qkv (norm fused) → o (residual) → gate/up (norm, silu·mul) → down (residual), twelve layers of different weights in one
CUDA graph, so that every weight comes from memory. The part of qkv's output that attention would turn into o's input is
handed on as it is. One `kernel` row a chain, and one for each linear alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from flyweight.bench.rows import environment_row, make_row
from flyweight.kernels import gemv
from flyweight.models.presets import PRESETS
from flyweight.tensors import Int8Channel, IntGroup, Plain, QuantTensor

LAYERS = 12
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {"plain": "bf16", "int4": "w4a16", "int8": "w8a16", "w8a8": "w8a8"}


def make(kind: str, shape: tuple[int, int], seed: int, dtype: torch.dtype) -> QuantTensor:
    if kind == "plain":
        return Plain.random(shape, seed, "cuda", dtype=dtype)
    if kind == "w8a8":
        return Int8Channel.random(shape, seed, "cuda")
    return IntGroup.random(shape, seed, "cuda", bits=int(kind[3:]), group_size=128, dtype=dtype)


def replay_times(launch, repeats: int = 15) -> list[float]:
    """Microseconds of each replay of a graph of `launch`."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[3:]


def measure(kind: str, dtype: torch.dtype, config: dict) -> list[dict]:
    hidden, middle, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    shapes = {"qkv": ((heads + 2 * config["num_key_value_heads"]) * size, hidden), "o": (hidden, heads * size),
              "gate_up": (2 * middle, hidden), "down": (hidden, middle)}
    layers = [{name: gemv.prepare(make(kind, shape, 4 * i + j, dtype), dtype=dtype, interleave=name == "gate_up")
               for j, (name, shape) in enumerate(shapes.items())} for i in range(LAYERS)]
    x, attended, gated = (torch.randn(1, width, device="cuda").to(dtype) for width in (hidden, heads * size, middle))
    qkv = torch.zeros(1, shapes["qkv"][0], device="cuda", dtype=dtype)
    norm = torch.ones(hidden, device="cuda", dtype=dtype)

    def chain() -> None:
        for layer in layers:
            layer["qkv"](x, qkv, norm=norm)
            layer["o"](qkv[:, : heads * size], x, residual=x)
            layer["gate_up"](x, gated, norm=norm)
            layer["down"](gated, x, residual=x)

    inputs = {"qkv": x, "o": attended, "gate_up": x, "down": gated}
    rows = [row_of(kind, dtype, replay_times(chain), sum(w.nbytes for w in layers[0].values()), chain=True)]
    for name, (rows_out, columns) in shapes.items():
        times = replay_times(lambda name=name: [layer[name](inputs[name]) for layer in layers])
        rows.append(row_of(kind, dtype, times, layers[0][name].nbytes) | dict(in_features=columns, out_features=rows_out))
    return rows


def row_of(kind: str, dtype: torch.dtype, times: list[float], nbytes: int, *, chain: bool = False) -> dict:
    each = sorted(t / LAYERS for t in times)
    us = statistics.median(each)
    return dict(format=NAMES[kind], kernel=f"gemv.{kind}", rows=1, group_size=128 if kind.startswith("int") else None,
                zero_points=kind.startswith("int"), dtype=str(dtype).removeprefix("torch."), us=round(us, 2),
                us_p10=round(each[len(each) // 10], 2), us_p90=round(each[-1 - len(each) // 10], 2),
                gb_s=round(nbytes / us / 1e3, 1), **({"chain": True} if chain else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="qwen3-8b", choices=sorted(PRESETS))
    parser.add_argument("--kinds", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    args = parser.parse_args()
    environment = environment_row("cuda")
    with args.out.open("a") as file:
        file.write(json.dumps(environment) + "\n")
        for dtype in args.dtypes:
            for kind in args.kinds:
                for fields in measure(kind, DTYPES[dtype], PRESETS[args.preset]):
                    if fields.get("chain"):
                        fields["chain"] = args.preset
                    fields["share_of_bandwidth"] = round(fields["gb_s"] / environment["copy_gb_s"], 3)
                    file.write(json.dumps(make_row("kernel", environment["id"], **fields)) + "\n")
                    print(fields, flush=True)


if __name__ == "__main__":
    main()
