"""`flyweight pull`: get a model onto this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from flyweight.errors import OptionError
from flyweight.saving import writing


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A name (smollm2-135m), a hub id (owner/name, or owner/name:Q4_K_M for a GGUF "
            "file), a GGUF file or a folder."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Put a copy of the folder here.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Write a GGUF's weights out in float16 or float32, as other programs read them "
            "(default: they stay as they are)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Get a model: by name, from the Hugging Face hub, or from a GGUF file. Later uses need no
    network.

    Examples:

        flyweight pull smollm2-135m

        flyweight pull Qwen/Qwen3-0.6B

        flyweight pull Qwen/Qwen3-8B-GGUF:Q4_K_M

        flyweight pull model.Q8_0.gguf --output model-folder --dtype float32
    """
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint

    if output is not None and output.exists():
        raise OptionError(f"--output {output} exists already; choose another folder")
    folder = resolve(model, dtype=dtype)
    Checkpoint(folder)  # a folder that cannot be read has not been pulled
    if output is not None:
        folder = _copy(folder, output)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if as_json:
        typer.echo(json.dumps({"model": model, "folder": str(folder), "bytes": size}))
    else:
        Console(highlight=False, soft_wrap=True).print(
            f"[bold]{model}[/] is in [cyan]{folder}[/] ({decimal(size)})"
        )


def _copy(folder: Path, output: Path) -> Path:
    partial = output.absolute().with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(output):
            partial.mkdir(parents=True)
            for path in filter(Path.is_file, folder.iterdir()):
                shutil.copy2(path, partial)
            os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output
