#!/usr/bin/env python3
"""Prompts to their first tokens through the engine, passes launched one by one and captured: host
and device time apart.

    python benchmarks/prefill_passes.py OUT.jsonl [--model preset:qwen3-8b:w8a8 ...] [--cases 16 256
        2048 8192x32 64+256]

A case is tokens of one prompt, TOKENSxPROMPTS together, or ROWS+TOKENS: a prompt beside so many
answers (of 512 tokens before them). Each row has, as medians of `repeats` after the warm-up:
`step_ms` from submitting to holding the tokens (for a prompt beside answers: the step itself),
`host_ms` of launching, `device_ms` between events before and after the launches. A pass is
host-bound where the two are alike. `token_gap` is the largest difference of logprobs of the five
likeliest first tokens to those of the captured passes; where one is not among their eight
likeliest, to the last of these.

`--zeros` measures once more with the linears' weights set to zero: at its power limit a GPU
multiplies zeros faster than random numbers, and engines whose dummy weights are integers that
nobody filled are measured on zeros.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch

from flyweight import LLM, SamplingParams
from flyweight.bench.kernels import tensors_of
from flyweight.bench.rows import environment_row, make_row, rounded
from flyweight.bench.timing import random_prompts
from flyweight.clock import clock
from flyweight.engine.request import Request

CASES = ["16", "64", "256", "512", "2048", "16384", "8192x32", "64+256"]
# tokens of the prompts whose answers run beside; more than are waited for
BEFORE, ANSWER = 512, 4000


class Stopwatch:
    """Stands before a runner's `launch`; its last host seconds, and the events around what was
    launched.
    """

    def __init__(self, engine):
        self.engine, self.launch, self.host, self.tokens = engine, engine.runner.launch, 0.0, 0
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        engine.runner.launch = self

    def __call__(self, works, launched):
        self.events[0].record()
        begin = clock()
        flight = self.launch(works, launched)
        self.host, self.tokens = clock() - begin, sum(work.count for work in works)
        self.events[1].record()
        return flight

    def times(self, seconds: float) -> tuple[float, float, float]:
        """Milliseconds: the step that took so long, its host and device time."""
        torch.cuda.synchronize()
        return seconds * 1e3, self.host * 1e3, self.events[0].elapsed_time(self.events[1])


def params(llm: LLM, output: int, **options) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=output, ignore_eos=True, **options
    ).with_defaults(llm.sampling_defaults)


def first_tokens(
    llm: LLM, watch: Stopwatch, prompts: list[list[int]], **options
) -> tuple[tuple, list[Request]]:
    torch.cuda.synchronize()
    begin = clock()
    requests = [llm.engine.submit(prompt, params(llm, 1, **options))[0] for prompt in prompts]
    while not all(request.finished for request in requests):
        llm.engine.step()
    return watch.times(clock() - begin), requests


def beside(llm: LLM, watch: Stopwatch, prompt: list[int]) -> tuple:
    """A step with the prompt while others answer."""
    request = llm.engine.submit(prompt, params(llm, 1))[0]
    torch.cuda.synchronize()
    begin = clock()
    llm.engine.step()
    torch.cuda.synchronize()
    found, seconds = watch.tokens, clock() - begin
    assert found > len(prompt)
    times = watch.times(seconds)
    while not request.finished:
        llm.engine.step()
    return times


def measure(llm: LLM, watch: Stopwatch, case: str, repeats: int) -> dict[str, float]:
    rows, _, rest = case.rpartition("+")
    tokens, _, count = rest.partition("x")
    each = int(tokens) // int(count or 1)
    prompts = random_prompts(repeats + 3, each, vocabulary=llm.config.vocab_size, seed=1)
    others = [
        llm.engine.submit(prompt, params(llm, ANSWER))[0]
        for prompt in random_prompts(
            int(rows or 0), BEFORE, vocabulary=llm.config.vocab_size, seed=2
        )
    ]
    while any(request.generated < 2 for request in others):
        llm.engine.step()
    samples = [
        beside(llm, watch, prompt)
        if rows
        else first_tokens(llm, watch, [prompt] * int(count or 1))[0]
        for prompt in prompts
    ][3:]
    llm.engine.cancel(others)
    while llm.engine.busy:
        llm.engine.step()
    return dict(
        zip(
            ("step_ms", "host_ms", "device_ms"),
            map(statistics.median, zip(*samples, strict=True)),
            strict=True,
        )
    )


def token_gap(one: list[Request], other: list[Request]) -> float:
    tops = [
        (here.logprobs[0].top, there.logprobs[0].top)
        for here, there in zip(one, other, strict=True)
    ]
    return max(
        abs(value - there.get(token, min(there.values())))
        for here, there in tops
        for token, value in [*here.items()][:5]
    )


def set_to_zero(llm: LLM) -> None:
    for block in llm.decoder.blocks:
        for tensor in tensors_of(list(block.linears.values()), depth=8):
            # what is smaller is a counter or a norm's weight
            if tensor.is_cuda and tensor.nbytes >= 1 << 16:
                tensor.zero_()


def measure_model(name: str, cases: list[str], repeats: int, *, zeros: bool):
    llm = LLM(name, max_model_len=17 * 1024, max_num_seqs=80, blocks=4500, prefix_cache=False)
    llm.engine.overlap = False
    watch, graphs, answers = Stopwatch(llm.engine), llm.engine.runner.passes, {}
    probe = random_prompts(1, 200, vocabulary=llm.config.vocab_size, seed=3) * 2
    for way, passes in (("one by one", None), ("captured", graphs)):
        llm.engine.runner.passes = passes
        # a prompt alone, and two together, which comes by the third time from a graph
        for count in (1, 2):
            answers[way, count] = [
                first_tokens(llm, watch, probe[:count], logprobs=8)[1] for _ in range(3)
            ][-1]
    gap = max(
        token_gap(answers["one by one", count], answers["captured", count]) for count in (1, 2)
    )
    for case in cases:
        for way, passes in (("one by one", None), ("captured", graphs)):
            llm.engine.runner.passes = passes
            yield dict(
                model=name,
                case=case,
                passes=way,
                token_gap=gap,
                **measure(llm, watch, case, repeats),
            )
    if zeros:
        set_to_zero(llm)
        for case in cases:
            yield dict(
                model=name,
                case=case,
                passes="captured, weights of zeros",
                **measure(llm, watch, case, repeats),
            )
    yield dict(
        model=name,
        case="passes held",
        passes="captured",
        held=len(graphs.held),
        captured=sum(one.graph is not None for one in graphs.held.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--model",
        nargs="+",
        default=[f"preset:qwen3-8b:{scheme}" for scheme in ("w8a8", "bf16", "int4")],
    )
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--zeros", action="store_true")
    options = parser.parse_args()
    environment = environment_row("cuda", measure_bandwidth=False)
    with options.out.open("a") as file:
        file.write(json.dumps(environment) + "\n")
        for name in options.model:
            for fields in measure_model(name, options.cases, options.repeats, zeros=options.zeros):
                file.write(
                    json.dumps(make_row("prefill", environment["id"], **rounded(fields))) + "\n"
                )
                file.flush()
                print(
                    {
                        key: round(value, 2) if isinstance(value, float) else value
                        for key, value in fields.items()
                    },
                    flush=True,
                )
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
