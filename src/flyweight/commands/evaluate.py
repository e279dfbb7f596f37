"""`flyweight eval`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.options import (
    Device,
    Dtype,
    KvDtype,
    PromptDtype,
    Threads,
    VptqBooks,
)
from flyweight.commands.progress_line import progress_line
from flyweight.errors import OptionError

if TYPE_CHECKING:
    from flyweight.quant.evaluate import Agreement, Perplexity
    from flyweight.quant.subject import Subject

WINDOW = 512  # tokens
PIPE_WIDTH = 110  # columns of a table where no terminal says
BUILT_IN = "built-in"  # our own prose, of which the built-in calibration text holds nothing


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="Names, folders, hub ids or GGUF files; the first is the original."),
    ],
    text: Annotated[
        str, typer.Option(help="A plain text file, UTF-8; built-in: two pages of prose.")
    ] = BUILT_IN,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Tokens the model sees at a time; {WINDOW}, fewer where the context is shorter.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window to the next; default: the window."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many tokens of the text.")
    ] = None,
    served: Annotated[
        bool,
        typer.Option("--served", help="With the kernels of serving instead of the exact ones."),
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(
            help="Bits of the head of every model but the original: int8, int4 or stored; default: "
            "as each asks for, else as stored."
        ),
    ] = None,
    vptq_books: VptqBooks = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    prompt_dtype: PromptDtype = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Append the rows of --json to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an environment row and a result row per model.")
    ] = False,
) -> None:
    """Measure perplexity on a text: exp of the mean negative log-likelihood, lower is better.

    With several models, the others are also compared with the first: the KL divergence of their
    predictions from its own, and how often both find the same next token likeliest.

    --kv-dtype shows keys and values as a KV cache of that type would hold them; with several models
    to all but the first, so that naming a model twice compares it with itself.

    Windows do not overlap unless --stride is smaller; then each token has at least window − stride
    tokens before it. Models whose tokenizer begins a text with BOS see one at the beginning of
    every window.

    Examples:

        flyweight eval smollm2-135m --tokens 1024

        flyweight eval ./original ./int4 ./int8 --text wiki.txt -o quality.jsonl

        flyweight eval ./my-quantized-model --text wiki.txt --window 2048 --stride 1024 --json
    """
    content = read_text(text)
    from rich.console import Console

    from flyweight.bench.rows import ResultFile
    from flyweight.quant.evaluate import Remembered, compare, perplexity
    from flyweight.quant.subject import AS_FILES_ASK, Rounding, load_subject

    # first: a file that cannot be written shows at once
    results = ResultFile(output) if output is not None else None

    console = Console(stderr=True, highlight=False)
    first, original, rows = None, None, []
    rounding = Rounding(head, vptq_books, kv_dtype, prompt_dtype)
    for name in models:
        with console.status(f"Loading {name} …"):
            # the original's head and cache stay as its files ask for
            own = first is None and len(models) > 1
            subject = load_subject(
                name,
                content,
                device=device,
                dtype=dtype,
                exact=not served,
                rounding=AS_FILES_ASK if own else rounding,
            )
        window = window or min(WINDOW, subject.longest_window)
        if window > subject.longest_window:
            raise OptionError(
                f"--window {window} is more than the context of {name}: at most "
                f"{subject.longest_window} tokens"
            )
        if first is not None and subject.ids != first.ids:
            raise OptionError(
                f"{name} cuts the text into other tokens than {models[0]}: they cannot be compared"
            )
        with show_progress(console) as update:
            options = dict(window=window, stride=stride, bos=subject.bos, progress=update)
            if first is None or original is None:
                original = Remembered(subject.decoder) if len(models) > 1 else subject.decoder
                batch = 8 if subject.decoder.device.type == "cuda" else 1
                result, agreement = (
                    perplexity(original, subject.ids[:tokens], batch=batch, **options),
                    None,
                )
            else:
                result, agreement = compare(
                    original, subject.decoder, subject.ids[:tokens], **options
                )
        first = first or subject
        asked = {"head": head, "vptq_books": vptq_books, "prompt_dtype": prompt_dtype}
        rows.append(
            result_row(result, agreement, subject, model=name, text=text, exact=not served)
            | {key: value for key, value in asked.items() if value and not own}
        )
    assert first is not None
    complete = complete_rows(rows, first.decoder.device)
    if results is not None:
        results.append(complete)
    if as_json:
        for row in complete:
            typer.echo(json.dumps(row))
    else:
        print_table(models, rows)


def read_text(source: str, option: str = "--text") -> str:
    if source == BUILT_IN:
        return files("flyweight.quant").joinpath("held_out.txt").read_text(encoding="utf-8")
    try:
        content = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"{option} {source}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{option} {source}: cannot be read as UTF-8 text ({error})") from error
    if not content.strip():
        raise OptionError(f"{option} {source}: the file is empty")
    return content


def result_row(
    result: Perplexity,
    agreement: Agreement | None,
    subject: Subject,
    *,
    model: str,
    text: str,
    exact: bool,
) -> dict[str, Any]:
    """What was measured of one model, under the names that every benchmark uses."""
    from flyweight.bench.facts import checkpoint_facts

    dtype = str(subject.decoder.dtype).removeprefix("torch.")
    row = checkpoint_facts(model).fields() | dict(
        kv_dtype=subject.kv_dtype,
        dtype=dtype,
        tool="flyweight",
        exact=exact,
        perplexity=result.perplexity,
        perplexity_error=result.error,
        text=text,
        window=result.window,
        stride=result.stride,
        bos=result.bos,
        tokens=result.tokens,
        seconds=round(result.seconds, 3),
        tokens_per_second=round(result.tokens_per_second, 2),
    )
    if agreement is not None:
        row |= dict(
            kl=agreement.kl,
            kl_error=agreement.kl_error,
            top1_agreement=agreement.top1,
            log_ratio=agreement.log_ratio,
            log_ratio_error=agreement.log_ratio_error,
        )
    return row


def print_table(models: list[str], rows: list[dict[str, Any]]) -> None:
    if len(rows) == 1:
        typer.echo(
            f"perplexity {rows[0]['perplexity']:.4f} ± {rows[0]['perplexity_error']:.4f} "
            f"(standard error)"
        )
    else:
        from rich.console import Console
        from rich.table import Column, Table

        table = Table(Column("model", overflow="fold"), box=None, pad_edge=False)
        for heading in ("size", "bits", "perplexity", "change", "KL", "top-1"):
            table.add_column(heading, no_wrap=True)
        for model, row in zip(models, rows, strict=True):
            compared = (
                ("", "", "")
                if "kl" not in row
                else (
                    f"{100 * math.expm1(row['log_ratio']):+.2f} ± "
                    f"{100 * math.exp(row['log_ratio']) * row['log_ratio_error']:.2f} %",
                    f"{row['kl']:.5f}",
                    f"{100 * row['top1_agreement']:.2f} %",
                )
            )
            table.add_row(
                model,
                f"{1000 * row['size_gb']:,.0f} MB",
                f"{row['bits_per_weight']:.2f}",
                f"{row['perplexity']:.3f} ± {row['perplexity_error']:.2f}",
                *compared,
            )
        Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    row = rows[0]
    beginning = "BOS before each window" if row["bos"] else "no BOS"
    typer.echo(
        f"{row['tokens']:,} tokens scored, window {row['window']}, stride {row['stride']}, "
        f"{beginning}, {row['seconds']:.1f} s, {row['tokens_per_second']:.1f} tok/s"
    )


def complete_rows(rows: list[dict[str, Any]], device: Any) -> list[dict[str, Any]]:
    """The environment, and each row with what every benchmark's rows carry."""
    from flyweight.bench.rows import environment_row, make_row

    environment = environment_row(device, measure_bandwidth=False)
    return [environment, *(make_row("quality", environment["id"], **row) for row in rows)]


class show_progress:
    """A bar on standard error that tells the perplexity so far."""

    def __init__(self, console: Any):
        self.progress = progress_line(console, "perplexity", "windows")
        self.task = self.progress.add_task("…", total=None)

    def __enter__(self) -> Any:
        self.progress.start()
        return lambda done, total, value: self.progress.update(
            self.task, completed=done, total=total, description=f"{value:.3f}"
        )

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()
