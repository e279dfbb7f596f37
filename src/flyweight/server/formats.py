"""The shapes of answers: one choice of a completion or a chat, whole or as the piece that one step
added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flyweight.engine.request import TokenLogprob
from flyweight.server.messages import Delta
from flyweight.server.pieces import Arguments, Call, Piece, Text, Thought
from flyweight.server.protocol import ChatRequest, CompletionRequest
from flyweight.server.reader import MessageReader
from flyweight.server.token_names import TokenNames


class Format(Protocol):
    kind: str  # of object, in the envelope; chunks have their own
    chunk_kind: str
    prefix: str  # of the id

    def pieces(self, number: int, delta: Delta) -> list[Piece]:
        """What a sample's next delta says. Called for the deltas of each sample in their order, or
        once with all joined.
        """

    def choice(
        self, number: int, delta: Delta, pieces: Sequence[Piece], *, whole: bool
    ) -> dict[str, Any]:
        """The same with all else that there is to be said of it."""

    def envelope(self, *, first: bool) -> dict[str, Any]:
        """Further fields beside the choices, with the first chunk or the whole answer."""


class CompletionFormat:
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        texts: Sequence[str],
        names: TokenNames,
    ):
        self.request, self.prompts, self.texts, self.names = request, prompts, texts, names
        self.offsets = [0] * (len(prompts) * request.samples)
        self.started: set[int] = set()

    def pieces(self, number: int, delta: Delta) -> list[Piece]:
        return [Text(delta.text)]

    def choice(
        self, number: int, delta: Delta, pieces: Sequence[Piece], *, whole: bool
    ) -> dict[str, Any]:
        prompt = number // self.request.samples
        first = number not in self.started
        self.started.add(number)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        tokens, logprobs = delta.token_ids, list[TokenLogprob | None](delta.logprobs or [])
        # a prompt to be judged: the one token that was made for it is nobody's
        if self.request.max_tokens == 0:
            text, tokens, logprobs = "", [], []
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if first and self.request.echo:
            choice["text"] = self.texts[prompt] + text
            tokens, logprobs = (
                [*self.prompts[prompt], *tokens],
                [*(delta.prompt_logprobs or [None]), *logprobs],
            )
        if self.request.logprobs is not None:
            choice["logprobs"] = self.names.completion(logprobs, tokens, self.offsets[number])
        self.offsets[number] += len(choice["text"])
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.prompts[prompt]
        return choice

    def envelope(self, *, first: bool) -> dict[str, Any]:
        return {}


class ChatFormat:
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        request: ChatRequest,
        prompt: list[int],
        names: TokenNames,
        readers: Sequence[MessageReader],
    ):
        """`readers`: one for each sample."""
        self.request, self.prompt, self.names = request, prompt, names
        self.started: set[int] = set()
        self.readers = readers

    def pieces(self, number: int, delta: Delta) -> list[Piece]:
        return self.readers[number].add(delta.text, last=delta.finish_reason is not None)

    def choice(
        self, number: int, delta: Delta, pieces: Sequence[Piece], *, whole: bool
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if number not in self.started else {}
        self.started.add(number)
        reader = self.readers[number]
        message |= chat_message(pieces, whole=whole, thinks=reader.splitter is not None)
        choice: dict[str, Any] = {
            "index": number,
            "message" if whole else "delta": message,
            "logprobs": self.names.chat(delta.logprobs or []) if self.request.logprobs else None,
            "finish_reason": reader.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if whole:
            message["refusal"] = None
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def envelope(self, *, first: bool) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt} if first and self.request.return_token_ids else {}


def chat_message(pieces: Sequence[Piece], *, whole: bool, thinks: bool) -> dict[str, Any]:
    """The fields of a message or of a delta. A delta that says nothing has empty content."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls = whole_calls(pieces) if whole else call_deltas(pieces)
    message: dict[str, Any] = {}
    if thought or (whole and thinks):
        message["reasoning_content"] = thought or None
    if content or whole or not (thought or calls):
        message["content"] = None if whole and calls and not content else content
    if calls:
        message["tool_calls"] = calls
    return message


def call_deltas(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Call):
            deltas.append(
                {
                    "index": piece.index,
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            )
        elif isinstance(piece, Arguments):
            if not deltas or deltas[-1]["index"] != piece.index:
                deltas.append({"index": piece.index, "function": {"arguments": ""}})
            deltas[-1]["function"]["arguments"] += piece.text
    return deltas


def whole_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    calls = call_deltas(pieces)
    for call in calls:
        del call["index"]
    return calls


def join(deltas: Sequence[Delta]) -> Delta:
    """A sample's deltas as one."""
    first, last = deltas[0], deltas[-1]
    logprobs = (
        None
        if first.logprobs is None
        else [item for delta in deltas for item in delta.logprobs or ()]
    )
    return first._replace(
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
