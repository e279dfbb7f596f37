"""Answers of /api/chat and /api/generate: one object, or a line of JSON for every piece."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from flyweight.server.answer import ENCODER
from flyweight.server.pieces import Arguments, Call, Piece, Text, Thought
from flyweight.server.refusals import Refusal
from flyweight.server.telling import Block, Ending, Usage, arguments_of

LINES = "application/x-ndjson"


class ChatTeller:
    """Calls go out whole, because here their arguments are an object and no text."""

    def __init__(self, model: str):
        self.model = model
        self.call: Block | None = None  # one whose arguments are still coming

    def whole(self, blocks: list[Block], ending: Ending) -> dict[str, Any]:
        calls = [call_object(block) for block in blocks if block.kind == "call"]
        words = "".join(block.text for block in blocks if block.kind == "text")
        thought = "".join(block.text for block in blocks if block.kind == "thought")
        return self._object(words, thought, calls) | ending_fields(ending)

    def begin(self, usage: Usage) -> bytes:
        return b""

    def add(self, piece: Piece) -> bytes:
        if isinstance(piece, Arguments):
            assert self.call is not None
            self.call.text += piece.text
            return b""
        out = self._finish_call()
        if isinstance(piece, Call):
            self.call = Block("call", id=piece.id, name=piece.name)
            return out
        words = piece.text if isinstance(piece, Text) else ""
        thought = piece.text if isinstance(piece, Thought) else ""
        return out + line(self._object(words, thought, []) | {"done": False})

    def end(self, ending: Ending) -> bytes:
        return self._finish_call() + line(self._object("", "", []) | ending_fields(ending))

    def fail(self, refusal: Refusal) -> bytes:
        return line({"error": str(refusal)})

    def _finish_call(self) -> bytes:
        if self.call is None:
            return b""
        call = call_object(self.call)
        self.call = None
        return line(self._object("", "", [call]) | {"done": False})

    def _object(self, words: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": words}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"model": self.model, "created_at": now(), "message": message}


class GenerateTeller(ChatTeller):
    def _object(self, words: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {"model": self.model, "created_at": now(), "response": words}
        return content | ({"thinking": thought} if thought else {})


def call_object(block: Block) -> dict[str, Any]:
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments_of(block.text)}}


def ending_fields(ending: Ending) -> dict[str, Any]:
    """Times are nanoseconds."""
    measured = ending.timings
    return {
        "done": True,
        "done_reason": "length" if ending.reason == "length" else "stop",
        "total_duration": nanoseconds(measured.get("total_ms")),
        "load_duration": 0,
        "prompt_eval_count": ending.usage.prompt,
        "prompt_eval_duration": nanoseconds(measured.get("prompt_ms")),
        "eval_count": ending.usage.answer,
        "eval_duration": nanoseconds(measured.get("predicted_ms")),
    }


def nanoseconds(milliseconds: float | None) -> int:
    return int(1_000_000 * (milliseconds or 0))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(content: dict[str, Any]) -> bytes:
    return (ENCODER.encode(content) + "\n").encode()
