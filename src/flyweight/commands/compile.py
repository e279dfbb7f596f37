"""`flyweight compile`: the CUDA kernels of models, ahead of their first start."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from flyweight.commands.options import VptqBooks
from flyweight.errors import OptionError, unknown

DEFAULT = "sm_90a"

if TYPE_CHECKING:
    from flyweight.gpu import Gpu
    from flyweight.kernels.precompile import Compiled, Listen
    from flyweight.kv_format import KVFormat


def compile(
    models: Annotated[
        list[str], typer.Argument(help="Names, folders, hub ids or preset:NAME:SCHEME.")
    ],
    arch: Annotated[
        str | None,
        typer.Option(
            help="sm_80, sm_86, sm_89, sm_90a, sm_100a or sm_120a, or with the number of "
            "multiprocessors: sm_90a:114, sm_86:28; default: this machine's GPU, or sm_90a."
        ),
    ] = None,
    processors: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Multiprocessors of the GPU, where it is not the usual one of its "
            "architecture (H100 PCIe: 114).",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most answers at once; default: the engine's.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in one step; default: the engine's.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Only what decode steps of so many answers need, with commas; default: of every "
            "number up to --max-num-seqs."
        ),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Only what so many tokens of prompts in one step need, with commas; default: "
            "every number up to --max-num-batched-tokens."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float16; default: the model's own.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache: fp8, int8 or model, the default.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Bits of the head: int8, int4 or stored; default: as the model asks for."
        ),
    ] = None,
    vptq_books: VptqBooks = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile every CUDA kernel that models will need, without a GPU and without their weights.

    Kernels are otherwise compiled when they are first used, a minute or two of a first start. They
    go into `kernels` of ~/.cache/flyweight (FLYWEIGHT_CACHE), for an image or another machine to
    take along: with the same version of this package and of NVRTC nothing is compiled there. What
    Triton compiles is not among them.

    Examples:

        flyweight compile preset:qwen3-8b:int4

        flyweight compile ./my-quantized-model Qwen/Qwen3-0.6B --arch sm_90a

        FLYWEIGHT_CACHE=./image flyweight compile smollm2-135m --arch sm_89 --max-num-seqs 64
        --dtype float16

        flyweight compile preset:qwen3-8b:int4 --steps 1,8 --passes 256,2048
    """
    from flyweight.commands.options import numbers
    from flyweight.engine.ahead import DEFAULTS, Target, wanted_by
    from flyweight.kernels.precompile import precompile

    gpu, architecture = pick_gpu(arch, processors)
    step_rows = numbers("steps", steps) if steps else []
    sequences = max(step_rows, default=max_num_seqs or DEFAULTS["cuda"]["max_num_seqs"])
    tokens = max_num_batched_tokens or max(sequences, DEFAULTS["cuda"]["max_num_batched_tokens"])
    target = Target(
        gpu,
        dtype,
        sequences,
        tokens,
        pick_kv_format(kv_dtype),
        head,
        vptq_books,
        steps=tuple(step_rows) or None,
        passes=tuple(numbers("passes", passes)) if passes else None,
    )
    workers = workers or os.cpu_count() or 1
    parts = max(1, min(4, workers // len(models)))  # more would only wait for each other's imports
    runs = [
        functools.partial(wanted_by, model, target, part=part, parts=parts)
        for model in models
        for part in range(parts)
    ]
    with listening() as listen:
        done = precompile(runs, architecture, listen=listen, workers=workers)
    show(done, architecture, as_json=as_json)


def pick_kv_format(name: str | None) -> KVFormat | None:
    """None: the type of activations."""
    from flyweight.kv_format import KV_FORMATS, MODEL

    if name is None or name == MODEL:
        return None
    if name not in KV_FORMATS:
        raise OptionError(unknown("kv_dtype", name, [MODEL, *KV_FORMATS]))
    return KV_FORMATS[name]


def pick_gpu(arch: str | None, processors: int | None) -> tuple[Gpu, str]:
    """The GPU to compile for, and its architecture as the compiler calls it."""
    import dataclasses

    import torch

    from flyweight import gpu
    from flyweight.kernels import jit

    imitated = None if arch else gpu.imitated()
    here = torch.cuda.is_available()
    if arch is None and here:
        found = gpu.of(torch.cuda.current_device())
    elif imitated is not None:
        found = imitated
    else:
        found = gpu.by_name(arch or DEFAULT)
    if processors:
        found = dataclasses.replace(found, multi_processor_count=processors)
    if imitated is not None:
        return found, jit.current_architecture() if here else found.virtual_architecture
    return found, found.architecture


@contextlib.contextmanager
def listening() -> Iterator[Listen]:
    """A bar on stderr for each of the two stages."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks = {}

        def listen(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield listen


def show(done: Compiled, architecture: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "kernels": done.kernels,
                    "compiled": done.fresh,
                    "seconds": round(done.seconds, 1),
                    "arch": architecture,
                    "folder": str(done.folder),
                }
            )
        )
    else:
        typer.echo(
            f"{done.kernels} kernels for {architecture} in {done.folder}: {done.fresh} compiled in "
            f"{done.seconds:.0f} s, {done.kernels - done.fresh} were there"
        )
