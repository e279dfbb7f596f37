"""Two versions of the package on one GPU, taking turns: decode steps and first tokens of the same models.

    python benchmarks/workshop/compare_trees.py OUT.jsonl --old OLD/src --new NEW/src [--models qwen3-8b:int4,…] [--rounds 2]

Each turn is a process of its own, since both versions have one name. A row for each model, version and quantity, the median of
its samples in microseconds; `ratio` is new / old of the medians over all turns (below 1: the new one is faster).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

MODELS = ("qwen3-8b:bf16,qwen3-8b:int4,qwen3-8b:w8a8,qwen3-8b:vptq,qwen3-4b:w8a16,qwen2-57b-a14b:int4")
BATCHES = (1, 8, 32, 64)
INPUT, OUTPUT, PROMPT, PAGE = 256, 66, 2048, 16


def measure(model: str) -> dict[str, float]:
    """Of the version that PYTHONPATH names: microseconds by quantity."""
    from flyweight.bench.profile import Profiler, Workload
    from flyweight.bench.steps import timed
    from flyweight.engine.llm import LLM

    longest = PROMPT + PAGE
    pages = max(BATCHES[-1] * -(-(INPUT + OUTPUT) // PAGE), longest // PAGE) + 8
    llm = LLM(f"preset:{model}", max_num_seqs=BATCHES[-1], max_model_len=longest, blocks=pages,
              block_size=PAGE, prefix_cache=False)
    found = {}
    for batch in BATCHES:
        profiler = Profiler(llm, Workload(batch, INPUT, OUTPUT))
        for _ in range(2):
            profiler.decode(contextlib.nullcontext)
        found[f"step of {batch}"] = statistics.median(timed(profiler)[0] for _ in range(5))
    profiler = Profiler(llm, Workload(1, PROMPT, 4))
    for _ in range(3):
        profiler.prefill(contextlib.nullcontext)
    times = [1e6 * profiler.prefill(contextlib.nullcontext) for _ in range(9)]
    found[f"prefill of {PROMPT}"] = statistics.median(times)
    return found


def turn(model: str, path: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", model]
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model} with {path}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> None:
    sides = {"old": options.old, "new": options.new}
    for model in options.models.split(","):
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for side, path in sides.items():
                for quantity, value in turn(model, path).items():
                    samples[quantity, side].append(value)
        with options.out.open("a") as file:
            for quantity in dict.fromkeys(name for name, _ in samples):
                old, new = (statistics.median(samples[quantity, side]) for side in sides)
                row = {"schema": 1, "bench": "compare", "model": model, "quantity": quantity, "old_us": round(old, 1),
                       "new_us": round(new, 1), "ratio": round(new / old, 4), "rounds": options.rounds}
                file.write(json.dumps(row) + "\n")
                print(model, quantity, row["old_us"], row["new_us"], row["ratio"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("compare.jsonl"))
    parser.add_argument("--old")
    parser.add_argument("--new")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", help="for its own use: one turn of this model")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
    else:
        compare(options)


if __name__ == "__main__":
    main()
