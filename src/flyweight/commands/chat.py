"""`flyweight chat`: talk with a model in the terminal."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.generate import Context, Device, Dtype, Fraction, load

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import SamplingParams

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
LIVELY = {"temperature": 0.7, "top_p": 0.95}  # for models whose files ask for nothing


def chat(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 1024,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token; default: as the model asks.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same conversation.")] = None,
    think: Annotated[bool | None, typer.Option(help="For models that can think before they answer.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    max_model_len: Context = None,
    memory_fraction: Fraction = None,
) -> None:
    """Talk with a model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer and not the program.

    Examples:

        flyweight chat smollm2-135m

        flyweight chat Qwen/Qwen3-0.6B --no-think --system "Answer in one sentence."
    """
    from flyweight.engine.request import SamplingParams
    from flyweight.errors import RequestError

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = load(model, device=device, dtype=dtype, max_model_len=max_model_len, memory_fraction=memory_fraction)
    params = params.with_defaults({**LIVELY, **llm.sampling_defaults})
    template = {} if think is None else {"enable_thinking": think}
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    typer.echo(HELP, err=True)
    for line in questions():
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            typer.echo(HELP, err=True)
        else:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": answer(llm, messages, params, template)})
            except RequestError as error:  # such as a conversation that has grown too long
                typer.echo(f"flyweight: {error}", err=True)
                messages.pop()


def questions() -> Iterator[str]:
    """Lines of the user, until /exit or Ctrl-D."""
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            typer.echo(f"\n{HELP}", err=True)
            continue
        except EOFError:
            typer.echo()
            return
        if line == "/exit":
            return
        if line:
            yield line


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, template: dict[str, Any]) -> str:
    """Show the answer as it comes; a stopped one stays in the conversation as far as it got."""
    text, count, begin = "", 0, time.perf_counter()
    with interruptible() as stopped:
        for chunk in llm.iterate(messages, params, **template):
            text, count = text + chunk.text, count + len(chunk.token_ids)
            typer.echo(chunk.text, nl=False)
            if stopped:
                break
    speed = count / (time.perf_counter() - begin)
    typer.echo()
    typer.echo(f"[{count} tokens, {speed:.1f} tok/s{', stopped' if stopped else ''}]", err=True)
    return text


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Ctrl-C fills the list instead of raising: a step is never torn in the middle."""
    stopped: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
