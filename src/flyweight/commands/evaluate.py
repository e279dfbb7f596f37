"""`flyweight eval`: how well a model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.generate import Device, Dtype
from flyweight.errors import OptionError

if TYPE_CHECKING:
    from flyweight.quant.evaluate import Perplexity

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def evaluate(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    text: Annotated[Path | None, typer.Option(help="A plain text file, UTF-8.")] = None,
    window: Annotated[int, typer.Option(help="Tokens the model sees at a time.")] = 512,
    stride: Annotated[int | None, typer.Option(help="Tokens from one window to the next; default: the window.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Only the first so many tokens of the text.")] = None,
    served: Annotated[bool, typer.Option("--served", help="With the kernels of serving instead of the exact ones.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an environment row and a result row.")] = False,
) -> None:
    """Measure perplexity on a text: exp of the mean negative log-likelihood, lower is better.

    Windows do not overlap unless --stride is smaller; then each token has at least window − stride tokens before it.
    Models whose tokenizer begins a text with BOS see one at the beginning of every window.

    Examples:

        flyweight eval smollm2-135m --text wiki.txt --tokens 4096

        flyweight eval ./my-quantized-model --text wiki.txt --window 2048 --stride 1024 --json
    """
    content = read_text(text)
    import torch
    from rich.console import Console

    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.engine.llm import choose_dtype
    from flyweight.models.decoder import Decoder
    from flyweight.quant.evaluate import perplexity

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(stderr=True, highlight=False)
    with console.status(f"Loading {model} …"):
        checkpoint = Checkpoint(resolve(model))
        ids, bos = encode(checkpoint.tokenizer(), content)
        number_type = choose_dtype(dtype, checkpoint.config, place)
        decoder = Decoder.load(checkpoint, device=place, dtype=number_type, exact=not served)
    if window + (bos is not None) > decoder.config.context_length:
        raise OptionError(f"--window {window} is more than the context of {decoder.config.context_length} tokens")
    with show_progress(console) as update:
        result = perplexity(decoder, ids[:tokens], window=window, stride=stride, bos=bos, progress=update,
                            batch=8 if place.type == "cuda" else 1)
    if as_json:
        print_rows(result, checkpoint, model=model, text=str(text), dtype=str(number_type).removeprefix("torch."), device=place,
                   exact=not served)
    else:
        print_result(result)


def read_text(path: Path | None) -> str:
    if path is None:
        raise OptionError("eval needs a text to measure on: --text FILE")
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"--text {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text {path}: cannot be read as UTF-8 text ({error})") from error
    if not content.strip():
        raise OptionError(f"--text {path}: the file is empty")
    return content


def encode(tokenizer: Any, text: str) -> tuple[list[int], int | None]:
    """The text's own tokens, and the BOS id if this tokenizer begins texts with one."""
    begins_with_bos = tokenizer.bos_token_id is not None and tokenizer.encode("a")[0] == tokenizer.bos_token_id
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids, tokenizer.bos_token_id if begins_with_bos else None


def print_result(result: Perplexity) -> None:
    beginning = "BOS before each window" if result.bos else "no BOS"
    typer.echo(f"perplexity {result.perplexity:.4f} ± {result.error:.4f} (standard error)")
    typer.echo(f"{result.tokens:,} tokens scored, window {result.window}, stride {result.stride}, {beginning}, "
               f"{result.seconds:.1f} s, {result.tokens_per_second:.1f} tok/s")


def print_rows(result: Perplexity, checkpoint: Any, *, model: str, text: str, dtype: str, device: Any, exact: bool) -> None:
    from flyweight.bench.rows import environment_row, make_row
    from flyweight.checkpoint.summary import summarize

    summary, environment = summarize(checkpoint), environment_row(device, measure_bandwidth=False)
    linears = [group for group in summary.groups if group.layers]
    bits = 8 * sum(group.nbytes for group in linears) / sum(group.parameters for group in linears)
    row = make_row(
        "quality", environment["id"], model=model, checkpoint=checkpoint.hash(), weights="trained",
        scheme=summary.quantization or SHORT.get(summary.dtype, summary.dtype), kv_dtype=dtype, dtype=dtype,
        size_gb=round(checkpoint.nbytes / 1e9, 4), bits_per_weight=round(bits, 4), tool="flyweight", exact=exact,
        perplexity=result.perplexity, perplexity_error=result.error, text=text, window=result.window, stride=result.stride,
        bos=result.bos, tokens=result.tokens, seconds=round(result.seconds, 3),
        tokens_per_second=round(result.tokens_per_second, 2))
    typer.echo(json.dumps(environment))
    typer.echo(json.dumps(row))


class show_progress:
    """A bar on standard error that tells the perplexity so far."""

    def __init__(self, console: Any):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(TextColumn("perplexity {task.description}"), BarColumn(), MofNCompleteColumn(),
                                 TimeRemainingColumn(), console=console, transient=True)
        self.task = self.progress.add_task("…", total=None)

    def __enter__(self) -> Any:
        self.progress.start()
        return lambda done, total, value: self.progress.update(self.task, completed=done, total=total,
                                                               description=f"{value:.3f}")

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()
