#!/usr/bin/env python3
"""What speculation is worth on real prompts: answers of one request at a time with each drafter,
beside answers without.

    python benchmarks/speculation.py smollm2-135m --speculate ngram --speculate eagle3:./my-head
        --text book.txt \
        --chat mt-bench-questions.jsonl --code src/flyweight/engine/scheduler.py

Kinds of prompts:

    quoting   a passage of --text, to be repeated word for word
    code      a piece of each file of --code, to be written again with one name changed
    chat      the first turn of each tenth question of --chat (JSON lines with `turns`): those that
              train_head.py never trains on
    plain     the beginning of a passage of --text, to be continued: nothing to copy
    novel     the same, drawn at a temperature so high that nothing is ever said twice

A row for each kind and drafter: tokens a second after the first token (median over prompts; `each`:
of every prompt), the ratio to no speculation in the same run, tokens a step, the share of right
guesses, where the time of steps with guesses goes (`StepClock`), and how many answers are the same
token by token. Greedy, but for `novel`, whose seeds are the same. Of each other answer `parted`
says where it begins to differ, how far apart the model's two best logits are there (in a pass over
the text up to there), and whether the two answers go on with these two.

With `--memory` there is a row for each drafter instead, of the memory that it takes on a GPU: all
of it, its weights, and what is beside them. Every engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from drafter_answers import questions_of

from flyweight.bench.environment import commit
from flyweight.engine.flight import Flight
from flyweight.engine.llm import LLM
from flyweight.engine.prompts import Prompt
from flyweight.engine.request import Output, SamplingParams
from flyweight.engine.speculation.head import HeadDrafter
from flyweight.engine.speculation.lookup import LookupFirst
from flyweight.engine.speculation.model import ModelDrafter
from flyweight.engine.work import Work
from flyweight.models.decoder import Decoder

PASSAGE, PIECE = 900, 1400  # characters
CONTEXT = 2048  # tokens
WARM = 2  # prompts of each kind that run before any is measured
KINDS = ("quoting", "plain", "code", "chat", "novel")
NOVEL = 4.0  # temperature: of many thousand tokens none is likely


def passages(files: list[str], length: int, count: int) -> list[str]:
    """Evenly out of the files, from the beginnings of lines."""
    found: list[str] = []
    for file in files:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        each = max(1, count // len(files))
        for i in range(each):
            begin = text.find("\n", i * max(0, len(text) - length) // each) + 1
            found.append(text[begin : begin + length].strip())
    return found[:count]


def renamed(piece: str) -> str:
    """The prompt for a piece of code: its most frequent name of one's own gets another."""
    names = re.findall(r"\b[a-z_]{5,}\b", piece)
    name = max(set(names), key=names.count) if names else "value"
    return (
        f"Rewrite this code with `{name}` renamed to `{name}_new`, and change nothing "
        f"else.\n\n```python\n{piece}\n```"
    )


def prompts_of(options: argparse.Namespace) -> dict[str, list[Prompt]]:
    found: dict[str, list[Prompt]] = {}

    def ask(text: str) -> Prompt:
        return [{"role": "user", "content": text}]

    count = options.prompts
    if options.text:
        texts = passages(options.text, PASSAGE, count)
        found["quoting"] = [
            ask(f"Repeat the following text word for word:\n\n{text}") for text in texts
        ]
        found["plain"] = [text[:200] for text in texts]
        found["novel"] = found["plain"]
    if options.code:
        found["code"] = [ask(renamed(piece)) for piece in passages(options.code, PIECE, count)]
    if options.chat:
        turns = questions_of(options.chat, evaluated=True)
        found["chat"] = [ask(turn) for turn in turns[:count]]
    return {kind: found[kind] for kind in options.only or found if kind in found}


