"""Two versions of the package on one GPU, taking turns: decode steps and first tokens of a model.

    python benchmarks/workshop/compare_trees.py OUT.jsonl --old OLD/src --new NEW/src \\
        [--models qwen3-8b:int4,…] [--only prefill] [--rounds 6]

Each version is a process of its own, since both have one name; both hold the model at the same time
and measure by turns, the one that begins changing from round to round: the second finds a warmer
GPU. A row for each model and quantity: the medians of both in microseconds, and `ratio`, the median
over rounds of new / old (below 1: the new one is faster), between its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = (
    "qwen3-8b:bf16,qwen3-8b:int4,qwen3-8b:w8a8,qwen3-8b:vptq,qwen3-4b:w8a16,qwen2-57b-a14b:int4"
)
BATCHES = (1, 8, 32, 64)
INPUT, OUTPUT, PROMPT, PAGE = 256, 66, 2048, 16
PREFILLS = 5  # of a turn
Times = dict[str, float]  # microseconds by quantity


def quantities(model: str) -> dict[str, Callable[[], float]]:
    """What is measured, in the version that PYTHONPATH names."""
    from flyweight.bench.profile import Profiler, Workload
    from flyweight.bench.steps import timed
    from flyweight.engine.llm import LLM

    longest = PROMPT + PAGE
    pages = max(BATCHES[-1] * -(-(INPUT + OUTPUT) // PAGE), longest // PAGE) + 8
    llm = LLM(
        f"preset:{model}",
        max_num_seqs=BATCHES[-1],
        max_model_len=longest,
        blocks=pages,
        block_size=PAGE,
        prefix_cache=False,
    )
    found: dict[str, Callable[[], float]] = {}
    for batch in BATCHES:
        decode = Profiler(llm, Workload(batch, INPUT, OUTPUT))
        found[f"step of {batch}"] = lambda decode=decode: timed(decode)[0]
    prompt = Profiler(llm, Workload(1, PROMPT, 4))
    found[f"prefill of {PROMPT}"] = lambda: statistics.median(
        1e6 * prompt.prefill(contextlib.nullcontext) for _ in range(PREFILLS)
    )
    return found


def answer(model: str, only: str) -> None:
    """Measures once for each line that comes in."""
    found = {name: measure for name, measure in quantities(model).items() if only in name}
    for measure in (*found.values(), *found.values()):  # captures graphs, warms up
        measure()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: measure() for name, measure in found.items()}), flush=True)


class Version:
    """A process that measures one version when it is asked."""

    def __init__(self, model: str, only: str, path: str, log: Path):
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--measure", model, "--only", only],
            env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"a version ended:\n{self.log.read_text()[-2000:]}")
        return text

    def measure(self) -> Times:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def taking_turns(model: str, options: argparse.Namespace) -> list[tuple[Times, Times]]:
    """(old, new) of each round."""
    paths = {"old": options.old, "new": options.new}
    versions = {
        side: Version(model, options.only, path, options.out.with_suffix(f".{side}.log"))
        for side, path in paths.items()
    }
    try:
        for version in versions.values():
            version.line()
        rounds = []
        for number in range(options.rounds):
            order = list(versions) if number % 2 else list(reversed(versions))
            times = {side: versions[side].measure() for side in order}
            rounds.append((times["old"], times["new"]))
        return rounds
    finally:
        for version in versions.values():
            version.end()


def row_of(model: str, quantity: str, rounds: list[tuple[Times, Times]]) -> dict[str, Any]:
    old, new = ([times[side][quantity] for times in rounds] for side in (0, 1))
    low, middle, high = statistics.quantiles([b / a for a, b in zip(old, new, strict=True)], n=4)
    return {
        "schema": 1,
        "bench": "compare",
        "model": model,
        "quantity": quantity,
        "old_us": round(statistics.median(old), 1),
        "new_us": round(statistics.median(new), 1),
        "ratio": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(rounds),
    }


def compare(options: argparse.Namespace) -> None:
    for model in options.models.split(","):
        rounds = taking_turns(model, options)
        rows = [row_of(model, quantity, rounds) for quantity in rounds[0][0]]
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows:
            words = [row[key] for key in ("quantity", "old_us", "new_us", "ratio")]
            print(model, *words, *row["ratio_quartiles"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("compare.jsonl"))
    parser.add_argument("--old")
    parser.add_argument("--new")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--only", default="", help="quantities with this in their names")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--measure", help="for its own use: this model, once for each line it reads"
    )
    options = parser.parse_args()
    if options.measure:
        answer(options.measure, options.only)
    else:
        compare(options)


if __name__ == "__main__":
    main()
