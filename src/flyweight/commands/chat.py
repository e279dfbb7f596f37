"""`flyweight chat`: talk with a model in the terminal."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyweight.commands.generate import load
from flyweight.commands.line_reader import editing, messages
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
from flyweight.commands.word_wrap import WordWrap

if TYPE_CHECKING:
    from flyweight.commands.conversation import Conversation
    from flyweight.engine.llm import LLM

HINT = "/help lists the commands, Ctrl-D leaves, Ctrl-C stops an answer."
LIVELY = {"temperature": 0.7, "top_p": 0.95}  # for models whose files ask for nothing
MAX_TOKENS = 1024


def chat(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of one answer; fewer where the context ends.")
    ] = MAX_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; default: as the model asks.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this share.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same conversation.")
    ] = None,
    think: Annotated[
        bool | None, typer.Option(help="For models that can think before they answer.")
    ] = None,
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
) -> None:
    """Talk with a model. Lines can be edited and are remembered; Ctrl-C stops an answer and not the
    program.

    /help lists the commands: /reset, /system, /set, /save, /load, /exit. A message of several lines
    can be pasted, or typed between lines of three quotes.

    Examples:

        flyweight chat smollm2-135m

        flyweight chat Qwen/Qwen3-0.6B --no-think --system "Answer in one sentence."
    """
    from flyweight.checkpoint.hub import cache_folder
    from flyweight.commands.conversation import COMMANDS, Conversation
    from flyweight.engine.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
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
    )
    params = params.with_defaults({**LIVELY, **llm.sampling_defaults})
    template = {} if think is None else {"enable_thinking": think}
    conversation = Conversation(params, system=system)
    typer.echo(HINT, err=True)
    with editing(cache_folder() / "chat_history", COMMANDS):
        for text, is_command in messages(HINT):
            if is_command and text == "/exit":
                return
            if is_command:
                typer.echo(conversation.command(text), err=True)
            else:
                reply(llm, conversation, text, template)


def reply(llm: LLM, conversation: Conversation, text: str, template: dict[str, Any]) -> None:
    """Answer one message; a message that cannot be answered is not part of the conversation."""
    from flyweight.errors import RequestError

    conversation.add("user", text)
    try:
        conversation.add("assistant", answer(llm, conversation, template))
    except RequestError as error:  # such as a conversation that has grown too long
        typer.echo(f"flyweight: {error}", err=True)
        conversation.turns.pop()


def answer(llm: LLM, conversation: Conversation, template: dict[str, Any]) -> str:
    """Show the answer as it comes; a stopped one stays in the conversation as far as it got."""
    room = llm.room(conversation.messages, chat_template_kwargs=template)
    longest = min(conversation.params.max_tokens or room, room)
    params = dataclasses.replace(conversation.params, max_tokens=max(1, longest))
    stream = llm.stream(conversation.messages, params, chat_template_kwargs=template)
    wrap = WordWrap(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    text = ""
    count = 0
    begin = time.perf_counter()
    with interruptible() as stopped, stream:
        for chunk in stream:
            text += chunk.text
            count += len(chunk.token_ids)
            typer.echo(wrap.add(chunk.text), nl=False)
            if stopped:
                break
    typer.echo(wrap.finish())
    speed = count / (time.perf_counter() - begin)
    end = ", stopped" if stopped else ", max_tokens reached" if count >= longest else ""
    typer.echo(f"[{count} tokens, {speed:.1f} tok/s{end}]", err=True)
    return text