class StepClock:
    """Where the time of steps with guesses goes: from a step's tokens being read to the next step's
    launch (`host`), and from there to its tokens being read (`step`). Steps that are launched
    before the one before is read make the device wait for nothing: from its tokens to theirs
    (`ahead`).
    """

    def __init__(self, llm: LLM):
        self.times: dict[str, list[float]] = {"host": [], "step": [], "ahead": []}
        self.read_at = self.launched_at = 0.0
        self.was_ahead: dict[int, bool] = {}  # by flight
        runner = llm.engine.runner
        launch = runner.launch

        def timed(works: Sequence[Work], launched: Callable[[], None] | None = None) -> Flight:
            waited_for = llm.engine.flight is None and any(work.drafts for work in works)

            def on_its_way() -> None:
                self.launched_at = time.perf_counter()
                self.times["host"].append(self.launched_at - self.read_at)
                if launched is not None:
                    launched()

            flight = launch(works, on_its_way if waited_for else launched)
            if flight.speculative:
                self.was_ahead[id(flight)] = not waited_for
            return flight

        runner.launch = timed  # type: ignore[method-assign]
        land = llm.engine._land

        def landed() -> None:
            flight = llm.engine.flight
            if flight is not None:
                flight.download.lists()
                now = time.perf_counter()
                ahead = self.was_ahead.pop(id(flight), None)
                if ahead is not None:
                    name, begun = ("ahead", self.read_at) if ahead else ("step", self.launched_at)
                    self.times[name].append(now - begun)
                self.read_at = now
            land()

        llm.engine._land = landed  # type: ignore[method-assign]

    def figures(self) -> dict[str, float]:
        """Medians in microseconds, and the share of steps with guesses that were launched ahead;
        then from the beginning again.
        """
        found = {
            f"{name}_us": round(1e6 * statistics.median(values), 1)
            for name, values in self.times.items()
            if values
        }
        ahead, waited_for = len(self.times["ahead"]), len(self.times["step"])
        if ahead + waited_for:
            found["ahead"] = round(ahead / (ahead + waited_for), 3)
        for values in self.times.values():
            values.clear()
        self.was_ahead.clear()
        return found


def sampling_of(kind: str, tokens: int) -> SamplingParams:
    if kind == "novel":
        return SamplingParams(max_tokens=tokens, temperature=NOVEL, seed=7, ignore_eos=True)
    return SamplingParams(max_tokens=tokens, temperature=0)


def speed(output: Output) -> float:
    """Tokens a second after the first chunk."""
    chunks = output.completions[0].timing.chunks
    if len(chunks) < 2:
        return 0.0
    return sum(tokens for _, tokens in chunks[1:]) / (chunks[-1][0] - chunks[0][0])


def measure(
    llm: LLM, prompts: list[Prompt], params: SamplingParams, clock: StepClock
) -> tuple[list[float], dict[str, Any], list[list[int]]]:
    """Tokens a second of each answer, once a few have captured and compiled what they need."""
    outputs: list[Output] = []
    for some in (prompts[:WARM], prompts):
        clock.figures()
        if llm.engine.speculator is not None:
            llm.engine.speculator.restart()
        outputs = [llm.generate([prompt], params)[0] for prompt in some]
    answers = [output.completions[0].token_ids for output in outputs]
    steps = sum(len(output.completions[0].timing.chunks) for output in outputs)
    more: dict[str, Any] = {"tokens_per_step": round(sum(map(len, answers)) / max(1, steps), 3)}
    if llm.engine.speculator is not None:
        more |= {name: round(value, 4) for name, value in llm.engine.speculator.figures().items()}
        # a CPU's launch is the step itself
        more |= clock.figures() if llm.device.type == "cuda" else {}
    return [round(speed(output), 1) for output in outputs], more, answers


def parted(
    llm: LLM, prompts: list[Prompt], answers: list[list[int]], others: list[list[int]]
) -> list[dict[str, Any]]:
    """Where answers that should be alike begin to differ, and how sure the model is there."""
    found: list[dict[str, Any]] = []
    for prompt, answer, other in zip(prompts, answers, others, strict=True):
        pairs = enumerate(itertools.zip_longest(answer, other))
        at = next((i for i, (one, two) in pairs if one != two), None)
        if at is None:
            continue
        text = [*llm.prepare(prompt).tokens, *other[:at]]
        output = llm.generate([text], max_tokens=1, temperature=0, logprobs=2)[0]
        logprobs = output.completions[0].logprobs
        assert logprobs is not None
        best = logprobs[0].top
        first, second = sorted(best.values(), reverse=True)[:2]
        both = {*answer[at : at + 1], *other[at : at + 1]}
        found.append({"at": at, "gap": round(first - second, 4), "between_best": both <= set(best)})
    return found


def held_bytes() -> int:
    """Of the device's memory by this process, captured steps included, once nothing is held that is
    not needed. What the driver and libraries take for themselves does not count.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def drafter_bytes(llm: LLM) -> int:
    """Of the drafter's weights."""
    speculator = llm.engine.speculator
    drafter = None if speculator is None else speculator.drafter
    if isinstance(drafter, LookupFirst):
        drafter = drafter.other
    if isinstance(drafter, HeadDrafter):
        return drafter.head.nbytes
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.runner.model, Decoder):
        return drafter.runner.model.nbytes
    return 0


