"""`flyweight generate`: complete a prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.errors import OptionError

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import Output, SamplingParams

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; the GPU if there is one.")]
Fraction = Annotated[float | None, typer.Option(min=0, max=1, help="Of the device's memory, for weights and KV cache together "
                                                "(CPU: of what is free, for the cache alone); 0.9 (CPU: 0.25).")]
Context = Annotated[int | None, typer.Option(min=2, help="Longest context to make room for.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; float32 on a CPU, else the model's own.")]


def generate(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    prompt: Annotated[str, typer.Option(help="The text to complete; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token; default: as the model asks.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many tokens; 0 keeps all.")] = None,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 makes tokens seen before less likely.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; can be given several times.")] = None,
    n: Annotated[int, typer.Option("-n", help="How many answers.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    max_model_len: Context = None,
    memory_fraction: Fraction = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Complete a prompt. The text appears as it is made; the speed goes to standard error.

    Examples:

        flyweight generate smollm2-135m --prompt "The capital of France is" --max-tokens 32 --temperature 0

        flyweight generate smollm2-135m --chat --prompt "What is gravity?" --seed 1 --json

        cat question.txt | flyweight generate ./my-model --prompt - --stop "###"
    """
    from flyweight.engine.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
                            repetition_penalty=repetition_penalty, stop=stop or (), n=n)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason} at byte {error.start + 1})") from None
    if not text:
        raise OptionError("the prompt is empty; give --prompt TEXT, or --prompt - and the text on standard input")
    llm = load(model, device=device, dtype=dtype, max_model_len=max_model_len, memory_fraction=memory_fraction)
    asked: Any = [{"role": "user", "content": text}] if chat else text
    begin = time.perf_counter()
    if sys.stdout.isatty() and not as_json and n == 1:
        count = show_stream(llm, asked, params)
    else:
        output = llm.generate([asked], params, progress=sys.stderr.isatty())[0]
        count = sum(len(completion.token_ids) for completion in output.completions)
        typer.echo(json.dumps(as_row(model, output)) if as_json else "\n---\n".join(c.text for c in output.completions))
    seconds = time.perf_counter() - begin
    typer.echo(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tok/s, prompt included", err=True)


def load(model: str, **options: Any) -> LLM:
    """With a line on standard error while it takes its seconds, and one about the memory it takes."""
    from rich.console import Console

    with Console(stderr=True).status(f"Loading {model} …"):
        from flyweight.engine.llm import LLM

        llm = LLM(model, **options)
    typer.echo(f"memory: {llm.memory()}", err=True)
    return llm


def show_stream(llm: LLM, prompt: Any, params: SamplingParams) -> int:
    count = 0
    for chunk in llm.iterate(prompt, params):
        count += len(chunk.token_ids)
        typer.echo(chunk.text, nl=False)
    typer.echo()
    return count


def as_row(model: str, output: Output) -> dict[str, Any]:
    completions = []
    for completion in output.completions:
        timing = completion.timing
        times = {"ttft_s": (timing.first_token or timing.arrival) - timing.arrival,
                 "total_s": (timing.finished or timing.arrival) - timing.arrival}
        completions.append(dataclasses.asdict(completion) | {"timing": times})
    return {"model": model, "prompt": output.prompt, "prompt_tokens": len(output.prompt_token_ids), "completions": completions}
