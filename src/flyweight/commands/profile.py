"""`flyweight profile`: which operators and kernels the time of a model goes to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyweight.commands.options import Device, Dtype, Threads
from flyweight.errors import MissingPackageError, OptionError, unknown

if TYPE_CHECKING:
    from flyweight.report.view import View


def profile(
    model: Annotated[str, typer.Argument(help="A name, folder, hub id or preset:NAME[:SCHEME].")],
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output: Annotated[
        int,
        typer.Option(
            "--output", min=1, help="Tokens of each answer; decode is profiled from two on."
        ),
    ] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    cold: Annotated[
        bool, typer.Option("--cold", help="Profile the very first run, compilation and all.")
    ] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="No CUDA graphs: operators and layers show, slower.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A folder for rows, Chrome traces and the plot.")
    ] = Path("profile"),
    top: Annotated[int, typer.Option(min=1, help="Operators to show of each phase.")] = 25,
    layout: Annotated[
        str, typer.Option(help="full, or seed: exactly the columns of the document reproduced.")
    ] = "full",
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows instead of tables.")
    ] = False,
) -> None:
    """Operators and kernels by device time, prefill and decode apart, warmed; with Chrome traces
    and a plot by layer.

    The folder gets result.jsonl (every operator, for `flyweight report`), prefill.trace.json.gz and
    decode.trace.json.gz (for chrome://tracing or Perfetto) and the times of the layers as a
    picture. Decode steps that run as CUDA graphs show their kernels but no operators and no layers;
    `--eager` runs them one by one.

    Examples:

        flyweight profile smollm2-135m --input 128 --output 16

        flyweight profile preset:qwen3-8b:int4 --input 1024 --output 64 --eager -o profile-int4

        flyweight profile ./my-model --cold
    """
    # before torch is there: its profiler writes of itself to stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from flyweight.bench.facts import Variant, facts_of
    from flyweight.bench.profile import Workload, profile_model
    from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
    from flyweight.device import pick_device
    from flyweight.report.layouts import LAYOUTS
    from flyweight.report.rows import Results
    from flyweight.report.view import View

    if layout not in LAYOUTS:
        raise OptionError(unknown("layout", layout, LAYOUTS))
    file = ResultFile(out / "result.jsonl")
    facts, environment = (
        facts_of(Variant.parse(model)).fields(),
        environment_row(pick_device(device)),
    )
    typer.echo(f"profiling {input} tokens in, {output} out, {batch} at once", err=True)
    rows = profile_model(
        model,
        Workload(batch, input, output),
        device=device,
        dtype=dtype,
        cold=cold,
        eager=eager,
        folder=out,
    )
    rows = [make_row("profile", environment["id"], **rounded(facts | row)) for row in rows]
    file.append([environment, *rows])
    if as_json:
        for row in (environment, *rows):
            typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        show(
            View(Results(tuple(rows), {environment["id"]: environment}), layout=layout, most=top),
            out,
        )


def show(view: View, folder: Path) -> None:
    from flyweight.report.blocks import Figure
    from flyweight.report.document import profile as blocks_of
    from flyweight.report.plot import draw
    from flyweight.report.render import terminal

    blocks = blocks_of(view)
    typer.echo(terminal(blocks).rstrip())
    for figure in (block for block in blocks if isinstance(block, Figure)):
        try:
            draw(figure, folder)
        except MissingPackageError as error:
            typer.echo(str(error), err=True)
    if not any(
        row.get("level") == "layer" and row.get("phase") == "decode" for row in view.results.rows
    ):
        typer.echo(
            "decode ran as captured graphs (or was not asked for): no times by layer; "
            "--eager shows them",
            err=True,
        )
    typer.echo(
        f"rows, traces{' and the plot' if any(folder.glob('*.png')) else ''} are in {folder}",
        err=True,
    )
