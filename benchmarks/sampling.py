#!/usr/bin/env python3
"""What each way of choosing tokens costs: engine steps of every mode against greedy ones, in one
run.

    python benchmarks/sampling.py OUT.jsonl [--model preset:qwen3-8b:int4] [--batch 1 64] [--rounds
        10] [--only top_p,min_p]

All modes take turns on the same sequences, in blocks of 10 steps. A row has `step_us` and
`host_us`, the medians over a mode's blocks of a step's time and of the host's work in it, and
`of_greedy`, the median of the greedy block of the same round divided by its own (`spread`: the
standard deviation of those). `kernel_us` is the sampling kernel alone on the model's own logits,
captured and replayed. Mode `constrained` has one request of the batch under a constraint: its mask,
of random bits, is unpacked on the host for each token as a grammar's is. `mixed` has all modes by
turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from flyweight import LLM, SamplingParams
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.steps import waits_into
from flyweight.bench.timing import random_prompts
from flyweight.clock import clock
from flyweight.engine.request import Constraint

GREEDY = {"temperature": 0.0}
MODES: dict[str, dict] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "wide": {"temperature": 1.0, "top_p": 0.999},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
    "bias": {"temperature": 0.8, "logit_bias": {100 + i: 1.0 for i in range(100)}},
    "constrained": GREEDY,
    "mixed": {},
}
NOTHING: dict = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
}
INPUT = 128
BLOCK = 10  # steps that are timed together
WARM = 3  # before them


class RandomMask(Constraint):
    """Half of the vocabulary, another half for each token."""

    def __init__(self, vocabulary: int):
        self.bits = numpy.random.default_rng(0).integers(0, 256, 2 * vocabulary, dtype=numpy.uint8)
        self.vocabulary = vocabulary

    def allowed(self, generated: object) -> torch.Tensor:
        first = len(generated) * 7 % self.vocabulary  # type: ignore[arg-type]
        bits = self.bits[first : first + -(-self.vocabulary // 8)]
        return torch.from_numpy(
            numpy.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(bool)
        )


def options_of(mode: str, index: int) -> dict:
    if mode != "mixed":
        return GREEDY if mode == "greedy" else MODES[mode]
    kinds = [
        GREEDY,
        *(
            MODES[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "qwen", "penalties", "bias")
        ),
    ]
    return kinds[index % len(kinds)]


class Sequences:
    """A batch that decodes, and may be asked to choose its tokens otherwise between two steps."""

    def __init__(self, llm: LLM, batch: int, tokens: int):
        self.engine = llm.engine
        self.vocabulary = llm.engine.vocabulary
        self.requests = []
        for prompt in random_prompts(batch, INPUT, vocabulary=llm.config.vocab_size, seed=1):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **GREEDY)
            self.requests += self.engine.submit(prompt, params)
        while not all(request.generated >= 2 for request in self.requests):
            self.engine.step()

    def choose_by(self, mode: str) -> None:
        rows = self.engine.runner.rows
        for i, request in enumerate(rows.requests):
            request.params = replace(request.params, **(NOTHING | options_of(mode, i)))
            bound = mode == "constrained" and i == 0
            request.constraint = RandomMask(self.vocabulary) if bound else None
        rows.sampling.enter(range(len(rows)), rows.requests)
        rows._join_modes()
        for _ in range(WARM):
            self.engine.step()

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and those in which the host worked."""
        waits: list[float] = []
        torch.cuda.synchronize()
        begin = clock()
        with waits_into(waits):
            for _ in range(steps):
                self.engine.step()
        torch.cuda.synchronize()
        seconds = clock() - begin
        return seconds / steps, (seconds - sum(waits)) / steps

    def end(self) -> None:
        self.engine.cancel(self.requests)
        while self.engine.busy:
            self.engine.step()
        self.engine.step()


def measure(
    llm: LLM, modes: Sequence[str], batch: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Of each mode (seconds of a step, of the host), a pair for every block; greedy ones are among
    them.

    All modes take turns on the same sequences: contexts, clocks and the machine's moods meet them
    alike.
    """
    every = ["greedy", *modes]
    for mode in every:  # graphs are captured, kernels loaded
        sequences = Sequences(llm, batch, 4 * WARM)
        sequences.choose_by(mode)
        sequences.end()
    sequences = Sequences(llm, batch, answer_tokens(modes, rounds))
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in every}
    for turn in range(rounds):
        for mode in every if turn % 2 == 0 else reversed(every):
            sequences.choose_by(mode)
            found[mode].append(sequences.block(BLOCK))
    sequences.end()
    return found


def answer_tokens(modes: Sequence[str], rounds: int) -> int:
    return (BLOCK + WARM) * rounds * (len(modes) + 1) + 8


def kernel_seconds(llm: LLM, mode: str, batch: int, replays: int = 20) -> float | None:
    """Of the kernel alone, for rows of the mode, on logits that a step has left."""
    rows, steps = llm.engine.runner.rows, llm.engine.runner.steps
    if rows.sampler is None or mode in ("greedy", "constrained"):
        return None
    requests = []
    for i, prompt in enumerate(
        random_prompts(batch, INPUT, vocabulary=llm.config.vocab_size, seed=1)
    ):
        params = SamplingParams(
            max_tokens=50, ignore_eos=True, **options_of(mode, i)
        ).with_defaults({})
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="some of: " + ", ".join(MODES))
    options = parser.parse_args()
    modes = options.only.split(",") if options.only else [*MODES]
    most = max(options.batch)
    length = INPUT + answer_tokens(modes, options.rounds) + 16
    llm = LLM(
        options.model, max_num_seqs=most, max_model_len=length, blocks=most * (length // 16 + 2)
    )
    file = ResultFile(options.out)
    environment = environment_row(llm.device, measure_bandwidth=False)
    for batch in options.batch:
        times = measure(llm, modes, batch, options.rounds)
        for mode, blocks in times.items():
            step = statistics.median(one for one, _ in blocks)
            ratios = [
                before / now for (before, _), (now, _) in zip(times["greedy"], blocks, strict=True)
            ]
            kernel = kernel_seconds(llm, mode, batch)
            row = {
                "model": options.model,
                "batch": batch,
                "sampling": mode,
                "options": str(options_of(mode, 1)),
                "step_us": step * 1e6,
                "tokens_per_s": batch / step,
                "of_greedy": statistics.median(ratios),
                "kernel_us": None if kernel is None else kernel * 1e6,
                "host_us": statistics.median(host for _, host in blocks) * 1e6,
                "steps": BLOCK * options.rounds,
                "spread": statistics.pstdev(ratios),
            }
            file.add(environment, make_row("sampling", environment["id"], **rounded(row, 5)))
            kernel_text = "" if kernel is None else f", kernel {kernel * 1e6:.1f} µs"
            print(
                f"batch {batch:3} {mode:12} {step * 1e6:8.1f} µs  {batch / step:9.0f} tok/s  "
                f"{row['of_greedy']:.3f}, host {row['host_us']:.0f} µs{kernel_text}",
                flush=True,
            )


if __name__ == "__main__":
    main()
