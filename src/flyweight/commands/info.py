"""`flyweight info`: what a model is, layer kind by layer kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table


def info(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model is: shape, size, scheme and true bits per weight of every kind of layer, and the kernel it gets here.

    Examples:

        flyweight info smollm2-135m

        flyweight info ./my-quantized-model --json
    """
    import torch

    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.checkpoint.summary import summarize
    from flyweight.kernels.dispatch import prepare

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    checkpoint = Checkpoint(resolve(model))
    summary = summarize(checkpoint, lambda tensor: prepare(tensor.to(device), dtype=dtype), itemsize=dtype.itemsize)
    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
    else:
        _show(summary)


def _show(summary: Any) -> None:
    bits = ", ".join(f"{scheme} {bits:.2f}" for scheme, bits in summary.bits_by_scheme().items())
    tied = "tied" if summary.tied_embeddings else "not tied"
    facts = {
        "architecture": f"{summary.architecture}, {summary.layers} layers, hidden {summary.hidden_size}, "
                        f"{summary.heads} heads / {summary.kv_heads} KV heads",
        "parameters": f"{summary.parameters / 1e6:,.1f} M, {summary.dtype}, embeddings {tied}",
        "quantization": summary.quantization or "none",
        "bits per weight": bits,
        "vocabulary": f"{summary.vocabulary:,}" if summary.vocabulary else "?",
        "context": f"{summary.context_length:,} tokens" if summary.context_length else "?",
        "on disk": f"{decimal(summary.disk)} in {summary.folder}",
        "in memory": f"{decimal(summary.memory)} of weights, as laid out for the kernels below",
    }
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:<16} {value}")
    console.print()
    Console(highlight=False, markup=False, width=max(110, console.width)).print(_table(summary))
    for kernel, why in dict.fromkeys((group.kernel, group.why) for group in summary.groups if group.kernel):
        console.print(f"\n{kernel}: {why}")


def _table(summary: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("layers", "module", "scheme", "shape", "bits/weight", "size", "kernel"):
        table.add_column(heading, justify="right" if heading in ("bits/weight", "size") else "left")
    for group in summary.groups:
        table.add_row(ranges(group.layers), group.module, group.scheme, " × ".join(map(str, group.shape)),
                      f"{group.bits_per_weight:.2f}", decimal(group.nbytes), group.kernel)
    return table


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 → `0-2, 5`"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
