"""`flyweight generate`: complete a prompt."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight import garbage
from flyweight.commands.options import (
    Context,
    Device,
    Dtype,
    Fraction,
    Head,
    KvDtype,
    Native,
    Offload,
    PromptDtype,
    Speculate,
    Threads,
    VptqBooks,
)
from flyweight.commands.stopping import interruptible
from flyweight.errors import OptionError

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import Output
    from flyweight.engine.stream import Stream

ADAPTED = "adapter"  # the name of the only one


def generate(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    prompt: Annotated[
        str, typer.Option(help="The text to complete; - reads it from standard input.")
    ],
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; 256, fewer where the context ends.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; default: as the model asks.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this share.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many tokens; 0 keeps all.")] = None,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 makes tokens seen before less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; can be given several times.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="How many answers.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    prompt_dtype: PromptDtype = None,
    head: Head = None,
    vptq_books: VptqBooks = None,
    native: Native = None,
    offload: Offload = 0,
    speculate: Speculate = None,
    max_model_len: Context = None,
    memory_fraction: Fraction = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Answer with this LoRA adapter of PEFT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Complete a prompt. The text appears as it is made, in a pipe or file too; the speed goes to
    standard error.

    Ctrl-C and SIGTERM stop the answer: what was made by then is written, with --json as a whole
    object.

    Examples:

        flyweight generate smollm2-135m --prompt "The capital of France is" --max-tokens 32
            --temperature 0

        flyweight generate smollm2-135m --chat --prompt "What is gravity?" --seed 1 --json

        cat question.txt | flyweight generate ./my-model --prompt - --stop "###"
    """
    from flyweight.engine.request import SamplingParams

    sampling: dict[str, Any] = dict(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        n=n,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
    )
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    SamplingParams(**sampling)  # refused before a model is loaded
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise OptionError(
            f"standard input is not {error.encoding} text ({error.reason} at byte "
            f"{error.start + 1})"
        ) from None
    if not text:
        raise OptionError(
            "the prompt is empty; give --prompt TEXT, or --prompt - and the text on standard input"
        )
    llm = load(
        model,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head=head,
        vptq_books=vptq_books,
        native=native,
        offload=offload,
        prompt_dtype=prompt_dtype,
        speculate=speculate,
        max_model_len=max_model_len,
        memory_fraction=memory_fraction,
        adapters={ADAPTED: adapter} if adapter else None,
    )
    asked: Any = [{"role": "user", "content": text}] if chat else text
    begin = time.perf_counter()
    stream = llm.stream(asked, adapter=ADAPTED if adapter else None, **sampling)
    stopped = run(stream, show=n == 1 and not as_json)
    output, seconds = stream.output, time.perf_counter() - begin
    if as_json:
        typer.echo(json.dumps(as_row(model, output)))
    elif n > 1:
        typer.echo("\n---\n".join(completion.text for completion in output.completions))
    count = sum(len(completion.token_ids) for completion in output.completions)
    end = f"; stopped by {signal.Signals(stopped).name}" if stopped else ""
    guessed = ""
    if drafted := sum(completion.drafted_tokens for completion in output.completions):
        accepted = sum(completion.accepted_tokens for completion in output.completions)
        guessed = f"; {accepted} of {drafted} guesses right"
    typer.echo(
        f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tok/s, prompt "
        f"included{guessed}{end}",
        err=True,
    )
    if stopped:
        raise typer.Exit(128 + stopped)


def adapters_of(given: list[str]) -> dict[str, str]:
    """{name: folder} of NAME=FOLDER."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise OptionError(f"--adapter {text}: give it as NAME=FOLDER, such as sql=./sql-lora")
        if name in found:
            raise OptionError(f"two adapters are called {name!r}; give them different names")
        found[name] = folder
    return found


def load(model: str, **options: Any) -> LLM:
    """With a line on standard error while it takes its seconds, and one about the
    memory it takes.
    """
    from rich.console import Console

    with Console(stderr=True).status(f"Loading {model} …"), garbage.paused():
        from flyweight.engine.llm import LLM

        llm = LLM(model, **options)
    if llm.tokenizer is None:
        raise OptionError(
            f"{model}: there is no tokenizer, so it takes no text; {what_helps(model)}"
        )
    typer.echo(f"memory: {llm.memory()}", err=True)
    if llm.device.type == "cpu":
        typer.echo(f"runs on: {llm.executor}", err=True)
    return llm


def what_helps(model: str) -> str:
    if model.startswith("preset:"):
        return "`flyweight bench` measures random weights"
    return "copy tokenizer.json and tokenizer_config.json from where the model is from"


def run(stream: Stream, *, show: bool) -> int | None:
    """Until the end or a signal, whose number is returned; the text is shown as it comes."""
    shown = 0
    with interruptible(signal.SIGINT, signal.SIGTERM) as stopped, stream:
        for chunk in stream:
            if show:
                typer.echo(chunk.text, nl=False)  # flushes: whoever reads a pipe sees it at once
                shown += len(chunk.text)
            if stopped:
                break
    if show:  # what a stop string could still have begun with is held back until the end
        typer.echo(stream.output.text[shown:])
    return stopped[0] if stopped else None


def as_row(model: str, output: Output) -> dict[str, Any]:
    completions = []
    for completion in output.completions:
        timing = completion.timing
        times = {
            "ttft_s": (timing.first_token or timing.arrival) - timing.arrival,
            "total_s": (timing.finished or timing.arrival) - timing.arrival,
        }
        completions.append(dataclasses.asdict(completion) | {"timing": times})
    return {
        "model": model,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "completions": completions,
    }
