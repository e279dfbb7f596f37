"""Many streaming clients at once, a third of which hang up at random: nothing wrong, nothing lost, nothing leaked.

    python benchmarks/serve_load.py [--model smollm2-135m] [--clients 256] [--seconds 120] [-o benchmarks/cpu/serve_load.jsonl]

Each client asks again and again for a greedy answer of a random length to one of a few prompts, waiting as told when the
queue is full. Before the storm every prompt is asked once, alone, with the logprobs of the two best tokens. An answer is
right if its tokens are those, up to the first place where the two best logits are closer than TIE (kernels differ by batch
size); it is wrong if it leaves them anywhere else, and lost if it ends without a finish reason or with an error. In the end every
block must be free and nothing in flight, and the memory of both processes is compared with that at a third of the run.
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

from http_stream import Refused, about, call, percentiles, server, stream

from flyweight.bench.rows import environment_row, make_row

TIE = 1e-2  # logprobs closer than this may change places between batch sizes
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):", "Water boils at",
           "The three laws of robotics say that a robot may not", "Dear Sir or Madam, I am writing to you because",
           "In the year 2050, people will", "A short history of the bicycle: " * 6]


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
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    tokens: list[int]
    gaps: list[float]  # between the two best logprobs


async def reference(port: int, prompt: str, length: int) -> Reference:
    choice = (await call(port, "/v1/completions", asked(prompt, length) | {"logprobs": 2}))["choices"][0]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return Reference(choice["token_ids"], [values[0] - values[1] for values in best])


def asked(prompt: str, length: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def judge(tokens: list[int], right: Reference, tally: Tally) -> None:
    for at, token in enumerate(tokens):
        if token != right.tokens[at]:
            if right.gaps[at] < TIE:
                tally.ties += 1
            else:
                tally.wrong.append(f"token {at} is {token}, not {right.tokens[at]}, and the gap is {right.gaps[at]:.3f}")
            return


async def client(number: int, port: int, references: dict[str, Reference], end: float, tally: Tally, longest: int) -> None:
    dice = random.Random(number)
    while time.perf_counter() < end:
        prompt, length = dice.choice(PROMPTS), dice.randint(1, longest)
        leaves_after = dice.randint(0, length) if dice.random() < 1 / 3 else None
        await visit(port, prompt, length, leaves_after, references[prompt], tally)


async def visit(port: int, prompt: str, length: int, leaves_after: int | None, right: Reference, tally: Tally) -> None:
    sent = first = last = time.perf_counter()
    tokens: list[int] = []
    finished = None
    events = stream(port, asked(prompt, length))
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
        judge(tokens, right, tally)
    if finished is None or len(tokens) != length:
        tally.lost.append(f"{len(tokens)} of {length} tokens, finish_reason {finished}")
    else:
        tally.completed += 1
        tally.e2e.append(last - sent)
        if len(tokens) > 1:
            tally.tpot.append(1000 * (last - first) / (len(tokens) - 1))


def resident(pid: int) -> int:
    return next(int(line.split()[1]) * 1024 for line in open(f"/proc/{pid}/status") if line.startswith("VmRSS"))


async def storm(port: int, pids: tuple[int, int], *, clients: int, seconds: float, longest: int) -> dict[str, Any]:
    references = {prompt: await reference(port, prompt, longest) for prompt in PROMPTS}
    tally, begin = Tally(), time.perf_counter()
    tasks = [asyncio.create_task(client(number, port, references, begin + seconds, tally, longest)) for number in range(clients)]
    await asyncio.sleep(seconds / 3)
    early = [resident(pid) for pid in pids]
    await asyncio.gather(*tasks)
    duration = time.perf_counter() - begin
    late = [resident(pid) for pid in pids]
    while (state := await call(port, "/ready"))["in_flight"] or state["running"]:
        await asyncio.sleep(0.05)
    return {
        "concurrency": clients, "arrivals": "closed", "requests": tally.completed + tally.disconnected,
        "completed": tally.completed, "disconnected": tally.disconnected, "refused_429": tally.refused,
        "failed": len(tally.lost), "lost": tally.lost[:5], "wrong": len(tally.wrong), "wrong_examples": tally.wrong[:5],
        "ties": tally.ties, "leaked_blocks": state["kv_blocks_used"],
        "duration_s": round(duration, 1), "output_tok_s": round(tally.tokens / duration, 1), "ttft_ms": percentiles(tally.ttft),
        "tpot_ms": percentiles(tally.tpot), "gap_ms": percentiles(tally.gaps), "e2e_s": percentiles(tally.e2e),
        "count_source": "token_ids",
        "rss_mb_at_a_third": [round(size / 1e6) for size in early], "rss_mb_at_the_end": [round(size / 1e6) for size in late],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--longest", type=int, default=48)
    parser.add_argument("--option", action="append", default=[], help="for `flyweight serve`, such as --option=--max-num-seqs=64")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_load.jsonl")
    parser.add_argument("--flag", action="append", default=[], help="what is wrong with this run, for the row")
    given = parser.parse_args()
    with server(given.model, *given.option) as (port, *pids):
        found = asyncio.run(storm(port, (pids[0], pids[1]), clients=given.clients, seconds=given.seconds, longest=given.longest))
    environment = environment_row()
    row = make_row("serve", environment["id"], **about(given.model), tie_below=TIE, dataset="eight prompts", sampling="greedy",
                   flags=given.flag, **found)
    given.output.write_text("".join(json.dumps(line) + "\n" for line in (environment, row)))
    print(json.dumps(found, indent=2))
    if found["wrong"] or found["failed"] or found["leaked_blocks"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
