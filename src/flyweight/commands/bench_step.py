"""`flyweight bench step`: where the time of a decode step goes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyweight.commands.bench_sweep import close
from flyweight.commands.options import Device, Dtype, KvDtype, Models, Out, Threads

if TYPE_CHECKING:
    from flyweight.bench.facts import Variant
    from flyweight.bench.profile import Workload
    from flyweight.bench.rows import Row


def step(
    models: Models,
    out: Out = Path("result.jsonl"),
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; default: 1 and 64.")
    ] = None,
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    output: Annotated[
        int, typer.Option("--output", min=8, help="Tokens of each answer: the steps.")
    ] = 34,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
) -> None:
    """Linears, attention, the head, gaps between kernels and the host's work in one decode step, in
    microseconds.

    Examples:

        flyweight bench step preset:qwen3-8b:int4 preset:qwen3-8b:bf16 -o steps.jsonl

        flyweight bench step ./my-model --batch 16 --input 2048
    """
    # before torch is there: its profiler writes of itself to stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from flyweight.bench.facts import Variant, facts_of
    from flyweight.bench.profile import Workload
    from flyweight.bench.rows import ResultFile, environment_row
    from flyweight.device import pick_device
    from flyweight.report.performance import step_table
    from flyweight.report.render import terminal
    from flyweight.report.rows import Results

    file, environment, rows = ResultFile(out), environment_row(pick_device(device)), []
    for variant in map(Variant.parse, models):
        key = {
            name: getattr(facts_of(variant), name) for name in ("model", "scheme", "checkpoint")
        } | {"level": "part"}
        works = [Workload(count, input, output) for count in batch or (1, 64)]
        due = [work for work in works if not file.finished("profile", **key, **shape(work))]
        if due:
            typer.echo(f"loading {variant.model}", err=True)
            file.append(
                [environment]
                if not any(row["environment"] == environment["id"] for row in file.rows)
                else []
            )
            file.append(
                measure(
                    variant, due, environment["id"], device=device, dtype=dtype, kv_dtype=kv_dtype
                )
            )
        rows += [row for work in works for row in file.finished("profile", **key, **shape(work))]
    typer.echo(
        terminal(step_table(Results(tuple(rows), {environment["id"]: environment}))).rstrip()
    )
    close(rows, out)


def shape(work: Workload) -> Row:
    return {"batch": work.batch, "input": work.input, "output": work.output}


def measure(
    variant: Variant,
    works: list[Workload],
    environment: str,
    *,
    device: str | None,
    dtype: str | None,
    kv_dtype: str | None = None,
) -> list[Row]:
    """The rows of one model, loaded once; where it cannot be loaded, or its steps are not captured,
    the reason.
    """
    from flyweight.backends.base import PAGE, Limits
    from flyweight.bench.cases import attempt
    from flyweight.bench.facts import facts_of
    from flyweight.bench.rows import make_row, rounded
    from flyweight.bench.steps import measure_steps
    from flyweight.engine.llm import LLM

    limits = Limits.of((work.batch, work.input + work.output) for work in works)
    facts, rows = facts_of(variant).fields() | {"backend": "native", "level": "part"}, []
    llm, broken = attempt(
        lambda: LLM(
            variant.model,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_num_seqs=limits.batch,
            max_model_len=limits.context,
            blocks=(limits.tokens or 0) // PAGE,
            block_size=PAGE,
            prefix_cache=False,
        )
    )
    facts["kv_dtype"] = llm.kv_dtype if llm else None
    for work in works:
        found, fault = None, broken
        if llm:
            found, fault = attempt(functools.partial(measure_steps, llm, work))
        rows += [
            make_row("profile", environment, **rounded(facts | shape(work) | one))
            for one in found or [fault or {}]
        ]
    return rows