def open_engine(model: str, drafter: str, device: str | None) -> LLM:
    """What steps with guesses launch is compiled and captured: shorter guesses than those of the
    first answers may come first in a later one.
    """
    llm = LLM(
        model,
        device=device,
        speculate=drafter,
        prefix_cache=False,
        max_num_seqs=4,
        max_model_len=CONTEXT,
        blocks=4 * CONTEXT // 16,
    )
    speculator, steps = llm.engine.speculator, llm.engine.runner.shared_steps
    if speculator is not None and steps is not None:
        speculator.drafter.warm_up()
        steps.warm_up()
    return llm


def follow(llm: LLM, way: str | None) -> None:
    """Whether steps are launched behind guesses that nobody has read; None: as times say."""
    speculator = llm.engine.speculator
    if speculator is None:
        return
    vars(speculator).pop("follows", None)
    if way in ("never", "always"):
        vars(speculator)["follows"] = lambda works: way == "always"


def memory_of(model: str, drafter: str) -> tuple[str, int, int]:
    """The device, what an engine holds once every step is captured, and the drafter's weights."""
    llm = open_engine(model, drafter, "cuda")
    llm.warm_up()
    llm.generate([list(range(10, 200)) * 2], max_tokens=32, temperature=0, ignore_eos=True)
    return torch.cuda.get_device_name(0), held_bytes(), drafter_bytes(llm)


def memory_rows(options: argparse.Namespace) -> None:
    """Engines of processes of their own, all at once: memory is counted by process."""
    drafters = ["off", *options.speculate]
    with multiprocessing.get_context("spawn").Pool(len(drafters), maxtasksperchild=1) as pool:
        waiting = [pool.apply_async(memory_of, (options.model, drafter)) for drafter in drafters]
        _, without, _ = waiting[0].get()
        for drafter, one in zip(drafters, waiting, strict=True):
            name, held, weights = one.get()
            row = {
                "what": "memory",
                "tree": commit(),
                "model": Path(options.model).name,
                "device": name,
                "drafter": drafter,
                "held_mb": round(held / 1e6, 1),
                "more_mb": round((held - without) / 1e6, 1),
                "drafter_weights_mb": round(weights / 1e6, 1),
                "beside_mb": round((held - without - weights) / 1e6, 1),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--speculate", action="append", required=True, help="a drafter; may be given several times"
    )
    parser.add_argument("--text", action="append")
    parser.add_argument("--code", action="append")
    parser.add_argument("--chat")
    parser.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        help="kinds, in this order; all that there are",
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    parser.add_argument(
        "--follow",
        action="append",
        choices=("decides", "never", "always"),
        help="whether steps are launched behind guesses that nobody has read; by turns",
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--memory", action="store_true", help="rows of memory, not of speed")
    options = parser.parse_args()
    if options.memory:
        memory_rows(options)
        return
    kinds = prompts_of(options)
    plain: dict[str, tuple[float, list[list[int]]]] = {}
    for drafter in ["off", *options.speculate]:
        begin = time.monotonic()
        llm = open_engine(options.model, drafter, options.device)
        name = torch.cuda.get_device_name(0) if llm.device.type == "cuda" else "CPU"
        clock = StepClock(llm)
        ways = [None] if llm.engine.speculator is None else options.follow or [None]
        for way, (kind, prompts) in itertools.product(ways, kinds.items()):
            follow(llm, way)
            params = sampling_of(kind, options.tokens)
            each, more, answers = measure(llm, prompts, params, clock)
            tok_s = statistics.median(each)
            plain.setdefault(kind, (tok_s, answers))
            without, same = plain[kind]
            row = {
                "what": "real prompts",
                "tree": commit(),
                "model": Path(options.model).name,
                "device": name,
                "executor": llm.executor,
                "prompts": kind,
                "drafter": drafter,
                "tok_s": round(tok_s, 1),
                "ratio": round(tok_s / without, 3) if without else None,
                "same_answers": sum(a == b for a, b in zip(answers, same, strict=True)),
                "of": len(answers),
                "each": each,
                "parted": [] if kind == "novel" else parted(llm, prompts, answers, same),
            }
            if way is not None:
                row["follow"] = way
            print(json.dumps(row | more), flush=True)
        print(f"# {drafter}: {time.monotonic() - begin:.0f} s", flush=True)
        del llm, clock


if __name__ == "__main__":
    main()
