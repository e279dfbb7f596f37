#!/usr/bin/env python3
"""A trace of arrivals played against the scheduler without a model: what gaps and first tokens a
policy gives.

    python benchmarks/workshop/play_arrivals.py AZURE.csv [--requests 200] [--rate 16]
        [--together 4096 512] [--turns 384 512 640] [--prompts 1.0] [--burst 64]

The scheduler is the engine's own; steps take what they took on one H200 with Qwen3-8B in int4:
passes of prompts by the rows of `benchmarks/h200/prefill.jsonl`, captured, times `--prompts`; steps
of answers what a step of their captured size takes without a cache, and the reading of what is
cached. `--together N` plays steps of answers with up to N tokens of prompts in them, `--turns N`
passes of up to N tokens between two steps of answers. `--burst N` plays N chats that come at once
as well, in the order in which a server has read them. Good for choosing a policy, not for knowing a
figure: captures, copies and the wait for the interpreter are not played.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from flyweight.bench.arrivals import Arrival, read_trace
from flyweight.engine.kv_cache import BlockPool
from flyweight.engine.packed import SIZES
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.scheduler import Scheduler
from flyweight.engine.work import Work

ROWS = Path(__file__).parents[1] / "h200" / "prefill.jsonl"
MODEL = "preset:qwen3-8b:int4"
# milliseconds of a step of answers by its captured size, found in the gaps that a server's clients
# saw while no prompt waited, less those for the cached tokens
STEPS = {1: 1.5, 4: 1.8, 8: 2.0, 16: 2.3, 32: 2.5, 48: 3.4, 64: 3.1, 128: 4.3, 192: 6.0, 256: 8.0}
CACHED = 4.2e-5  # for a cached token: its keys and values at what `h200/kv-cache.jsonl` reads
TOGETHER = 4096  # of prompts in a pass after a burst
PAIR = 1.5e-6  # for a pair of a prompt's new and cached tokens
CHAT = (356, 512)  # tokens of a chat with a tool and of its answer (benchmarks/serve_overhead.py)
READ_AT_ONCE = 12  # chats of a burst that a server has read when the first step begins
READ_SECONDS = 0.0018  # for each of the others


class Costs:
    """Milliseconds of steps."""

    def __init__(self, prompts: float):
        found = {}
        for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()):
            mine = row.get("model") == MODEL and row.get("passes") == "captured"
            if mine and str(row.get("case")).isdecimal():
                found[int(row["case"])] = row["device_ms"]
        self.passes = sorted(found.items())
        self.prompts = prompts

    def of_pass(self, tokens: int) -> float:
        size = next((size for size in SIZES if size >= tokens), tokens)
        for (a, low), (b, high) in zip(self.passes, self.passes[1:], strict=False):
            if size <= b or b == self.passes[-1][0]:
                return self.prompts * (low + max(0, size - a) * (high - low) / (b - a))
        raise AssertionError("two sizes at least")

    def of(self, works: list[Work]) -> float:
        answers = [work for work in works if work.count == 1]
        prompts = [work for work in works if work.count > 1]
        seconds = 0.0
        if prompts:
            seconds += self.of_pass(sum(work.count for work in prompts))
            seconds += PAIR * sum(work.count * work.start for work in prompts)
        if answers:
            seconds += next(ms for size, ms in STEPS.items() if size >= len(answers))
            seconds += CACHED * sum(work.start for work in answers)
        return seconds


def play(trace: list[Arrival], costs: Costs, *, tokens: int, turns: bool) -> dict[str, float]:
    now = 0.0  # milliseconds
    begun = 0.0  # the step before: the next one is scheduled while it runs
    scheduler = Scheduler(
        BlockPool(40_000, 16),
        max_num_seqs=256,
        max_num_batched_tokens=16_640,
        prompt_tokens_beside=TOGETHER if turns else tokens,
    )
    scheduler.turn_tokens = tokens if turns else None
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
        while arrived < len(coming) and trace[arrived].time * 1e3 <= begun:
            scheduler.add(coming[arrived])
            arrived += 1
        works = scheduler.schedule()
        if not works:
            begun = now = max(now, trace[arrived].time * 1e3)
            continue
        begun = now
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
        "first p90": share(firsts, 0.9),
        "first p99": share(firsts, 0.99),
        "tok/s": made / now * 1e3,
    }


def burst(count: int) -> list[Arrival]:
    return [Arrival(max(0, i - READ_AT_ONCE) * READ_SECONDS, *CHAT) for i in range(count)]


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=16.0)
    parser.add_argument("--together", type=int, nargs="*", default=[4096])
    parser.add_argument("--turns", type=int, nargs="*", default=[384, 512, 640])
    parser.add_argument("--prompts", type=float, default=1.0, help="what passes take, times this")
    parser.add_argument("--burst", type=int, default=0, help="chats that come at once")
    options = parser.parse_args()
    once = read_trace(options.trace, count=options.requests)
    scale = options.rate * once[-1].time / (len(once) - 1)
    trace = read_trace(options.trace, count=options.requests, scale=scale)
    costs = Costs(options.prompts)
    policies = [(tokens, False) for tokens in options.together]
    policies += [(tokens, True) for tokens in options.turns]
    played = {"": trace} | ({"a burst, ": burst(options.burst)} if options.burst else {})
    for (kind, arrivals), (tokens, turns) in itertools.product(played.items(), policies):
        found = play(arrivals, costs, tokens=tokens, turns=turns)
        name = f"{kind}{'in turns' if turns else 'together'}, up to {tokens}"
        figures = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
        print(f"{name}: {figures}")


if __name__ == "__main__":
    main()
