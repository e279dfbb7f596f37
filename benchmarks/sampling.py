#!/usr/bin/env python3
"""What each way of choosing tokens costs: engine steps of every mode against greedy ones, in one run.

    python benchmarks/sampling.py OUT.jsonl [--model preset:qwen3-8b:int4] [--batch 1 64] [--steps 200] [--only top_p,min_p]

Each mode decodes the same batch, twice, with greedy steps before, between and after; a row has `tokens_per_s`, `step_us` (the
better of two medians over blocks of 10 steps) and `of_greedy`, the same of the better greedy block divided by it. `kernel_us`
is the sampling kernel alone on the model's own logits, captured and replayed. Mode `constrained` has one request
of the batch under a constraint: its mask, of random bits, is unpacked on the host for each token as a grammar's is. `mixed` has
all modes by turns.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy
import torch

from flyweight import LLM, SamplingParams
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.timing import random_prompts
from flyweight.clock import clock

GREEDY = {"temperature": 0.0}
MODES: dict[str, dict] = {
    "temperature": {"temperature": 0.8}, "top_k": {"temperature": 0.8, "top_k": 20}, "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05}, "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "wide": {"temperature": 1.0, "top_p": 0.999}, "penalties": {"temperature": 0.8, "repetition_penalty": 1.1,
                                                               "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"temperature": 0.8, "logit_bias": {100 + i: 1.0 for i in range(100)}}, "constrained": GREEDY, "mixed": {},
}
INPUT, BLOCK, WARM = 128, 10, 8


class RandomMask:
    """Half of the vocabulary, another half for each token."""

    def __init__(self, vocabulary: int):
        self.bits = numpy.random.default_rng(0).integers(0, 256, 2 * vocabulary, dtype=numpy.uint8)
        self.vocabulary = vocabulary

    def allowed(self, generated: object) -> torch.Tensor:
        first = len(generated) * 7 % self.vocabulary  # type: ignore[arg-type]
        bits = self.bits[first : first + -(-self.vocabulary // 8)]
        return torch.from_numpy(numpy.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(bool))


def options_of(mode: str, index: int) -> dict:
    if mode != "mixed":
        return GREEDY if mode == "greedy" else MODES[mode]
    kinds = [GREEDY, *(MODES[name] for name in ("temperature", "top_k", "top_p", "min_p", "qwen", "penalties", "bias"))]
    return kinds[index % len(kinds)]


def measure(llm: LLM, mode: str, batch: int, steps: int) -> float:
    """Seconds of a decode step: the median over blocks of steps."""
    engine = llm.engine
    prompts = random_prompts(batch, INPUT, vocabulary=llm.config.vocab_size, seed=1)
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=steps + WARM + 20, ignore_eos=True, **options_of(mode, i)).with_defaults({})
        bound = mode == "constrained" and i == 0
        requests += engine.submit(prompt, params, constraint=(lambda: RandomMask(engine.vocabulary)) if bound else None)
    while not all(request.generated >= WARM for request in requests):
        engine.step()
    times = []
    for _ in range(steps // BLOCK):
        torch.cuda.synchronize()
        begin = clock()
        for _ in range(BLOCK):
            engine.step()
        torch.cuda.synchronize()
        times.append((clock() - begin) / BLOCK)
    engine.cancel(requests)
    while engine.busy:
        engine.step()
    engine.step()
    return statistics.median(times)


def kernel_seconds(llm: LLM, mode: str, batch: int, replays: int = 20) -> float | None:
    """Of the kernel alone, for rows of the mode, on logits that a step has left."""
    rows, steps = llm.engine.runner.rows, llm.engine.runner.steps
    if rows.sampler is None or mode in ("greedy", "constrained"):
        return None
    requests = []
    for i, prompt in enumerate(random_prompts(batch, INPUT, vocabulary=llm.config.vocab_size, seed=1)):
        params = SamplingParams(max_tokens=50, ignore_eos=True, **options_of(mode, i)).with_defaults({})
        requests += llm.engine.submit(prompt, params)
    while not all(request.generated >= 3 for request in requests):
        llm.engine.step()
    size = next(size for size in steps.sizes if size >= batch)
    logits = steps.steps[size].logits[:batch]
    table = rows.sampling.for_kernel(rows.tokens.clone(), rows.lengths)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(10):
            rows.sampler(logits, table)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    events[0].record()
    for _ in range(replays):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    llm.engine.cancel(requests)
    while llm.engine.busy:
        llm.engine.step()
    return events[0].elapsed_time(events[1]) / 1e3 / (10 * replays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="preset:qwen3-8b:int4")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="some of: " + ", ".join(MODES))
    options = parser.parse_args()
    modes = options.only.split(",") if options.only else [*MODES]
    length = INPUT + options.steps + WARM + 64
    llm = LLM(options.model, max_num_seqs=max(options.batch), max_model_len=length, blocks=max(options.batch) * (length // 16 + 2))
    file, environment = ResultFile(options.out), environment_row(llm.device, measure_bandwidth=False)
    for batch in options.batch:
        greedy = [measure(llm, "greedy", batch, options.steps) for _ in range(2)]
        found: dict[str, list[float]] = {}
        for _ in range(2):
            for mode in modes:
                found.setdefault(mode, []).append(measure(llm, mode, batch, options.steps))
            greedy.append(measure(llm, "greedy", batch, options.steps))
        for mode, times in {"greedy": greedy, **found}.items():
            best, kernel = min(times), kernel_seconds(llm, mode, batch)
            row = {"model": options.model, "batch": batch, "sampling": mode, "options": str(options_of(mode, 1)),
                   "step_us": best * 1e6, "tokens_per_s": batch / best, "of_greedy": min(greedy) / best,
                   "kernel_us": None if kernel is None else kernel * 1e6, "steps": options.steps,
                   "spread": max(times) / best - 1}
            file.add(environment, make_row("sampling", environment["id"], **rounded(row, 5)))
            kernel_text = "" if kernel is None else f", kernel {kernel * 1e6:.1f} µs"
            print(f"batch {batch:3} {mode:12} {best * 1e6:8.1f} µs  {batch / best:9.0f} tok/s  {min(greedy) / best:.3f}{kernel_text}",
                  flush=True)


if __name__ == "__main__":
    main()
