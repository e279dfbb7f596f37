"""A sweep: variants × workloads × repeats, the variants taking turns, a row a run, finished rows
never run twice.

`bench latency`, `speed` and `throughput` are the same sweep; what differs is in `TABLES`: which
fields say what was measured, which figures are taken from a run, and whether an engine is started
for each cell, so that its memory is that cell's alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flyweight.backends.base import Backend, Limits
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.check import SelfCheck, Tokens, answers, is_ours
from flyweight.bench.rows import ResultFile, Row, make_row, rounded
from flyweight.bench.texts import text_prompts
from flyweight.bench.timing import (
    STABLE,
    batch_figures,
    outliers,
    random_prompts,
    seed_from,
    turns,
    unsteady,
    warm_up,
)
from flyweight.bench.workloads import SPEED_OUTPUT, Workload
from flyweight.clock import Run
from flyweight.errors import ResultError

ALONE = "variants ran one after the other, not in turns"


@dataclass(frozen=True)
class Table:
    bench: str
    shape: Callable[[Workload], Row]  # what was measured
    figures: tuple[str, ...]  # of `batch_figures`
    each_cell: bool = False  # start the engine for every cell


TABLES = {
    table.bench: table
    for table in (
        Table(
            "latency",
            lambda work: {
                "workload": work.name,
                "batch": work.batch,
                "input": work.input,
                "output": work.output,
            },
            (
                "latency_s",
                "ttft_ms",
                "ttft_ms_last",
                "tpot_ms",
                "decode_tok_s",
                "overall_tok_s",
                "output_tok_s",
                "input_tok_s",
            ),
        ),
        Table(
            "speed",
            lambda work: {
                "input": work.input,
                "output": work.output,
                "setting": None
                if work.output == SPEED_OUTPUT
                else f"{work.output} tokens generated",
            },
            ("output_tok_s", "decode_tok_s", "latency_s", "ttft_ms_last"),
            each_cell=True,
        ),
        Table(
            "throughput",
            lambda work: {"prompts": work.batch, "input": work.input, "output": work.output},
            ("qps", "output_tok_s", "total_tok_s", "latency_s"),
        ),
    )
}


@dataclass(frozen=True)
class Plan:
    table: Table
    workloads: Sequence[Workload]
    repeats: int = 3
    seed: int = 0
    check: bool = True
    device: str = "cpu"  # its kind: a check on a GPU can be longer
    together: bool = True  # all variants loaded at once, taking turns
    sequences: int | None = None  # most at once; the rest of a batch waits. None: the whole batch
    text: Path | None = None  # that prompts are cut from; None: random tokens


@dataclass(frozen=True)
class Given:
    """What a case has answered, and the rows of the runs that are judged by it."""

    prompts: list[list[int]]
    tokens: Tokens
    rows: list[Row] = field(default_factory=list)


def worse(one: Row, other: Row) -> Row:
    """The fields of the check that is further from its bound; one that failed stays."""
    if "check_loss" not in one or other.get("status") == "failed":
        return one | other
    return (
        one | other
        if other.get("check_loss", 0) > one["check_loss"] and "status" not in one
        else one
    )


@dataclass(frozen=True)
class Sweep:
    """Runs what the file does not have yet."""

    plan: Plan
    file: ResultFile
    environment: Row
    listen: Listen
    missed: list[str] = field(default_factory=list)  # a line for each run whose tokens were wrong

    def run(self, cases: Sequence[Case]) -> list[Row]:
        """All rows of the plan, those found in the file included."""
        check = (
            SelfCheck(
                cases,
                self.plan.device,
                file=self.file,
                environment=self.environment,
                listen=self.listen,
            )
            if self.plan.check
            else None
        )
        if check:
            check.missed = self.missed
        busy = [
            case for case in cases if any(map(partial(self.missing, case), self.plan.workloads))
        ]
        busy = check.plan(busy) if check else busy
        for group in [busy] if self.plan.together else [[case] for case in busy]:
            self.run_group(group, check)
            if check:
                check.record(*group)
        return [
            row
            for case in cases
            for workload in self.plan.workloads
            for row in self.found(case, workload)
        ]

    def run_group(self, cases: Sequence[Case], check: SelfCheck | None) -> None:
        cells = self.plan.table.each_cell and all(case.backend.sized for case in cases)
        try:
            for works in (
                [[work] for work in self.plan.workloads] if cells else [list(self.plan.workloads)]
            ):
                for case in cases:
                    self.start(case, works, check)
                    if check:
                        check.compare(case)
                for work in works:
                    self.run_workload(cases, work, check)
        finally:
            for case in cases:
                case.stop()

    def start(self, case: Case, works: Sequence[Workload], check: SelfCheck | None) -> None:
        """With room for all of this work that the model is made for."""
        # for the check alone it is tried once
        alone = check is not None and check.lacks(case) and not case.fault
        shapes = [
            (work.batch, work.context)
            for work in works
            if too_long(case, work) is None
            and (self.missing(case, work) or (alone and is_ours(case)))
        ]
        if check and check.compares(case) and (shapes or not case.fault):
            shapes.append(check.shape)
        if shapes:
            limits = Limits.of(shapes)
            case.start(
                limits
                if self.plan.sequences is None
                else Limits(self.plan.sequences, limits.context, None),
                self.listen,
            )

    def found(self, case: Case, workload: Workload) -> list[Row]:
        """Its rows that are in the file already."""
        return self.file.finished(
            self.plan.table.bench, **case.key(), **self.plan.table.shape(workload)
        )

    def run_workload(
        self, cases: Sequence[Case], workload: Workload, check: SelfCheck | None
    ) -> None:
        flags: dict[Case, list[str]] = {}  # of those that are warm
        given: dict[Case, Given] = {}  # by the first run of each
        broken = {
            case: fault for case in cases if (fault := too_long(case, workload) or case.fault)
        }
        due = [case for case in cases if self.missing(case, workload)]
        for case in due:
            if case not in broken:
                found, fault = attempt(partial(self.warm, case, workload))
                flags[case] = found or []
                broken |= {case: fault} if fault else {}
        for round, case in turns([case for case in due if case not in broken], self.plan.repeats):
            if case in broken or round + 1 not in self.missing(case, workload):
                continue
            found_row, fault = attempt(
                partial(self.measure, case, workload, repeat=round + 1, flags=flags[case])
            )
            broken |= {case: fault} if fault else {}
            if found_row:
                row, tokens = found_row
                self.file.add(self.environment, row)
                self.listen(line(row))
                given.setdefault(
                    case, Given(self.prompts(case, workload, round + 1), tokens)
                ).rows.append(row)
        for case in cases if check else ():
            assert check is not None
            if case in given:
                told = check.check(case, given[case].prompts, given[case].tokens)
                self.file.amend(row | told for row in given[case].rows)
            elif (
                case.running
                and case not in broken
                and case not in due
                and is_ours(case)
                and check.lacks(case)
            ):
                case.checked = worse(case.checked, self.check_alone(case, workload, check))
        for case in due:
            if case in broken:
                self.file.add(self.environment, self.row(case, workload, **broken[case]))
                self.listen(
                    f"{case.title}, {title(workload)}: {broken[case]['status']}: "
                    f"{broken[case]['reason']}"
                )
            self.mark_outliers(case, workload)

    def missing(self, case: Case, workload: Workload) -> list[int]:
        rows = self.found(case, workload)
        done = (
            range(1, self.plan.repeats + 1)
            if any(row["status"] == "skipped" for row in rows)
            else [row["repeat"] for row in rows]
        )
        return [repeat for repeat in range(1, self.plan.repeats + 1) if repeat not in done]

    def prompts(self, case: Case, workload: Workload, *parts: object) -> list[list[int]]:
        """The same for every variant, never the same twice."""
        seed = seed_from(self.plan.seed, workload.batch, workload.input, workload.output, *parts)
        if self.plan.text is not None:
            return text_prompts(
                case.model, self.plan.text, workload.batch, workload.input, seed=seed
            )
        return random_prompts(
            workload.batch, workload.input, vocabulary=case.facts.vocabulary, seed=seed
        )

    def warm(self, case: Case, workload: Workload) -> list[str]:
        self.listen(f"warming {case.title}, {title(workload)}")
        fresh, cut = itertools.count(), case.backend.warm_output or workload.output
        count, settled = warm_up(
            lambda: (
                case.backend.generate(
                    self.prompts(case, workload, "warm", next(fresh))[: self.plan.sequences],
                    min(cut, workload.output),
                ).seconds
            )
        )
        return [] if settled else [f"{count} warm-up runs did not settle within {STABLE:.0%}"]

    def check_alone(self, case: Case, workload: Workload, check: SelfCheck) -> Row:
        """Of rows that were timed before, without a check."""
        prompts = self.prompts(case, workload, "check")[: self.plan.sequences]
        tokens, fault = attempt(lambda: answers(case.backend, prompts, workload.output))
        return fault or {} if tokens is None else check.check(case, prompts, tokens)

    def measure(
        self, case: Case, workload: Workload, *, repeat: int, flags: list[str]
    ) -> tuple[Row, Tokens]:
        run = case.backend.generate(self.prompts(case, workload, repeat), workload.output)
        if wrong := [answer.tokens for answer in run.answers if answer.tokens != workload.output]:
            raise ResultError(
                f"{wrong[0]} tokens came instead of {workload.output}; is end of text ignored?"
            )
        alone = [] if self.plan.together or self.plan.table.each_cell else [ALONE]
        row = self.row(
            case,
            workload,
            repeat=repeat,
            label=f"{case.facts.scheme}_{workload.name or 'run'}_run{repeat}",
            **self.figures(case, workload, run),
            **speculation_of(case.backend, run),
            outlier=False,
            **case.backend.memory(),
            **case.checked,
            start_s=case.start_s,
            seed=self.plan.seed,
            flags=[*flags, *alone, *unsteady(run)],
        )
        return row, [answer.token_ids for answer in run.answers]

    def figures(self, case: Case, workload: Workload, run: Run) -> Row:
        found = batch_figures(run, input=workload.input, output=workload.output)
        figures: Row = {name: found[name] for name in self.plan.table.figures}
        if "decode_tok_s" in figures:
            limit = case.facts.decode_limit(
                batch=workload.batch,
                input=workload.input,
                output=workload.output,
                kv_dtype=case.backend.kv_dtype,
                copy_gb_s=self.environment.get("copy_gb_s"),
                read_bytes=(read := bytes_read_by(case.backend)),
            )
            rate = found["decode_tok_s"]
            figures |= {
                "limit_tok_s": limit,
                "share_of_limit": rate / limit if limit and rate else None,
                "read_gb": (read or case.facts.step_bytes) / 1e9,
            }
        return figures

    def row(self, case: Case, workload: Workload, **fields: object) -> Row:
        table = self.plan.table
        return make_row(
            table.bench,
            self.environment["id"],
            **rounded(case.fields() | table.shape(workload) | fields),
        )

    def mark_outliers(self, case: Case, workload: Workload) -> None:
        """Known only once all repeats are there."""
        rows = [row for row in self.found(case, workload) if row["status"] == "ok"]
        marks = outliers([row["latency_s"] for row in rows])
        self.file.amend(row | {"outlier": mark} for row, mark in zip(rows, marks, strict=True))


def bytes_read_by(backend: Backend) -> int | None:
    """Of weights in a decode step, where the engine can tell; else the files' own bytes are the
    least it must read.
    """
    tell = getattr(backend, "read_bytes", None)
    return tell() if tell else None


def speculation_of(backend: Backend, run: Run) -> Row:
    """How far guesses went, of an engine that guesses."""
    found: Row = getattr(backend, "speculation", dict)()
    if not found:
        return {}
    chunks = sum(len(answer.chunks) for answer in run.answers)
    return found | {"tokens_per_step": sum(answer.tokens for answer in run.answers) / chunks}


def too_long(case: Case, workload: Workload) -> Row | None:
    most = case.facts.context
    return (
        None
        if most is None or workload.context <= most
        else {
            "status": "skipped",
            "reason": f"{workload.context} tokens are more than the model's context of {most}",
        }
    )


def title(workload: Workload) -> str:
    return workload.name or f"batch {workload.batch}, {workload.input} in, {workload.output} out"


def line(row: Row) -> str:
    units = {
        "ttft_ms_last": ("first token", "ms"),
        "decode_tok_s": ("decode", "tok/s"),
        "output_tok_s": ("output", "tok/s"),
        "total_tok_s": ("total", "tok/s"),
        "qps": ("", "requests/s"),
    }
    parts = [
        f"{name} {row[key]:.4g} {unit}".strip()
        for key, (name, unit) in units.items()
        if row.get(key)
    ]
    return f"{row['label']} ({row['backend']}): {row['latency_s']:.4f} s, {', '.join(parts)}"
