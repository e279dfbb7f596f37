"""`flyweight bench kernel`: linears and attention, one kernel at a time."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.options import Device, Threads, numbers, split
from flyweight.errors import OptionError, ResultError, unknown

if TYPE_CHECKING:
    import torch

    from flyweight.bench.kernels import Case
    from flyweight.bench.rows import ResultFile, Row

Measure = functools.partial[Iterator["Row"]]  # keyword arguments: device, samples, bandwidth


def kernel(
    format: Annotated[
        str | None,
        typer.Option(
            help="bf16, w2a16, w3a16, w4a16, w8a16, w8a8, fp8, w8a8-2:4, w8a16-2:4, "
            "w4a16-2:4, trellis2, trellis3, vptq or "
            "attention, with commas. Default: w4a16, vptq for the seeds' grids."
        ),
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(
            help="seed-000, seed-001, a preset such as qwen3-8b, or KxN; several with commas."
        ),
    ] = "qwen3-8b",
    rows: Annotated[
        str, typer.Option(help="Rows of x (for attention: sequences), several with commas.")
    ] = "1",
    chain: Annotated[
        str | None, typer.Option(help="A preset: its four linears as one dependent chain.")
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or names with commas: torch._int_mm, gemlite, vllm.marlin, …"
        ),
    ] = "all",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, fp32 on a CPU.")
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Of w4a16 and w8a16; -1: one scale per output.")
    ] = 128,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="w4a16 and w8a16 without zero points.")
    ] = False,
    codebooks: Annotated[
        str, typer.Option(help="VPTQ: main+residual centroids, several with commas.")
    ] = "8192+256",
    vector_length: Annotated[int, typer.Option(help="VPTQ: outputs of one vector.")] = 8,
    contexts: Annotated[
        str, typer.Option(help="Attention: cached tokens, several with commas.")
    ] = "16384,32768,65536,131072",
    samples: Annotated[
        int, typer.Option(min=1, help="Of each kernel; ten or more give p10 and p90.")
    ] = 11,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Result rows (JSONL); what is there is not run again."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="full, or seed: exactly the columns of the documents reproduced.")
    ] = "full",
    device: Device = None,
    threads: Threads = None,
    vllm_library: Annotated[
        Path | None, typer.Option(help="The shared library of vLLM's wheel, for its kernels alone.")
    ] = None,
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only",
            help="Only compile the kernels of the linears (no chain, no "
            "attention), ahead and without a GPU.",
        ),
    ] = False,
    arch: Annotated[
        str | None, typer.Option(help="With --compile-only: as of `flyweight compile`.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows instead of a table.")
    ] = False,
) -> None:
    """Time kernels against torch and their peers in one run: cold and hot, bandwidth and error.

    Times are medians of CUDA-graph replays over weights that together are larger than the cache.
    Every kernel is compared with float64 before it is timed. The ratio is kernel time ÷ torch time:
    below 1 is faster than torch.

    Examples:

        flyweight bench kernel --format w4a16,w8a8 --shapes qwen3-8b --rows 1,8,64

        flyweight bench kernel --shapes seed-000 --layout seed -o kernels.jsonl

        flyweight bench kernel --chain qwen3-8b --format w4a16,w8a16,w8a8

        flyweight bench kernel --format attention --rows 1,16 --contexts 16384,131072

        flyweight bench kernel --shapes seed-000,seed-001 --compile-only --arch sm_90a
    """
    from flyweight.bench import peers as others
    from flyweight.device import pick_device
    from flyweight.report.layouts import LAYOUTS

    if layout not in LAYOUTS:
        raise OptionError(unknown("layout", layout, LAYOUTS))
    if vllm_library:
        others.load_library(vllm_library)
    place = pick_device(None if compile_only else device)
    if compile_only:
        dtype = dtype or "bf16"  # a GPU's default
    options = dict(
        dtype=pick_dtype(dtype, place), vector_length=vector_length, zero_points=not symmetric
    )
    found = plan(
        split(format) if format else [],
        split(shapes),
        numbers("rows", rows),
        chain=chain,
        group_size=group_size,
        contexts=numbers("contexts", contexts),
        books=[pair(text) for text in split(codebooks)],
        peers=others.names(peers),
        options=options,
    )
    if compile_only:
        return compile_cases(
            [measure.args[0] for facts, measure in found if facts.get("in_features")],
            arch,
            as_json=as_json,
        )
    lines = run(found, place, samples=samples, out=out)
    if as_json:
        for row in lines:
            typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        typer.echo(table(lines, layout))
    wrong = [row for row in lines if row["status"] == "failed" and "error_bound" in row]
    for row in wrong:
        typer.echo(f"flyweight: {row['format']}, {row['kernel']}: {row['reason']}", err=True)
    if wrong:
        raise typer.Exit(1)


def compile_cases(cases: Sequence[Case], arch: str | None, *, as_json: bool) -> None:
    from flyweight.bench.kernels import wanted_by
    from flyweight.commands.compile import listening, pick_gpu, show
    from flyweight.kernels.precompile import precompile

    gpu, architecture = pick_gpu(arch, None)
    with listening() as listen:
        done = precompile(
            [
                functools.partial(wanted_by, cases[begin::8], gpu)
                for begin in range(min(8, len(cases)))
            ],
            architecture,
            listen=listen,
        )
    show(done, architecture, as_json=as_json)


def pair(text: str) -> tuple[int, int]:
    main, _, residual = text.partition("+")
    if not main.isdigit() or not (residual or "0").isdigit():
        raise OptionError(f"--codebooks {text}: MAIN or MAIN+RESIDUAL is wanted, as in 8192+256")
    return int(main), int(residual or 0)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    import torch

    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name is not None and name not in known:
        raise OptionError(unknown("dtype", name, known))
    return known[name or ("bf16" if device.type == "cuda" else "fp32")]


def plan(
    formats: list[str],
    words: list[str],
    rows: list[int],
    *,
    chain: str | None,
    contexts: list[int],
    group_size: int,
    books: list[tuple[int, int]],
    peers: list[str],
    options: dict[str, Any],
) -> list[tuple[Row, Measure]]:
    """(what identifies the row, how to measure it) for everything asked for."""
    from flyweight.bench import shapes
    from flyweight.bench.attention import measure_attention
    from flyweight.bench.chain import measure_chain
    from flyweight.bench.kernels import FORMATS, Case, cases_of, measure_case
    from flyweight.models.presets import preset_config

    if chain:
        preset_config(chain)  # an unknown one is told before anything is measured
    grids = any(word in shapes.GRIDS for word in words) and not chain
    found: list[tuple[Row, Measure]] = []
    for name in formats or ["vptq" if grids else "w4a16"]:
        if name == "attention":
            for word, batch, context in ((w, b, c) for w in words for b in rows for c in contexts):
                facts = {"format": name, "rows": batch, "context": context, "shape": word}
                measure = functools.partial(
                    measure_attention, word, batch=batch, context=context, dtype=options["dtype"]
                )
                found.append((facts, measure))
            continue
        if name not in FORMATS:
            raise OptionError(unknown("format", name, [*FORMATS, "attention"]))
        for book in books if name == "vptq" else books[:1]:
            fixed = options | {"format": name, "books": book, "group_size": group_size}
            if chain:
                for count in rows:
                    case = Case(rows=count, in_features=0, out_features=0, **fixed)
                    facts = case.fields() | {
                        "in_features": None,
                        "out_features": None,
                        "shape": None,
                        "chain": chain,
                    }
                    found.append((facts, functools.partial(measure_chain, chain, case)))
            else:
                found += [
                    (case.fields(), functools.partial(measure_case, case, peers=peers))
                    for case in cases_of(shapes.find(words), rows, **fixed)
                ]
    return found


def run(
    found: Sequence[tuple[Row, Measure]], device: torch.device, *, samples: int, out: Path | None
) -> list[Row]:
    """Measure what the file does not have yet; a row that fails says why and stops nothing."""
    from rich.console import Console
    from rich.progress import Progress

    from flyweight.bench.peers import loaded
    from flyweight.bench.rows import ResultFile, environment_row

    file: ResultFile | None = ResultFile(out) if out else None
    environment = environment_row(device)
    if loaded:
        environment["libraries"] = dict(loaded)
    lines: list[Row] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("timing", total=len(found))
        for facts, measure in found:
            known = file.finished("kernel", **facts) if file else []
            if not known:
                known = attempt(facts, measure, environment, device, samples=samples)
                if file:
                    if not any(row["environment"] == environment["id"] for row in file.rows):
                        file.append([environment])
                    file.append(known)
                make_room(device)
            lines += known
            progress.advance(task)
    return [environment, *lines]


def attempt(
    facts: Row, measure: Measure, environment: Row, device: torch.device, *, samples: int
) -> list[Row]:
    from flyweight.bench import cases
    from flyweight.bench.rows import make_row, rounded

    found, fault = cases.attempt(
        lambda: list(measure(device=device, samples=samples, bandwidth=environment["copy_gb_s"]))
    )
    rows = [facts | fault] if fault else found or []
    return [make_row("kernel", environment["id"], **rounded(row)) for row in rows]


def make_room(device: torch.device) -> None:
    """The next case wants the memory. A GPU takes nothing more from a process whose kernel failed:
    further rows would all say what the last one says.
    """
    import torch

    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        said = str(error).split("\n")[0]
        raise ResultError(
            f"the GPU takes no more work from this process ({said}): a kernel of the last row "
            "failed; what was measured before is kept, and the same command goes on behind it"
        ) from None


def table(lines: Sequence[Row], layout: str) -> str:
    """As `flyweight report` shows these rows."""
    from flyweight.report.document import failures, kernel
    from flyweight.report.render import terminal
    from flyweight.report.rows import Results
    from flyweight.report.view import View

    environments = {row["id"]: row for row in lines if row["bench"] == "environment"}
    view = View(
        Results(tuple(row for row in lines if row["bench"] == "kernel"), environments),
        layout=layout,
    )
    return terminal([*kernel(view), *([] if view.seed else failures(view))]).rstrip()
