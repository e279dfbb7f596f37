"""Gated DeltaNet alone at Qwen3-Next's shapes: a step of some rows, and prompts.

    python benchmarks/workshop/gated_delta.py --out rows.jsonl

A step is timed in a CUDA graph over the states of many layers, so that none stays in the L2 cache;
`share_of_copy` is bytes of states read and written over the GPU's copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from flyweight.batch import StateStorage, fresh_states
from flyweight.kernels.gated_delta import decode, prefill
from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights
from flyweight.machine import copy_bandwidth

DEVICE = torch.device("cuda")
SHAPE = DeltaShape(16, 32, 128, 128, 4)
LAYERS = 36


def make_weights() -> DeltaWeights:
    heads = SHAPE.value_heads
    return DeltaWeights(
        SHAPE,
        conv=torch.randn(SHAPE.width, SHAPE.channels),
        decay=-torch.rand(heads),
        step_bias=torch.randn(heads),
        norm=torch.ones(SHAPE.value_dim),
        epsilon=1e-6,
    ).to(DEVICE)


def microseconds(graph: torch.cuda.CUDAGraph, launches: int, rounds: int = 20) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(rounds):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return sorted(times)[len(times) // 2]


def time_steps(rows: int, weights: DeltaWeights, copied: float) -> dict[str, object]:
    caches = [StateStorage.zeros(SHAPE.state, rows, torch.bfloat16, DEVICE) for _ in range(LAYERS)]
    projected = torch.randn(rows, SHAPE.projected, device=DEVICE).bfloat16()
    out = torch.empty(rows, SHAPE.outputs, device=DEVICE).bfloat16()
    lengths = torch.full((rows,), 100, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def launch() -> None:
        for cache in caches:
            decode.delta_step(projected, out, cache, decode.DeltaRows(lengths, slots), weights)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    found = microseconds(graph, LAYERS)
    moved = 2 * rows * 4 * SHAPE.value_heads * SHAPE.key_dim * SHAPE.value_dim
    share = moved / found / 1e3 / copied
    return dict(what="step", rows=rows, us=round(found, 2), share_of_copy=round(share, 3))


def time_prompt(tokens: int, weights: DeltaWeights) -> dict[str, object]:
    cache = StateStorage.zeros(SHAPE.state, 1, torch.bfloat16, DEVICE)
    batch = SimpleNamespace(states=fresh_states([tokens], DEVICE), query_starts=[0, tokens])
    projected = torch.randn(tokens, SHAPE.projected, device=DEVICE).bfloat16()
    prefill.delta_paged(projected, cache, batch, weights)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.delta_paged(projected, cache, batch, weights)  # type: ignore[arg-type]
    return dict(what="prompt", tokens=tokens, us=round(microseconds(graph, 1), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gated-delta.jsonl"))
    options = parser.parse_args()
    weights = make_weights()
    copied = copy_bandwidth(DEVICE)
    common = dict(kind="gated delta", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    with options.out.open("a", encoding="utf-8") as stream:
        for found in (
            *(time_steps(rows, weights, copied) for rows in (1, 4, 16, 64)),
            *(time_prompt(tokens, weights) for tokens in (64, 512, 2048, 8192)),
        ):
            row = common | found
            print(json.dumps(row), flush=True)
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
