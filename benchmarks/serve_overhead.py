"""What HTTP costs: tok/s through the server against the engine's own, on the same work, by turns.

    python benchmarks/serve_overhead.py [--model smollm2-135m] [--work plain,tools] [--rounds 7]
        [-o benchmarks/cpu/serve_overhead.jsonl]

Both run in fresh processes that stay up for all rounds, one of them idle while the other works. The
engine's own rate is that of the same token ids, lengths and sampling without a server; through HTTP
every request streams, a chunk a token, and the clients are in this process. Both count from the
first submit to the last token, prefill included. In each round every piece of work has its turn, on
both sides one right after the other, and who is first changes from round to round: what else the
machine does hits both. A ratio is the median of the rounds' ratios; all of them are in the row.
Beside the share of the whole run, which the goal is about, a row has that of its two parts: until
every request has its first token, and from then on.

    plain   completions of token ids
    tools   chats that must call a tool: the chat template, a grammar that holds the call to its
            schema, and the parser that streams the call's arguments as deltas

`tools` needs a tokenizer with a template that knows tools. Presets have none: with `--tokenizer
OTHER` the preset's weights are written into `--folder` beside the tokenizer of the folder OTHER.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from http_stream import about, percentiles, run, server, stream

from flyweight import garbage
from flyweight.bench.rows import environment_row, make_row

GOAL = 0.97  # share of the engine's own tok/s
CONCURRENCIES = (1, 64)
TEMPLATE_TOKENS = 512  # room for what the chat template says of the tools
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a text into a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "enum": ["notes.txt", "draft.txt"]},
                # any text, which may end only after letters that no answer writes: all have one
                # length
                "text": {"type": "string", "pattern": r'^[^"\\\x00-\x1f]*qqqqqqqq$'},
            },
            "required": ["path", "text"],
            "additionalProperties": False,
        },
    },
}


def plain_body(dice: random.Random, *, input: int, output: int) -> dict[str, Any]:
    prompt = [dice.randrange(10, 250) for _ in range(input)]
    return {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}


def tools_body(dice: random.Random, *, input: int, output: int) -> dict[str, Any]:
    words = " ".join(dice.choice(("red", "green", "blue", "one", "two")) for _ in range(input))
    return {
        "messages": [{"role": "user", "content": words}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": output,
        "temperature": 0,
    }


WORK = {"plain": ("/v1/completions", plain_body), "tools": ("/v1/chat/completions", tools_body)}


@dataclass(frozen=True)
class Took:
    """Seconds from the first submit."""

    begun: float  # to the last request's first token
    whole: float  # to the last token of all


class Engine:
    """A process with nothing but an LLM: requests in, seconds out."""

    def __init__(self, model: str, options: dict[str, Any]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=answer, args=(theirs, model, options), daemon=True)
        self.process.start()

    def run(self, bodies: list[dict[str, Any]]) -> Took:
        self.connection.send(bodies)
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()


def answer(connection: Connection, model: str, options: dict[str, Any]) -> None:
    from flyweight import LLM, SamplingParams

    llm = LLM(model, **options)
    llm.warm_up()
    shapes = Shapes(llm)
    garbage.settle()  # as the server's processes do
    while (bodies := connection.recv()) is not None:
        work = [shapes.of(body) for body in bodies]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=body["max_tokens"],
                ignore_eos=body.get("ignore_eos", False),
            )
            for body in bodies
        ]
        begin = time.perf_counter()
        requests = [
            request
            for (tokens, constraint), one in zip(work, params, strict=True)
            for request in llm.engine.submit(tokens, one.with_defaults({}), constraint=constraint)
        ]
        while not all(request.finished for request in requests):
            llm.engine.step()
        seconds = time.perf_counter() - begin
        made = [request.generated for request in requests]
        assert made == [body["max_tokens"] for body in bodies], made
        firsts = [request.chunks[0][0] for request in requests]
        connection.send(Took(max(firsts) - begin, seconds))


class Shapes:
    """What the server makes of a chat before the engine sees it: its tokens, and its grammar."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.grammars: Any = None

    def of(self, body: dict[str, Any]) -> tuple[list[int], Any]:
        if "prompt" in body:
            return body["prompt"], None
        from flyweight.engine.grammar import Grammars
        from flyweight.server.answer_plan import plan_answer
        from flyweight.server.prompts import Prompts
        from flyweight.server.protocol import ChatRequest
        from flyweight.server.tools import choose_format
        from flyweight.server.tools.grammar import Thinking
        from flyweight.server.words import Words

        engine, tokenizer = self.llm.engine, self.llm.tokenizer
        if self.grammars is None:
            self.grammars = Grammars(tokenizer.inner, engine.vocabulary, engine.end_ids)
            self.prompts, self.words = Prompts(tokenizer), Words(tokenizer)
        request = ChatRequest(**body)
        text = self.prompts.read_chat(request)
        thinking = Thinking(possible=text.splits, begun=text.splits and text.inside)
        plan = plan_answer(
            request.chosen_tools,
            request.guide,
            self.words,
            thinking=thinking,
            form=choose_format(self.prompts.template, None),
            parallel=True,
            free=request.endless,
        )
        return asyncio.run(self.prompts.tokens_of(text)), self.grammars(plan.grammar)


