#!/usr/bin/env python3
"""A trace of arrivals played against the scheduler without a model: what gaps and first tokens a
policy gives.

    python benchmarks/workshop/play_arrivals.py AZURE.csv [--requests 240] [--rate 16] [--host
        1.0,0.05]
        [--together 4096] [--seconds 0.25 0.4] [--fewest 64] [--most 512]

The scheduler is the engine's own; steps take what they took on one H200 with Qwen3-8B in int4:
passes of prompts by the rows of `benchmarks/h200/prefill.jsonl`, captured, and steps of answers by
a fixed part, a part for each row and one for each cached token. `--host A,B`: a step takes at least
A + B × rows milliseconds, as where Python is in the way. `--together N` plays steps of answers with
up to N tokens of prompts in them, the others turns (`engine/turns.py`) with other constants. Good
for choosing a policy, not for knowing a figure: captures, copies and the wait for the interpreter
are not played.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flyweight.bench.arrivals import Arrival, read_trace
from flyweight.engine import turns
from flyweight.engine.kv_cache import BlockPool
from flyweight.engine.packed import SIZES
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.scheduler import Scheduler, Work

ROWS = Path(__file__).parents[1] / "h200" / "prefill.jsonl"
MODEL = "preset:qwen3-8b:int4"
# milliseconds of a step of answers: fixed, for a row, for a cached token; and for a pair of a
# prompt's new and cached tokens
STEP, ROW, CACHED, PAIR = 1.9, 0.008, 1.1e-5, 1.5e-6


class Costs:
    """Milliseconds of steps."""

    def __init__(self, host: tuple[float, float]):
        found = {}
        for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()):
            mine = row.get("model") == MODEL and row.get("passes") == "captured"
            if mine and str(row.get("case")).isdecimal():
                found[int(row["case"])] = row["device_ms"]
        self.passes = sorted(found.items())
        self.host = host

    def of_pass(self, tokens: int) -> float:
        size = next((size for size in SIZES if size >= tokens), tokens)
        for (a, low), (b, high) in zip(self.passes, self.passes[1:], strict=False):
            if size <= b or b == self.passes[-1][0]:
                return low + max(0, size - a) * (high - low) / (b - a)
        raise AssertionError("two sizes at least")

    def of(self, works: list[Work]) -> float:
        answers = [work for work in works if work.count == 1]
        prompts = [work for work in works if work.count > 1]
        seconds = 0.0
        if prompts:
            seconds += self.of_pass(sum(work.count for work in prompts))
            seconds += PAIR * sum(work.count * work.start for work in prompts)
        if answers:
            least = self.host[0] + self.host[1] * len(answers)
            own = STEP + ROW * len(answers) + CACHED * sum(work.start for work in answers)
            seconds += max(own, least)
        return seconds


def play(trace: list[Arrival], costs: Costs, *, together: int | None) -> dict[str, float]:
    now = 0.0  # milliseconds
    scheduler = Scheduler(
        BlockPool(40_000, 16),
        max_num_seqs=256,
        max_num_batched_tokens=16_640,
        prompt_tokens_beside=together or 4096,
    )
    if together is None:
        scheduler.turns = turns.Turns(SIZES, clock=lambda: now / 1e3)
    plain = SamplingParams().with_defaults({})
    coming = [
        Request(i, [i] * one.input, plain, seed=0, limit=one.input + one.output)
        for i, one in enumerate(trace)
    ]
    arrived = 0
    last: dict[int, float] = {}
    firsts: list[float] = []
    gaps: list[float] = []
    while arrived < len(coming) or scheduler.busy:
        while arrived < len(coming) and trace[arrived].time * 1e3 <= now:
            scheduler.add(coming[arrived])
            arrived += 1
        works = scheduler.schedule()
        if not works:
            now = trace[arrived].time * 1e3
            continue
        now += costs.of(works)
        for request in [work.request for work in works if work.samples]:
            request.tokens.append(0)
            if request.number in last:
                gaps.append(now - last[request.number])
            else:
                firsts.append(now - trace[request.number].time * 1e3)
            last[request.number] = now
            if len(request.tokens) >= request.limit:
                scheduler.finish(request, "length")
    made = sum(one.output for one in trace)
    return {
        "gap p50": share(gaps, 0.5),
        "gap p99": share(gaps, 0.99),
        "ratio": share(gaps, 0.99) / share(gaps, 0.5),
        "first p50": share(firsts, 0.5),
        "first p99": share(firsts, 0.99),
        "tok/s": made / now * 1e3,
    }


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=16.0)
    parser.add_argument("--host", default="1.0,0.05")
    parser.add_argument("--together", type=int, nargs="*", default=[4096])
    parser.add_argument("--seconds", type=float, nargs="*", default=[turns.SECONDS])
    parser.add_argument("--fewest", type=int, default=turns.FEWEST)
    parser.add_argument("--most", type=int, default=turns.MOST)
    options = parser.parse_args()
    once = read_trace(options.trace, count=options.requests)
    scale = options.rate * once[-1].time / (len(once) - 1)
    trace = read_trace(options.trace, count=options.requests, scale=scale)
    fixed, each = (float(part) for part in options.host.split(","))
    costs = Costs((fixed, each))
    turns.FEWEST, turns.MOST = options.fewest, options.most
    policies: list[tuple[str, int | None, float]] = [
        (f"together, up to {tokens}", tokens, 0.0) for tokens in options.together
    ]
    policies += [(f"turns, {seconds} s", None, seconds) for seconds in options.seconds]
    for name, together, seconds in policies:
        turns.SECONDS = seconds
        found = play(trace, costs, together=together)
        figures = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
        print(f"{name}: {figures}")


if __name__ == "__main__":
    main()
