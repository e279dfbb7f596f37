"""What HTTP costs: tok/s through the server against the engine's own, on the same work, taking turns.

    python benchmarks/serve_overhead.py [--model smollm2-135m] [--rounds 7] [-o benchmarks/cpu/serve_overhead.jsonl]

Both run in fresh processes that stay up for all rounds, one of them idle while the other works. The engine's own rate is
`LLM.generate` of the same token ids, lengths and sampling; through HTTP every request streams, a chunk a token, and the
clients are in this process. Both count from the first submit to the last token, prefill included. In each round every
concurrency has its turn, on both sides one right after the other, and who is first changes from round to round: what else
the machine does hits both. A ratio is the median of the rounds' ratios; all of them are in the row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from http_stream import about, percentiles, server, stream

from flyweight.bench.rows import environment_row, make_row

GOALS = {1: 0.97, 64: 0.90}  # share of the engine's own tok/s, by concurrency


class Engine:
    """A process with nothing but an LLM: prompts in, seconds out."""

    def __init__(self, model: str, options: dict[str, Any]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=answer, args=(theirs, model, options), daemon=True)
        self.process.start()

    def seconds(self, prompts: list[list[int]], output: int) -> float:
        self.connection.send((prompts, output))
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()


def answer(connection: Connection, model: str, options: dict[str, Any]) -> None:
    from flyweight import LLM, SamplingParams

    llm = LLM(model, **options)
    llm.warm_up()
    while (work := connection.recv()) is not None:
        prompts, output = work
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
        connection.send(time.perf_counter() - begin)


@dataclass
class Turns:
    """What came of one concurrency, round by round."""

    concurrency: int
    engine: list[float] = field(default_factory=list)  # seconds
    http: list[float] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=lambda: {"ttft": [], "tpot": []})

    def take(self, own: Engine, port: int, *, input: int, output: int, seed: int) -> None:
        dice = random.Random(f"{self.concurrency} {seed}")
        prompts = [[dice.randrange(10, 250) for _ in range(input)] for _ in range(self.concurrency)]
        for engine_now in (seed % 2 == 0, seed % 2 == 1):
            if engine_now:
                self.engine.append(own.seconds(prompts, output))
            else:
                self.http.append(asyncio.run(through_http(port, prompts, output, self.times)))

    def figures(self, output: int) -> dict[str, Any]:
        tokens = self.concurrency * output
        ratios = [own / http for own, http in zip(self.engine, self.http, strict=True)]
        return {"output_tok_s": round(tokens / statistics.median(self.http), 2),
                "engine_tok_s": round(tokens / statistics.median(self.engine), 2),
                "share_of_engine": round(statistics.median(ratios), 4), "goal": GOALS[self.concurrency],
                "share_of_engine_samples": [round(ratio, 4) for ratio in ratios]}


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_overhead.jsonl")
    parser.add_argument("--flag", action="append", default=[], help="what is wrong with this run, for the row")
    given = parser.parse_args()
    seats, context = max(GOALS), given.input + given.output_tokens + 16
    own = Engine(given.model, {"max_num_seqs": seats, "max_model_len": context, "prefix_cache": False})
    flags = ["--max-num-seqs", str(seats), "--max-model-len", str(context), "--no-prefix-cache"]
    with server(given.model, *flags) as served:
        every = [Turns(concurrency) for concurrency in GOALS]
        for turns in every:  # a round that does not count: whatever is still to be compiled or allocated
            Turns(turns.concurrency).take(own, served.port, input=given.input, output=8, seed=0)
        for turn in range(given.rounds):
            for turns in every:
                turns.take(own, served.port, input=given.input, output=given.output_tokens, seed=turn + 1)
    own.stop()
    rows = [environment := environment_row(served.facts["device"])]
    for turns in every:
        figures = turns.figures(given.output_tokens)
        rows.append(make_row("serve", environment["id"], **about(given.model), concurrency=turns.concurrency, arrivals="at once",
                             dataset=f"random {given.input} in, {given.output_tokens} out", sampling="greedy",
                             flags=given.flag, ttft_ms=percentiles(turns.times["ttft"]),
                             tpot_ms=percentiles(turns.times["tpot"]), **figures))
        print(json.dumps({"concurrency": turns.concurrency, **figures}))
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
