"""What HTTP costs: tok/s through the server against the engine's own, on the same work, taking turns.

    python benchmarks/serve_overhead.py [--model smollm2-135m] [--rounds 3] [-o benchmarks/cpu/serve_overhead.jsonl]

Both run in fresh processes that stay up for all rounds, one of them idle while the other works. The engine's own rate is
`LLM.generate` of the same token ids, lengths and sampling; through HTTP every request streams, a chunk a token, and the
clients are in this process. Both count from the first submit to the last token, prefill included. A ratio is the median of
the rounds' ratios; the order changes from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from http_stream import about, percentiles, server, stream

from flyweight.bench.rows import environment_row, make_row

GOALS = {1: 0.97, 64: 0.90}  # share of the engine's own tok/s, by concurrency


def engine(connection: Connection, model: str, options: dict[str, Any]) -> None:
    """A process with nothing but an LLM: prompts in, seconds out."""
    from flyweight import LLM, SamplingParams

    llm = LLM(model, **options)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    connection.send("ready")
    while (work := connection.recv()) is not None:
        prompts, output = work
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
        connection.send(time.perf_counter() - begin)


async def through_http(port: int, prompts: list[list[int]], output: int, times: dict[str, list[float]]) -> float:
    async def one(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        came = [event.time async for event in stream(port, body)]
        times["ttft"].append(1000 * (came[0] - begin))
        times["tpot"].append(1000 * (came[-1] - came[0]) / (len(came) - 1))
        return len(came)

    begin = time.perf_counter()
    counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    assert counts == [output] * len(prompts), counts
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_overhead.jsonl")
    parser.add_argument("--flag", action="append", default=[], help="what is wrong with this run, for the row")
    given = parser.parse_args()
    seats, dice = max(GOALS), random.Random(0)
    options = {"max_num_seqs": seats, "max_model_len": 512, "prefix_cache": False}
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs, given.model, options), daemon=True)
    process.start()
    ours.recv()
    environment = environment_row()
    rows = [environment]
    flags = ["--max-num-seqs", str(seats), "--max-model-len", "512", "--no-prefix-cache"]
    with server(given.model, *flags) as (port, _, _):
        for concurrency, goal in GOALS.items():
            seconds: dict[str, list[float]] = {"engine": [], "http": []}
            times: dict[str, list[float]] = {"ttft": [], "tpot": []}
            for turn in range(given.rounds):
                prompts = [[dice.randrange(100, 40_000) for _ in range(given.input)] for _ in range(concurrency)]
                for who in ("engine", "http") if turn % 2 else ("http", "engine"):
                    if who == "engine":
                        ours.send((prompts, given.output_tokens))
                        seconds[who].append(ours.recv())
                    else:
                        seconds[who].append(asyncio.run(through_http(port, prompts, given.output_tokens, times)))
            tokens = concurrency * given.output_tokens
            ratios = [own / http for own, http in zip(seconds["engine"], seconds["http"], strict=True)]
            figures = {"output_tok_s": round(tokens / statistics.median(seconds["http"]), 2),
                       "engine_tok_s": round(tokens / statistics.median(seconds["engine"]), 2),
                       "share_of_engine": round(statistics.median(ratios), 4), "goal": goal,
                       "share_of_engine_samples": [round(ratio, 4) for ratio in ratios]}
            rows.append(make_row("serve", environment["id"], **about(given.model), concurrency=concurrency, arrivals="at once",
                                 dataset=f"random {given.input} in, {given.output_tokens} out", sampling="greedy",
                                 flags=given.flag, ttft_ms=percentiles(times["ttft"]),
                                 tpot_ms=percentiles(times["tpot"]), **figures))
            print(json.dumps({"concurrency": concurrency, **figures}))
    ours.send(None)
    process.join()
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