@dataclass
class Turns:
    """What came of one piece of work at one concurrency, round by round."""

    work: str
    concurrency: int
    engine: list[Took] = field(default_factory=list)
    http: list[Took] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=lambda: {"ttft": [], "tpot": []})

    def take(self, own: Engine, port: int, *, input: int, output: int, seed: int) -> None:
        dice = random.Random(f"{self.concurrency} {seed}")
        path, body_of = WORK[self.work]
        bodies = [body_of(dice, input=input, output=output) for _ in range(self.concurrency)]
        for engine_now in (seed % 2 == 0, seed % 2 == 1):
            if engine_now:
                self.engine.append(own.run(bodies))
            else:
                self.http.append(run(through_http(port, path, bodies, self.times)))

    def figures(self, output: int) -> dict[str, Any]:
        tokens = self.concurrency * output
        pairs = list(zip(self.engine, self.http, strict=True))
        ratios = [own.whole / http.whole for own, http in pairs]
        begun = [own.begun / http.begun for own, http in pairs]
        rest = [(own.whole - own.begun) / (http.whole - http.begun) for own, http in pairs]
        return {
            "output_tok_s": round(tokens / statistics.median(took.whole for took in self.http), 2),
            "engine_tok_s": round(
                tokens / statistics.median(took.whole for took in self.engine), 2
            ),
            "share_of_engine": round(statistics.median(ratios), 4),
            "goal": GOAL,
            "share_of_engine_samples": [round(ratio, 4) for ratio in ratios],
            "share_until_first_tokens": round(statistics.median(begun), 4),
            "share_from_then_on": round(statistics.median(rest), 4),
        }


async def through_http(
    port: int, path: str, bodies: Sequence[dict[str, Any]], times: dict[str, list[float]]
) -> Took:
    async def one(body: dict[str, Any]) -> tuple[int, float]:
        asked = body | {"stream_options": {"include_usage": True}}
        came = [event async for event in stream(port, asked, path=path)]
        *chunks, last = came
        tokens = last.data["usage"]["completion_tokens"]
        times["ttft"].append(1000 * (chunks[0].time - begin))
        times["tpot"].append(1000 * (chunks[-1].time - chunks[0].time) / (tokens - 1))
        return tokens, chunks[0].time - begin

    begin = time.perf_counter()
    came = await asyncio.gather(*(one(body) for body in bodies))
    seconds = time.perf_counter() - begin
    assert [tokens for tokens, _ in came] == [body["max_tokens"] for body in bodies], came
    return Took(max(first for _, first in came), seconds)


def write_folder(model: str, folder: Path, tokenizer: Path) -> None:
    """A preset's weights beside a tokenizer, in a process that gives its memory back."""
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write_folder, args=(model, folder, tokenizer))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"{folder} could not be written")


def _write_folder(model: str, folder: Path, tokenizer: Path) -> None:
    import torch

    from flyweight.models.random_folder import write_preset

    write_preset(model, folder, device="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokenizer", type=Path, help="a folder; for presets, which have none")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("serve_overhead.work"),
        help="where a preset's weights go beside the tokenizer; as it is if there",
    )
    parser.add_argument("--work", default="plain", help="plain, tools, or both with a comma")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_overhead.jsonl"
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="what is wrong with this run, for the row"
    )
    given = parser.parse_args()
    model = given.model
    if given.tokenizer is not None:
        if not given.folder.exists():
            write_folder(given.model, given.folder, given.tokenizer)
        model = str(given.folder)
    measure(model, given)


def measure(model: str, given: argparse.Namespace) -> None:
    seats = max(CONCURRENCIES)
    context = given.input + given.output_tokens + TEMPLATE_TOKENS
    size = {"max_num_seqs": seats, "max_model_len": context}
    own = Engine(model, size | {"prefix_cache": False})
    flags = [
        word for name, value in size.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    every = [
        Turns(work, concurrency) for work in given.work.split(",") for concurrency in CONCURRENCIES
    ]
    with server(model, *flags, "--no-prefix-cache") as served:
        for turns in every:  # a round that does not count: what is to be compiled or allocated
            Turns(turns.work, turns.concurrency).take(
                own, served.port, input=given.input, output=8, seed=0
            )
        garbage.settle()  # of the clients
        print(f"{time.strftime('%X')} both are warm", file=sys.stderr, flush=True)
        for turn in range(given.rounds):
            for turns in every:
                turns.take(
                    own, served.port, input=given.input, output=given.output_tokens, seed=turn + 1
                )
            # what was measured is kept, whatever comes; the bandwidth needs memory that is taken
            # now
            write(every, given, environment_row(served.facts["device"], measure_bandwidth=False))
            tell(every, turn + 1, given.output_tokens)
    own.stop()
    write(every, given, environment_row(served.facts["device"]))
    for turns in every:
        figures = turns.figures(given.output_tokens)
        print(json.dumps({"work": turns.work, "concurrency": turns.concurrency, **figures}))


def tell(every: Sequence[Turns], rounds: int, output: int) -> None:
    shares = ", ".join(
        f"{turns.work} {turns.concurrency}: {turns.figures(output)['share_of_engine']:.1%}"
        for turns in every
    )
    print(f"{time.strftime('%X')} after {rounds} rounds: {shares}", file=sys.stderr, flush=True)


def write(every: Sequence[Turns], given: argparse.Namespace, environment: dict[str, Any]) -> None:
    rows = [environment, *(row_of(turns, given, environment["id"]) for turns in every)]
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_of(turns: Turns, given: argparse.Namespace, environment: str) -> dict[str, Any]:
    sampling = {"plain": "greedy", "tools": "greedy, a tool's call under its grammar"}
    return make_row(
        "serve",
        environment,
        **about(given.model),
        concurrency=turns.concurrency,
        arrivals="at once",
        sampling=sampling[turns.work],
        flags=given.flag,
        dataset=f"random {given.input} in, {given.output_tokens} out",
        ttft_ms=percentiles(turns.times["ttft"]),
        tpot_ms=percentiles(turns.times["tpot"]),
        **turns.figures(given.output_tokens),
    )


if __name__ == "__main__":
    main()
