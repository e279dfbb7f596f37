"""`flyweight quantize`: make a smaller copy of a model."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands import scheme_list
from flyweight.commands.evaluate import read_text
from flyweight.commands.options import Device, Dtype, Threads
from flyweight.commands.progress_line import progress_line
from flyweight.errors import FlyweightError, OptionError

LOW_BITS = 9.0  # and less: rounded to a grid that a scheme may hit again

if TYPE_CHECKING:
    from flyweight.quant.events import Event
    from flyweight.quant.summary import Summary


def quantize(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")] = "",
    scheme: Annotated[
        str,
        typer.Option(
            help="A named scheme; --list explains them.", autocompletion=scheme_list.names
        ),
    ] = "gptq-int4",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder to make.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe of your own (TOML) instead of a scheme.")
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="A text or JSONL file, or a hub dataset.")
    ] = "built-in",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Calibration sequences; 128 on a GPU, 16 on a CPU.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of each; 2048 on a GPU, 512 on a CPU.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Which samples are drawn, and everything else that is random.")
    ] = 0,
    eval_text: Annotated[
        Path | None,
        typer.Option("--eval", help="Measure perplexity before and after on this text."),
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many tokens of it.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where an interrupted run of this command stopped."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output folder that exists.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(help="File format; default: what most engines read for this scheme."),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a forward pass; fewer need less memory.")
    ] = None,
    cache_gb: Annotated[
        float, typer.Option(min=0, help="Host memory for activations; the rest goes to disk.")
    ] = 4.0,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many decoder blocks, to time a model.")
    ] = None,
    shards: Annotated[
        int,
        typer.Option(
            min=1, help="GPUs that are to divide the model: groups are chosen so that they can."
        ),
    ] = 1,
    list_schemes: Annotated[
        bool, typer.Option("--list", help="Explain every scheme and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
) -> None:
    """Quantize a model. One decoder block is in memory at a time; the result is an ordinary model
    folder.

    Interrupted (even by `kill -9`), the same command with --resume continues at the last finished
    block and gives the same bytes. Everything needed to repeat the run is written into
    OUT/flyweight.json.

    Examples:

        flyweight quantize smollm2-135m --scheme gptq-int4 -o smol-int4

        flyweight quantize ./my-model --scheme int4-best -o out --calibration my.txt --eval test.txt

        flyweight quantize ./my-model --recipe mixed.toml -o out --resume

        flyweight quantize --list
    """
    if list_schemes:
        return print_schemes(as_json)
    if not model or output is None:
        raise OptionError(
            "quantize needs a model and an output folder: flyweight quantize MODEL "
            "--scheme NAME -o OUT"
        )
    # Stages need pieces of other sizes; fixed segments would keep what the last one needed. torch
    # reads it when CUDA starts.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from flyweight.quant.quantize import quantize as make

    if eval_text is not None:
        # an hour of work must not end at a file that is not there
        read_text(str(eval_text), option="--eval")
    dtype = dtype_for(device, dtype)
    if note := rounded_before(model):
        typer.echo(note, err=True)
    try:
        with LiveView(model, recipe.stem if recipe else scheme) as view:
            summary = make(
                model,
                scheme,
                output,
                recipe=recipe,
                calibration=calibration,
                samples=samples,
                length=length,
                seed=seed,
                resume=resume,
                overwrite=overwrite,
                format=format,
                device=device,
                dtype=dtype,
                batch=batch,
                cache_gb=cache_gb,
                blocks=blocks,
                shards=shards,
                listen=view.listen,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "finished blocks are kept, and the same command with --resume goes on from there"
        ) from None
    quality = {}
    if eval_text is not None and summary.finished:
        quality = {
            name: measure(folder, eval_text, eval_tokens, device=device, dtype=dtype)
            for name, folder in (("before", model), ("after", str(output)))
        }
    print_summary(summary, quality, as_json)


def dtype_for(device: str | None, dtype: str | None) -> str | None:
    """As asked for, unless this CPU could compute with it only very slowly."""
    import torch

    from flyweight.cpu import computable
    from flyweight.device import pick_device

    if dtype not in ("float16", "bfloat16") or pick_device(device).type != "cpu":
        return dtype
    return str(computable(getattr(torch, dtype))).removeprefix("torch.")


def rounded_before(model: str) -> str | None:
    """A line where the source itself is a low-bit file: what quantizing costs cannot be
    seen on it.
    """
    if model.startswith("preset:"):
        return None
    from flyweight.checkpoint.folder import read_json
    from flyweight.checkpoint.gguf_config import SOURCE
    from flyweight.checkpoint.hub import resolve

    try:
        config = read_json(resolve(model) / "config.json")
    except FlyweightError:  # what is wrong with it is told by the work itself
        return None
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        return (
            f"note: {model} is quantized already ({method}): its rounding stays in the result, "
            f"and the new one comes on top"
        )
    source = config.get(SOURCE) or {}
    if source.get("bits_per_weight", 16) > LOW_BITS:
        return None
    return (
        f"note: {model} comes from {source['file']}, which stores weights in "
        f"{source['bits_per_weight']:.1f} bits (mostly {source['type']}): they were rounded "
        "before, so what this scheme costs on full-precision weights will be more"
    )


def print_schemes(as_json: bool) -> None:
    rows = scheme_list.schemes()
    typer.echo(json.dumps(rows, indent=1) if as_json else scheme_list.shown(rows))


class LiveView:
    """A bar over the blocks on standard error: the layer just solved, its error, memory, and the
    time left.
    """

    def __init__(self, model: str, scheme: str) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.progress = progress_line(self.console, scheme, "blocks")
        self.task = self.progress.add_task(f"reading {model} …", total=None)

    def __enter__(self) -> LiveView:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def listen(self, event: Event) -> None:
        layer = str(event.layer).removeprefix("model.")
        texts = {"layer": f"{layer} error {event.error:.2e}", "tuned": "steps of tuning the whole"}
        done = event.block + (event.kind in ("finished", "resumed"))
        self.progress.update(
            self.task,
            total=event.blocks,
            completed=done,
            description=f"{memory_text()}  {texts.get(event.kind, 'running finished blocks')}",
        )


def memory_text() -> str:
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    text = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB"
    import torch

    return (
        (f"{text}, GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        if torch.cuda.is_initialized()
        else text
    )


def measure(
    model: str, text: Path, tokens: int | None, *, device: str | None, dtype: str | None
) -> dict[str, float]:
    """Perplexity of one model, as `flyweight eval` measures it."""
    from rich.console import Console

    from flyweight.commands.evaluate import WINDOW, show_progress
    from flyweight.quant.evaluate import perplexity
    from flyweight.quant.subject import load_subject

    subject = load_subject(model, read_text(str(text), option="--eval"), device=device, dtype=dtype)
    batch = 8 if subject.decoder.device.type == "cuda" else 1
    with show_progress(Console(stderr=True, highlight=False)) as update:
        result = perplexity(
            subject.decoder,
            subject.ids[:tokens],
            window=min(WINDOW, subject.longest_window),
            bos=subject.bos,
            progress=update,
            batch=batch,
        )
    return {"perplexity": result.perplexity, "error": result.error, "tokens": result.tokens}


def whole_file(summary: Summary) -> str:
    """Bits per weight with embedding and head, which most schemes leave as they are."""
    if not summary.finished:
        return ""
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.checkpoint.summary import summarize

    return f", {summarize(Checkpoint(summary.output)).file_bits:.3f} over the whole file"


def print_summary(summary: Summary, quality: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        data = dataclasses.asdict(summary) | {
            "output": str(summary.output),
            "mean_error": summary.mean_error,
            "quality": quality,
        }
        return typer.echo(json.dumps(data))
    from rich.console import Console
    from rich.table import Table

    worst, error = summary.worst
    rows = [
        ("scheme", f"{summary.scheme}, written as {summary.format}"),
        (
            "bits per weight",
            f"{summary.bits_per_weight:.3f} in the layers (scales and codebooks "
            f"included){whole_file(summary)}",
        ),
        ("size", f"{summary.bytes_before / 1e6:,.1f} MB → {summary.bytes_after / 1e6:,.1f} MB"),
        ("layer error, mean", f"{summary.mean_error:.2e} of the output's energy"),
        ("layer error, worst", f"{error:.2e} in {worst}"),
    ]
    if quality:
        before, after = quality["before"], quality["after"]
        change = 100 * (after["perplexity"] / before["perplexity"] - 1)
        rows.append(
            (
                "perplexity",
                f"{before['perplexity']:.4f} → {after['perplexity']:.4f} ({change:+.2f} %, "
                f"{before['tokens']:,} tokens)",
            )
        )
    rows.append(("time", f"{summary.seconds:.1f} s on {summary.tokens:,} calibration tokens"))
    if summary.peak_gpu_gb:
        rows.append(("GPU memory, peak", f"{summary.peak_gpu_gb:.2f} GB"))
    rows += [("note", note) for note in summary.notes]
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(f"[bold]{name}[/]", value)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        str(summary.output)
        if summary.finished
        else f"stopped as asked; {summary.output} was not made"
    )
