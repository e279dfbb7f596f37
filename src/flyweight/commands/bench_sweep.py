"""`flyweight bench latency`, `speed` and `throughput`: three tables of one sweep."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.options import (
    Backends,
    Check,
    Device,
    Dtype,
    Extra,
    Json,
    KvDtype,
    Models,
    Name,
    Out,
    Quantization,
    Repeats,
    Sampling,
    Seed,
    Speculate,
    TensorParallel,
    Threads,
    Url,
)
from flyweight.errors import OptionError

if TYPE_CHECKING:
    from flyweight.backends.base import EngineOptions
    from flyweight.bench.rows import Row
    from flyweight.bench.sweep import Plan


def latency(
    models: Models,
    backend: Backends = None,
    out: Out = Path("result.jsonl"),
    workload: Annotated[list[str] | None, typer.Option(help="By name; default: all seven.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="A workload of one's own: prompts at once,")
    ] = None,
    input: Annotated[int | None, typer.Option(min=1, help="tokens of each prompt,")] = None,
    output: Annotated[
        int | None, typer.Option("--output", min=1, help="tokens of each answer.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text that prompts are cut from; random tokens otherwise.")
    ] = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    check: Check = True,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Load one variant after the other.")
    ] = False,
    model_name: Name = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    speculate: Speculate = None,
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    url: Url = None,
    option: Extra = None,
    sampling: Sampling = None,
    as_json: Json = False,
) -> None:
    """Latency, TTFT, TPOT and throughput of variants of a model, on fixed workloads.

    All variants are loaded at once and take turns, so that a drifting clock meets them alike. The
    greedy tokens of each are compared with the first variant's, and the agreement stands beside the
    speed. Start it again after an interruption, and it does only what is missing.

    Examples:

        flyweight bench latency smollm2-135m out/gptq-int4 out/w8a8-smooth --workload interactive

        flyweight bench latency preset:qwen3-8b:bf16 preset:qwen3-8b:int4 --backend native -o
            result.jsonl

        flyweight bench latency original=./qwen3-4b w8a8=./qwen3-4b-w8a8 --batch 4 --input 512
            --output 128 --repeats 10

        flyweight bench latency ./qwen3-8b-awq --backend vllm --quantization awq_marlin
            --tensor-parallel 2

        flyweight bench latency smollm2-135m --speculate ngram --text report.txt --batch 1 --input
            512 --output 128
    """
    from dataclasses import replace

    from flyweight.bench import texts, workloads
    from flyweight.bench.sweep import TABLES, Plan

    own = [value for value in (batch, input, output) if value is not None]
    if own and (workload or len(own) < 3):
        raise OptionError(
            "a workload of one's own needs --batch, --input and --output, and no --workload"
        )
    works = (
        [workloads.Workload(None, *own)]
        if own
        else [workloads.find(name) for name in workload or workloads.LATENCY]
    )
    if text is not None:  # rows of texts are none of random tokens
        texts.read(text)  # refused before a model is loaded
        works = [replace(work, name=f"{work.name or 'own'} of {text.name}") for work in works]
    plan = Plan(
        TABLES["latency"],
        works,
        repeats=repeats,
        seed=seed,
        check=check,
        together=not one_at_a_time,
        text=text,
    )
    run(
        plan,
        models,
        backend,
        out,
        model_name=model_name,
        as_json=as_json,
        options=engine_options(
            device, dtype, quantization, tensor_parallel, url, option, kv_dtype, speculate, sampling
        ),
    )


def speed(
    models: Models,
    backend: Backends = None,
    out: Out = Path("result.jsonl"),
    input: Annotated[
        list[int] | None, typer.Option(min=1, help="Input lengths; default: 1, 6144, 14336, 30720.")
    ] = None,
    output: Annotated[int, typer.Option("--output", min=2, help="Tokens to generate.")] = 2048,
    repeats: Repeats = 3,
    seed: Seed = 0,
    check: Check = True,
    model_name: Name = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    speculate: Speculate = None,
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    url: Url = None,
    option: Extra = None,
    sampling: Sampling = None,
    as_json: Json = False,
) -> None:
    """Tokens per second and peak memory of one prompt, by input length.

    Both ways of counting: all output tokens over the whole time, prefill included, and decode only.
    The engine is started for each length, with a cache for exactly that much, so that the memory is
    that length's own (engines that take all memory at their start are started once, and their
    memory says nothing).

    Examples:

        flyweight bench speed preset:qwen2-7b:bf16 preset:qwen2-7b:int4 -o result.jsonl

        flyweight bench speed ./qwen2-7b --backend transformers --output 128 --input 1 --input 6144
    """
    from flyweight.bench import workloads
    from flyweight.bench.sweep import TABLES, Plan

    works = [
        workloads.Workload(None, 1, length, output) for length in input or workloads.SPEED_INPUTS
    ]
    plan = Plan(TABLES["speed"], works, repeats=repeats, seed=seed, check=check, together=False)
    run(
        plan,
        models,
        backend,
        out,
        model_name=model_name,
        as_json=as_json,
        options=engine_options(
            device, dtype, quantization, tensor_parallel, url, option, kv_dtype, speculate, sampling
        ),
    )


def throughput(
    models: Models,
    backend: Backends = None,
    out: Out = Path("result.jsonl"),
    prompts: Annotated[
        list[int] | None, typer.Option(min=1, help="How many at once; default: 100 and 1000.")
    ] = None,
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1000,
    output: Annotated[int, typer.Option("--output", min=1, help="Tokens of each answer.")] = 100,
    sequences: Annotated[
        int, typer.Option(min=1, help="Most prompts in work at once; the others wait.")
    ] = 256,
    repeats: Repeats = 3,
    seed: Seed = 0,
    check: Check = True,
    model_name: Name = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    speculate: Speculate = None,
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    url: Url = None,
    option: Extra = None,
    sampling: Sampling = None,
    as_json: Json = False,
) -> None:
    """Requests and tokens per second when many prompts are there at once.

    Examples:

        flyweight bench throughput preset:qwen2-7b:bf16 preset:qwen2-7b:int4 --prompts 100 --prompts
            1000

        flyweight bench throughput smollm2-135m --prompts 8 --input 64 --output 16 --device cpu
    """
    from flyweight.bench import workloads
    from flyweight.bench.sweep import TABLES, Plan

    works = [workloads.Workload(None, count, input, output) for count in prompts or (100, 1000)]
    plan = Plan(
        TABLES["throughput"],
        works,
        repeats=repeats,
        seed=seed,
        check=check,
        together=False,
        sequences=sequences,
    )
    run(
        plan,
        models,
        backend,
        out,
        model_name=model_name,
        as_json=as_json,
        options=engine_options(
            device, dtype, quantization, tensor_parallel, url, option, kv_dtype, speculate, sampling
        ),
    )


def engine_options(
    device: str | None,
    dtype: str | None,
    quantization: str | None,
    tensor_parallel: int,
    url: str | None,
    pairs: Sequence[str] | None,
    kv_dtype: str | None = None,
    speculate: str | None = None,
    sampling: str | None = None,
) -> EngineOptions:
    from flyweight.backends.base import EngineOptions
    from flyweight.bench.cases import parse_sampling
    from flyweight.engine.speculation.option import Speculation

    Speculation.parse(speculate)  # refused before a model is loaded
    given = {"kv_dtype": kv_dtype, "speculate": speculate}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--option {pair}: KEY=VALUE is wanted")
        try:
            extra[key] = json.loads(value)
        except ValueError:
            extra[key] = value
    return EngineOptions(
        device=device,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel=tensor_parallel,
        url=url,
        extra=extra,
        sampling=parse_sampling(sampling),
    )


def run(
    plan: Plan,
    models: Sequence[str],
    backends: Sequence[str] | None,
    out: Path,
    *,
    options: EngineOptions,
    model_name: str | None,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from flyweight.bench.cases import make_cases
    from flyweight.bench.rows import ResultFile, environment_row
    from flyweight.bench.sweep import Sweep
    from flyweight.device import pick_device

    file = ResultFile(out)
    cases = make_cases(models, backends or ["native"], options, name=model_name)
    device = pick_device(options.device)
    environment = environment_row(device)

    def listen(text: str) -> None:
        typer.echo(text, err=True)

    plan = replace(plan, device=device.type)
    sweep = Sweep(plan, file, environment, listen)
    with resumable(out):
        rows = sweep.run(cases)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, ensure_ascii=False))
    elif any(row["status"] == "ok" for row in rows):
        typer.echo(table(rows, plan))
    close(rows, out, sweep.missed)


def close(rows: Sequence[Row], out: Path, missed: Sequence[str] = ()) -> None:
    """The last words; exit code 1 where nothing could be measured, or what was measured
    is wrong.
    """
    for reason in missed:
        typer.echo(f"flyweight: {reason}; its rows in {out} are marked as failed", err=True)
    if missed:
        raise typer.Exit(1)
    if not any(row["status"] == "ok" for row in rows):
        typer.echo(f"flyweight: nothing could be measured; the reasons are in {out}", err=True)
        raise typer.Exit(1)
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    typer.echo(f"{count} in {out}; `flyweight report {out}` makes the tables and figures", err=True)


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C tells where the finished rows are."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished rows are in {out}, and the same command goes on from there"
        ) from None


def table(rows: Sequence[Row], plan: Plan) -> str:
    """Medians of the repeats, with their interval; the file has every run."""
    from flyweight.bench.timing import summarize
    from flyweight.report.blocks import Table
    from flyweight.report.render import pipe_table
    from flyweight.report.units import plain

    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            numbers = [
                f"{name} {row[name]}"
                for name in ("batch", "prompts", "input", "output")
                if name in row
            ]
            what = row.get("workload") or ", ".join(numbers)
            cells.setdefault((row["scheme"], row["backend"], what), []).append(row)
    figures = [
        name
        for name in (*plan.table.figures, "share_of_limit", "allocated_gb", "agreement")
        if any(row.get(name) is not None for row in rows)
    ]
    lines = []
    for key, found in cells.items():
        shown = []
        for name in figures:
            values = [row[name] for row in found if row.get(name) is not None]
            spread = summarize(values) if values else None
            text = plain(spread.median) if spread else "–"
            shown.append(
                text
                + (
                    f" ({plain(spread.p10)}–{plain(spread.p90)})"
                    if spread and spread.p10 is not None
                    else ""
                )
            )
        lines.append((*key, str(len(found)), *shown))
    return pipe_table(Table("", ("scheme", "backend", "work", "runs", *figures), tuple(lines)))
