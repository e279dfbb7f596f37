"""Many streaming clients at once, a third of which hang up at random: nothing wrong, nothing lost,
nothing leaked.

    python benchmarks/serve_load.py [--model smollm2-135m] [--clients 256] [--seconds 120] [-o
        benchmarks/cpu/serve_load.jsonl]

Each client asks again and again for a greedy answer of a random length to one of a few prompts,
waiting as told when the queue is full. Before the storm every prompt is asked once, alone, with the
logprobs of the two best tokens. An answer is right if its tokens are those, up to the first place
where the two best are closer than `--tie` (kernels differ by batch size, and random weights in 16
bits leave many such places); it is wrong if it leaves them anywhere else, and lost if it ends
without a finish reason or with an error. What an answer says after such a place is judged too, for
up to `--rescored` of them: the model is given prompt and answer, alone, and every token must be its
likeliest there, or as near to it as `--tie`. In the end every block must be free and nothing in
flight. The memory of both processes is in the row from begin to end. On a CPU the KV cache takes
memory when a block is first used: it is flat once every block was, so make the cache small
(`--option=--max-model-len=128`); docs/serve.md says what else may grow, and how far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_stream import (
    Refused,
    Served,
    about,
    call,
    gpu_memory,
    percentiles,
    resident,
    server,
    stream,
)

from flyweight.bench.rows import environment_row, make_row

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of robotics say that a robot may not",
    "Dear Sir or Madam, I am writing to you because",
    "In the year 2050, people will",
    "A short history of the bicycle: " * 6,
]
# of prompts for a model without a tokenizer, three of each
LENGTHS = (4, 15, 33, 64, 130, 257, 500, 1000)
SAMPLES = 24  # of the memory
AT_ONCE = 8  # answers judged at the same time: logits of every position are large

Prompt = str | tuple[int, ...]


@dataclass
class Tally:
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: int = 0
    completed: int = 0
    disconnected: int = 0
    refused: int = 0  # 429, asked again later
    # answers that left at a tie: its gap
    left: dict[tuple[Prompt, tuple[int, ...]], float] = field(default_factory=dict)
    ties: int = 0
    rescored: int = 0  # tokens
    not_best: list[float] = field(default_factory=list)  # of those: how far behind the likeliest
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # between the two best logprobs


@dataclass(frozen=True)
class Storm:
    port: int
    end: float
    longest: int  # tokens of an answer
    tie: float
    references: dict[Prompt, Reference]
    tally: Tally

    async def client(self, number: int) -> None:
        dice, prompts = random.Random(number), list(self.references)
        while time.perf_counter() < self.end:
            prompt, length = dice.choice(prompts), dice.randint(1, self.longest)
            leaves_after = dice.randint(0, length) if dice.random() < 1 / 3 else None
            await self.visit(prompt, length, leaves_after)

    async def visit(self, prompt: Prompt, length: int, leaves_after: int | None) -> None:
        tally = self.tally
        sent = first = last = time.perf_counter()
        tokens: list[int] = []
        finished = None
        events = stream(self.port, asked(prompt, length))
        try:
            async for event in events:
                if "error" in event.data:
                    tally.lost.append(event.data["error"]["message"])
                    return
                choice = event.data["choices"][0]
                (tally.gaps if tokens else tally.ttft).append(1000 * (event.time - last))
                first = first if tokens else event.time
                last, finished = event.time, choice["finish_reason"]
                tokens += choice["token_ids"]
                if leaves_after is not None and len(tokens) >= leaves_after and not finished:
                    tally.disconnected += 1
                    return
        except Refused as refused:
            if refused.status == 429:
                tally.refused += 1
                await asyncio.sleep(float(refused.headers["retry-after"]) * random.random())
            else:
                tally.lost.append(str(refused))
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            tally.lost.append(repr(error))
            return
        finally:
            await events.aclose()
            tally.tokens += len(tokens)
            self.judge(prompt, tokens)
        if finished is None or len(tokens) != length:
            tally.lost.append(f"{len(tokens)} of {length} tokens, finish_reason {finished}")
        else:
            tally.completed += 1
            tally.e2e.append(last - sent)
            if len(tokens) > 1:
                tally.tpot.append(1000 * (last - first) / (len(tokens) - 1))

    def judge(self, prompt: Prompt, tokens: list[int]) -> None:
        right = self.references[prompt]
        at = next((at for at, token in enumerate(tokens) if token != right.tokens[at]), None)
        if at is None:
            return
        if right.gaps[at] < self.tie:
            self.tally.ties += 1
            self.tally.left[prompt, tuple(tokens)] = right.gaps[at]
        else:
            self.tally.wrong.append(
                f"token {at} is {tokens[at]}, not {right.tokens[at]}, and the "
                f"gap is {right.gaps[at]:.3f}"
            )

    async def rescore(self, prompt: Prompt, tokens: tuple[int, ...]) -> None:
        """Every token of an answer beside the one the model likes best after those before it."""
        begin = self.references[prompt].prompt
        body = {"prompt": [*begin, *tokens], "max_tokens": 0, "echo": True, "logprobs": 1}
        found = (await call(self.port, "/v1/completions", body))["choices"][0]["logprobs"]
        behind = [
            max(top.values()) - own
            for own, top in zip(
                found["token_logprobs"][len(begin) :],
                found["top_logprobs"][len(begin) :],
                strict=True,
            )
        ]
        self.tally.rescored += len(behind)
        self.tally.not_best += [gap for gap in behind if gap > 0]
        self.tally.wrong += [
            f"token {at} of an answer that left is {gap:.3f} behind the likeliest"
            for at, gap in enumerate(behind)
            if gap >= self.tie
        ]


def asked(prompt: Prompt, length: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def reference(port: int, prompt: Prompt, length: int) -> Reference:
    choice = (await call(port, "/v1/completions", asked(prompt, length) | {"logprobs": 2}))[
        "choices"
    ][0]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return Reference(
        choice["prompt_token_ids"], choice["token_ids"], [values[0] - values[1] for values in best]
    )


async def watch(served: Served, begin: float, every: float, found: list[dict[str, Any]]) -> None:
    """The memory as time goes by, until cancelled."""
    while True:
        sizes = {
            "second": round(time.perf_counter() - begin),
            "server_mb": resident(served.pid),
            "engine_mb": resident(served.engine),
        }
        if served.facts["device"].startswith("cuda"):
            sizes["gpu_mb"] = await asyncio.to_thread(gpu_memory)
        found.append(sizes)
        await asyncio.sleep(every)


async def run(served: Served, prompts: list[Prompt], given: argparse.Namespace) -> dict[str, Any]:
    references = {prompt: await reference(served.port, prompt, given.longest) for prompt in prompts}
    different = len({token for right in references.values() for token in right.tokens})
    if different < len(prompts):
        raise SystemExit(
            f"{len(prompts)} answers have {different} different tokens: whether one "
            f"is wrong could not be told"
        )
    begin, memory = time.perf_counter(), list[dict[str, Any]]()
    storm = Storm(served.port, begin + given.seconds, given.longest, given.tie, references, Tally())
    watcher = asyncio.create_task(watch(served, begin, given.seconds / SAMPLES, memory))
    await asyncio.gather(*(storm.client(number) for number in range(given.clients)))
    duration, tally = time.perf_counter() - begin, storm.tally
    while (state := await call(served.port, "/ready"))["in_flight"] or state["running"]:
        await asyncio.sleep(0.05)
    watcher.cancel()
    left = random.Random(0).sample(
        sorted(tally.left, key=str), min(given.rescored, len(tally.left))
    )
    for at in range(0, len(left), AT_ONCE):
        await asyncio.gather(
            *(storm.rescore(prompt, tokens) for prompt, tokens in left[at : at + AT_ONCE])
        )
    return {
        "concurrency": given.clients,
        "arrivals": "closed",
        "requests": tally.completed + tally.disconnected,
        "completed": tally.completed,
        "disconnected": tally.disconnected,
        "refused_429": tally.refused,
        "failed": len(tally.lost),
        "lost": tally.lost[:5],
        "wrong": len(tally.wrong),
        "wrong_examples": tally.wrong[:5],
        "different_tokens": different,
        "tie_below": given.tie,
        "ties": tally.ties,
        "largest_tie": round(max(tally.left.values(), default=0.0), 4),
        "rescored": {
            "answers": len(left),
            "tokens": tally.rescored,
            "not_the_likeliest": len(tally.not_best),
            "furthest_behind": round(max(tally.not_best, default=0.0), 4),
        },
        "leaked_blocks": state["kv_blocks_used"],
        "kv_blocks": state["kv_blocks"],
        "duration_s": round(duration, 1),
        "output_tok_s": round(tally.tokens / duration, 1),
        "ttft_ms": percentiles(tally.ttft),
        "tpot_ms": percentiles(tally.tpot),
        "gap_ms": percentiles(tally.gaps),
        "e2e_s": percentiles(tally.e2e),
        "count_source": "token_ids",
        "memory": memory,
    }


def make_prompts(model: str) -> tuple[list[Prompt], str]:
    """Texts, or for a preset, which has no tokenizer, token ids; and what the row calls them."""
    if not model.startswith("preset:"):
        return list(TEXTS), f"{len(TEXTS)} texts"
    dice = random.Random(0)
    prompts: list[Prompt] = [
        tuple(dice.randrange(100, 10_000) for _ in range(length))
        for length in LENGTHS
        for _ in range(3)
    ]
    return prompts, f"{len(prompts)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} random ids"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--longest", type=int, default=48, help="answer, in tokens; the shortest has one"
    )
    parser.add_argument(
        "--tie", type=float, default=1e-2, help="logprobs closer than this may change places"
    )
    parser.add_argument(
        "--rescored",
        type=int,
        default=256,
        help="most answers that left at a tie and are judged to their end",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="for `flyweight serve`, such as --option=--max-num-seqs=64",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_load.jsonl"
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="what is wrong with this run, for the row"
    )
    given = parser.parse_args()
    prompts, dataset = make_prompts(given.model)
    with server(given.model, *given.option) as served:
        found = asyncio.run(run(served, prompts, given))
    environment = environment_row(served.facts["device"])
    row = make_row(
        "serve",
        environment["id"],
        **about(given.model),
        dataset=f"{dataset}, 1 to {given.longest} out",
        sampling="greedy",
        prefix_cache=served.facts["prefix_cache"],
        flags=given.flag,
        **found,
    )
    given.output.write_text("".join(json.dumps(line) + "\n" for line in (environment, row)))
    print(json.dumps(found))
    if found["wrong"] or found["failed"] or found["leaked_blocks"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
