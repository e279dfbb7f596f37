"""`flyweight convert`: a model in another file format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress


def convert(
    source: Annotated[
        str, typer.Argument(help="A quantized model: a folder, a hub id, or preset:NAME:SCHEME.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; of gguf the file.")
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format", help="gptq, gptq_v2, awq, compressed-tensors, fp8, vptq, plain, or gguf."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With plain: float32, float16 or bfloat16 (the model's own). With gguf: F16, "
            "Q8_0, Q6_K, Q4_K or Q4_0, to which weights are rounded (default: stored, nothing is "
            "rounded)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to do the arithmetic: cpu or cuda.")] = "cpu",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder if it is there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a quantized model in another file format, without loss, or say what would be lost and
    write nothing.

    GPTQ, AWQ and compressed-tensors hold the same codes in other orders; `plain` dequantizes for
    engines that read none of them.

    Examples:

        flyweight convert model-gptq -o model-ct --format compressed-tensors

        flyweight convert model-vptq -o model-bf16 --format plain --dtype bfloat16

        flyweight convert my-model -o my-model.gguf --format gguf --dtype Q8_0

        flyweight convert preset:qwen3-8b:int4 -o random-awq --format awq --device cuda
    """
    from flyweight.checkpoint.convert import convert as convert_folder
    from flyweight.checkpoint.formats import WRITABLE
    from flyweight.checkpoint.hub import resolve
    from flyweight.device import pick_device
    from flyweight.errors import OptionError, unknown
    from flyweight.models.random_folder import write_preset

    def export_file(model: Path, output: Path, *, dtype: str | None, **options: Any) -> Any:
        from flyweight.checkpoint.gguf_export import STORED, export

        return export(
            model,
            output,
            kind=dtype or STORED,
            overwrite=options["overwrite"],
            progress=options["progress"],
        )

    known = [*WRITABLE, "plain", "gguf"]
    if format not in known:
        raise OptionError(unknown("format", format, known))
    place, preset = str(pick_device(device)), source.startswith("preset:")
    model = Path(source) if preset else resolve(source)

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)
        options: dict[str, Any] = dict(
            format=format,
            device=place,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if preset:
            folder = write_preset(source, output, **options)
            typer.echo(
                json.dumps({"target": str(folder)})
                if as_json
                else f"{folder}: random weights of {source} as {format}"
            )
            return
        result = (export_file if format == "gguf" else convert_folder)(
            model, output, dtype=dtype, **options
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result) | {"target": str(result.target)}))
        return
    modules = ", ".join(f"{count} {kind}" for kind, count in result.modules.items())
    Console(highlight=False, soft_wrap=True).print(
        f"[bold]{result.target}[/]: {modules} modules as {result.format}, "
        f"{decimal(result.bytes_before)} → {decimal(result.bytes_after)}"
    )
