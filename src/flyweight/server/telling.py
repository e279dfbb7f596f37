"""An answer told in the words of another API: one sample, taken apart into pieces, whole or event
by event.

`Answer` in `answer.py` does the same for the two older OpenAI endpoints, which may have many
samples. The APIs that came later have one, and differ only in what they call things: each is a
`Teller`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from flyweight.server.answer import ENCODER, timings
from flyweight.server.messages import Delta
from flyweight.server.pieces import Arguments, Call, Piece, Text, Thought
from flyweight.server.reader import MessageReader
from flyweight.server.refusals import Refusal
from flyweight.server.ticket import Ticket


@dataclass(frozen=True)
class Usage:
    prompt: int
    cached: int  # of the prompt, found in the prefix cache
    answer: int


@dataclass(frozen=True)
class Ending:
    reason: str  # stop, length or tool_calls
    stop: str | None  # the stop string that ended it
    usage: Usage
    timings: dict[str, Any]


@dataclass
class Block:
    """Pieces of one kind that belong together: a stretch of thinking, of words, or a call."""

    kind: str  # thought, text or call
    text: str = ""  # for a call its arguments
    id: str = ""
    name: str = ""


class Teller(Protocol):
    def whole(self, blocks: list[Block], ending: Ending) -> dict[str, Any]:
        """The answer as one object."""

    def begin(self, usage: Usage) -> bytes:
        """What goes out before the first piece."""

    def add(self, piece: Piece) -> bytes: ...

    def end(self, ending: Ending) -> bytes: ...

    def fail(self, refusal: Refusal) -> bytes:
        """A failure in the middle of a stream."""


class ToldAnswer:
    """What `Service.generate` needs: `whole` and `events`."""

    def __init__(self, ticket: Ticket, reader: MessageReader, teller: Teller):
        self.ticket = ticket
        self.reader = reader
        self.teller = teller
        self.sent = 0
        self.reason = "stop"
        self.stop: str | None = None

    async def whole(self) -> dict[str, Any]:
        pieces: list[Piece] = []
        while deltas := await self.ticket.next():
            for _, delta in deltas:
                pieces += self._read(delta)
        return self.teller.whole(gather(pieces), self._ending())

    async def events(self, first: list[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Beginning with the deltas that were waited for already."""
        deltas = first
        try:
            yield self.teller.begin(self._usage())
            while deltas:
                pieces = [piece for _, delta in deltas for piece in self._read(delta)]
                if pieces:
                    yield b"".join(self.teller.add(piece) for piece in pieces)
                deltas = await self.ticket.next()
        except Refusal as refusal:
            yield self.teller.fail(refusal)
            return
        yield self.teller.end(self._ending())

    def _read(self, delta: Delta) -> list[Piece]:
        self.sent += len(delta.token_ids)
        pieces = self.reader.add(delta.text, last=delta.finish_reason is not None)
        if delta.finish_reason is not None:
            self.reason = self.reader.finish_reason(delta.finish_reason) or "stop"
            self.stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        return pieces

    def _usage(self) -> Usage:
        sample = self.ticket.samples[0]
        return Usage(sample.prompt_tokens, self.ticket.cached, self.sent)

    def _ending(self) -> Ending:
        return Ending(self.reason, self.stop, self._usage(), timings(self.ticket))


def gather(pieces: list[Piece]) -> list[Block]:
    blocks: list[Block] = []
    for piece in pieces:
        kind = kind_of(piece)
        if isinstance(piece, Call):
            blocks.append(Block(kind, id=piece.id, name=piece.name))
            continue
        if not blocks or blocks[-1].kind != kind:
            blocks.append(Block(kind))
        blocks[-1].text += piece.text
    return blocks


def arguments_of(text: str) -> dict[str, Any]:
    """An answer that was cut off may have half of them, which is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def kind_of(piece: Piece) -> str:
    kinds = {Thought: "thought", Text: "text", Call: "call", Arguments: "call"}
    return kinds[type(piece)]


def named_event(name: str, content: dict[str, Any]) -> bytes:
    """A server-sent event that says what it is."""
    return f"event: {name}\ndata: {ENCODER.encode(content)}\n\n".encode()
