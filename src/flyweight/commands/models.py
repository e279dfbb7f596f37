"""`flyweight models` (or `list`), `rm` and `ps`: what is on this machine, and what runs."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from flyweight.errors import OptionError

PATIENCE = 2.0  # seconds that a server has to say how it is

AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]


def models(as_json: AsJSON = False) -> None:
    """List the models on this machine: those of our cache, and those fetched from the Hugging Face
    hub.

    Examples:

        flyweight models

        flyweight models --json
    """
    from flyweight.checkpoint.cached import cached_models
    from flyweight.checkpoint.prepared import files, folder, total_bytes

    found = cached_models()
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {
                        "name": model.name,
                        "source": model.source,
                        "folder": str(model.folder),
                        "bytes": model.bytes,
                        "modified": model.modified,
                    }
                    for model in found
                ]
            )
        )
        return
    if not found:
        typer.echo("No models yet; `flyweight pull smollm2-135m` gets one.")
        return
    rows = [
        (model.name, decimal(model.bytes), model.source, day(model.modified)) for model in found
    ]
    show(("model", "size", "from", "changed"), rows)
    if made := total_bytes(files()):
        typer.echo(
            f"Beside them {decimal(made)} of weights as the CPU's kernels read them, made "
            f"again when needed: {folder()}",
            err=True,
        )


def list_models(as_json: AsJSON = False) -> None:
    """List the models on this machine; the same as `flyweight models`.

    Examples:

        flyweight list

        flyweight list --json
    """
    models(as_json)


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="As `flyweight models` lists them.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Even while a server uses it.")] = False,
) -> None:
    """Delete models from the cache. Folders of your own are never touched.

    Examples:

        flyweight rm smollm2-135m

        flyweight rm Qwen/Qwen3-0.6B model-1a2b3c4d
    """
    from flyweight.checkpoint.cached import find_cached
    from flyweight.server.registry import running_servers

    chosen = [find_cached(name) for name in names]
    used = {folder for server in running_servers() for folder in server.get("folders", ())}
    for model in chosen:
        if not force and any(folder.startswith(str(model.folder)) for folder in used):
            raise OptionError(
                f"a server uses {model.name}; stop it first (`flyweight ps`), or give --force"
            )
    for model in chosen:
        model.delete()
        typer.echo(f"{model.name}: deleted, {decimal(model.bytes)} free")


def ps(as_json: AsJSON = False) -> None:
    """Show the servers that run on this machine.

    Examples:

        flyweight ps

        flyweight ps --json
    """
    from flyweight.server.registry import running_servers

    found = [server | {"state": state_of(server["url"])} for server in running_servers()]
    if as_json:
        typer.echo(json.dumps(found))
        return
    if not found:
        typer.echo("No server runs.")
        return
    rows = [
        (
            server["url"],
            ", ".join(server["models"]),
            str(server["state"]),
            str(server["pid"]),
            age(server["started"]),
        )
        for server in found
    ]
    show(("address", "models", "state", "pid", "up"), rows)


def state_of(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE) as answer:
            return json.load(answer)["status"]
    except urllib.error.HTTPError as error:  # it says why it is not ready
        try:
            return json.load(error)["status"]
        except (ValueError, KeyError):
            return f"HTTP {error.code}"
    except (OSError, ValueError):
        return "does not answer"


def show(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Plain columns, which other programs can cut."""
    widths = [max(len(row[at]) for row in [names, *rows]) for at in range(len(names))]
    console = Console(highlight=False, soft_wrap=True)
    for at, row in enumerate([names, *rows]):
        line = "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        console.print(line, style="bold" if at == 0 else None, markup=False)


def day(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d")


def age(moment: Any) -> str:
    minutes = int((time.time() - float(moment)) // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
