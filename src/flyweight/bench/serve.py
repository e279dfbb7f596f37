"""`bench serve`: one case under one kind of load, over HTTP or in process; a row a run, its
requests in a file beside it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flyweight.backends.base import Limits
from flyweight.backends.native import Native
from flyweight.backends.openai import OpenAI
from flyweight.bench import arrivals, datasets
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.check import REFERENCE_TOKENS, SelfCheck, answers, failed_check, is_ours
from flyweight.bench.datasets import Conversation
from flyweight.bench.load import EngineTarget, Record, SerialTarget, run_load, run_processes
from flyweight.bench.rows import ResultFile, Row, make_row, rounded
from flyweight.bench.serving import Objective, figures, find_max_rate, sample
from flyweight.bench.timing import random_prompts, seed_from
from flyweight.errors import OptionError
from flyweight.saving import write_text


@dataclass(frozen=True)
class Load:
    """What is asked, and when; `about` are the fields that say so in the row."""

    dataset: str
    input: int
    output: int
    spread: float
    prefix: int
    turns: int
    requests: int
    trace: Path | None
    time_scale: float
    burst: int
    concurrency: int | None
    seed: int

    def conversations(self, vocabulary: int, rate: float | None) -> list[Conversation]:
        if self.trace is not None:
            found = arrivals.read_trace(self.trace, count=self.requests, scale=self.time_scale)
            return datasets.from_trace(found, vocabulary=vocabulary, seed=self.seed)
        if self.dataset == "random":
            talks = datasets.RandomIds(
                vocabulary,
                self.input,
                self.output,
                spread=self.spread,
                prefix=self.prefix,
                turns=self.turns,
                seed=self.seed,
            ).make(self.requests)
        else:
            talks = datasets.read_conversations(
                Path(self.dataset), output=self.output, count=self.requests, seed=self.seed
            )
        if rate is None:
            return talks
        return datasets.schedule(
            talks, arrivals.bursts(len(talks), rate, size=self.burst, seed=self.seed)
        )

    def about(self, rate: float | None) -> Row:
        kind = (
            "trace"
            if self.trace
            else "closed"
            if rate is None
            else "poisson"
            if self.burst == 1
            else "burst"
        )
        lengths = (
            (f"random {self.input}/{self.output}")
            + (f" ± {self.spread:.0%}" if self.spread else "")
            + (f", prefix {self.prefix}" if self.prefix else "")
            + (f", {self.turns} turns" if self.turns > 1 else "")
        )
        name = (
            (f"{self.trace.name} × {self.time_scale:g}")
            if self.trace
            else lengths
            if self.dataset == "random"
            else f"{Path(self.dataset).name}, {self.output} out"
        )
        return {
            "arrivals": kind,
            "rate": rate,
            "concurrency": self.concurrency,
            "dataset": name,
            "conversations": self.requests,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class ServeBench:
    """One case under one kind of load."""

    case: Case
    load: Load
    objective: Objective
    file: ResultFile
    environment: Row
    listen: Listen
    processes: int = 1
    warm_up: int = 4
    timeout: float = 600.0
    check: SelfCheck | None = None
    samples: bool = True  # whether every request's times are written, too

    def run(self, rates: Sequence[float | None], *, start: bool = True) -> list[Row]:
        """Without a rate that is missing it is started for the check alone."""
        if start:
            due = self.missing(rates)
            self.start(self.conversations(due[0])[0] if due else ())
            try:
                for rate in due:
                    self.measure(rate)
            finally:
                self.case.stop()
            if self.check:
                self.check.record(self.case)
        return [row for rate in rates for row in self.found(rate)]

    def search(self, start: float, wanted: float) -> list[Row]:
        self.start(self.conversations(start)[0])
        tried: list[Row] = []
        try:

            def attained(rate: float) -> float:
                tried.append(self.measure(round(rate, 4)))
                return float(tried[-1].get("attained") or 0.0)

            best = find_max_rate(attained, wanted=wanted, start=start)
        finally:
            self.case.stop()
        self.listen(
            f"highest rate at which {wanted:.0%} of the requests are good: "
            f"{'none was found' if best is None else f'{best:.3g} requests/s'}"
        )
        return tried

    def missing(self, rates: Sequence[float | None]) -> list[float | None]:
        return [rate for rate in rates if not self.found(rate)]

    def about(self, rate: float | None) -> Row:
        return self.load.about(rate) | {"sampling": self.case.sampling or "greedy"}

    def found(self, rate: float | None) -> list[Row]:
        return self.file.finished(
            "serve", **(self.case.key() | self.about(rate)), slo=self.objective.as_field()
        )

    def conversations(self, rate: float | None) -> tuple[list[Conversation], list[str]]:
        """Those that the model has room for, and how many were left out."""
        most, found = (
            self.case.facts.context,
            self.load.conversations(self.case.facts.vocabulary, rate),
        )
        fitting = [
            talk
            for talk in found
            if most is None or isinstance(talk.turns[0].prompt, str) or talk.longest <= most
        ]
        if not fitting:
            raise OptionError(
                f"every request is longer than the model's context of {most} "
                f"tokens; see --input and --output"
            )
        left = len(found) - len(fitting)
        return fitting, [
            f"{left} requests are longer than the model's context and were left out"
        ] if left else []

    def start(self, talks: Sequence[Conversation]) -> None:
        """With room for the load and a prompt of the check, whose prompts wait for one another like
        any others.
        """
        count, length = (
            self.check.shape if self.check and self.check.compares(self.case) else (1, 1)
        )
        load, most = self.load, self.case.facts.context
        own = max(
            [talk.longest for talk in talks],
            default=load.prefix + load.turns * (load.input + load.output),
        )
        own = min(own, most or own)
        batch = load.concurrency or min(256, len(talks) or count)
        self.case.start(
            Limits(batch, min(max(own, length), most or max(own, length)), None), self.listen
        )
        if self.check and self.case.running:
            self.check.compare(self.case)
            self.case.checked |= self.check_answers(batch, own)

    def check_answers(self, batch: int, context: int) -> Row:
        """The check of so many answers at once, of the load's longest context; fields
        for its rows.
        """
        assert self.check is not None
        if not is_ours(self.case):
            return {}
        output = max(1, min(self.load.output, context - 1))
        count = max(
            1, min(batch, self.load.requests, REFERENCE_TOKENS[self.check.device] // context)
        )
        prompts = random_prompts(
            count,
            context - output,
            vocabulary=self.case.facts.vocabulary,
            seed=seed_from(self.load.seed, "check"),
        )
        tokens, fault = attempt(lambda: answers(self.case.backend, prompts, output))
        return (
            failed_check(fault) if tokens is None else self.check.check(self.case, prompts, tokens)
        )

    def measure(self, rate: float | None) -> Row:
        records, fault = (
            (None, self.case.fault) if self.case.fault else attempt(lambda: self.drive(rate))
        )
        about = self.case.fields() | self.about(rate)
        if records:
            found = figures(records, self.objective)
            found["flags"] += self.conversations(rate)[1]
            row = make_row(
                "serve", self.environment["id"], **rounded(about | found | self.case.checked)
            )
            if not found["completed"]:
                row |= {"status": "failed", "reason": f"no request was answered: {found['failed']}"}
            if self.samples:
                row["samples"] = self.write_samples(row["run_id"], records)
        else:
            row = make_row(
                "serve",
                self.environment["id"],
                **about,
                **(fault or {"status": "failed", "reason": "no requests"}),
            )
        self.file.add(self.environment, row)
        self.listen(line(row))
        return row

    def write_samples(self, name: str, records: Sequence[Record]) -> str:
        """The raw rows beside the result file; the path is relative to it."""
        begin, folder = (
            min(record.answer.arrival for record in records),
            self.file.path.with_suffix(".samples"),
        )
        lines = [json.dumps(sample(record, begin)) + "\n" for record in records]
        write_text(folder / f"{name}.jsonl", "".join(lines))
        return f"{folder.name}/{name}.jsonl"

    def drive(self, rate: float | None) -> list[Record]:
        """Warm, then the load: over HTTP from client processes, or in this one."""
        backend, vocabulary = self.case.backend, self.case.facts.vocabulary
        talks, _ = self.conversations(rate)
        warm = replace(
            self.load, seed=self.load.seed + 1, trace=None, requests=self.warm_up or 1
        ).conversations(vocabulary, None)
        warm, width = warm[: self.warm_up], self.load.concurrency or 2
        if isinstance(backend, OpenAI):
            send = partial(
                run_processes,
                backend.url,
                backend.model,
                exact=backend.exact,
                timeout=self.timeout,
                choice=backend.options.choice,
            )
            send(warm, processes=1, concurrency=width)
            return send(talks, processes=self.processes, concurrency=self.load.concurrency)

        async def in_process() -> list[Record]:
            target = (
                EngineTarget(backend.llm, backend.options.choice)
                if isinstance(backend, Native)
                else SerialTarget(backend)
            )
            await run_load(target, warm, concurrency=width, timeout=self.timeout)
            return await run_load(
                target, talks, concurrency=self.load.concurrency, timeout=self.timeout
            )

        return asyncio.run(in_process())


def line(row: Row) -> str:
    load = next(
        (f"{name} {row[name]:g}" for name in ("rate", "concurrency") if row.get(name)),
        row["arrivals"],
    )
    title = f"{row['scheme']} ({row['backend']}), {load}"
    if row["status"] != "ok":
        return f"{title}: {row['status']}: {'; '.join([row['reason'], *row.get('flags', [])])}"
    tpot = f"{row['tpot_ms']['p50']:.2f} ms" if row["tpot_ms"] else "–"
    return (
        f"{title}: {row['completed']} of {row['requests']}, TTFT p50 {row['ttft_ms']['p50']:.1f} "
        f"ms, TPOT p50 {tpot}, {row['output_tok_s']:.1f} tok/s, {row['attained']:.0%} good"
    )
