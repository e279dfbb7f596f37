"""Answers of /v1/messages: a message of content blocks, or the events that build one."""

from __future__ import annotations

import uuid
from typing import Any

from flyweight.server.error_shapes import anthropic_error
from flyweight.server.pieces import Call, Piece
from flyweight.server.refusals import Refusal
from flyweight.server.telling import Block, Ending, Usage, arguments_of, kind_of, named_event

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesTeller:
    def __init__(self, model: str):
        self.model = model
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self.index = -1  # of the block that is open
        self.open: str | None = None  # its kind

    def whole(self, blocks: list[Block], ending: Ending) -> dict[str, Any]:
        return self._message([whole_block(block) for block in blocks], ending.usage) | stop_fields(
            ending
        )

    def begin(self, usage: Usage) -> bytes:
        return named_event(
            "message_start", {"type": "message_start", "message": self._message([], usage)}
        )

    def add(self, piece: Piece) -> bytes:
        kind = kind_of(piece)
        out = b""
        if isinstance(piece, Call) or kind != self.open:
            out += self._close()
            out += self._start(
                Block(kind, id=getattr(piece, "id", ""), name=getattr(piece, "name", ""))
            )
        if isinstance(piece, Call):
            return out
        delta, field = DELTAS[kind]
        content = {
            "type": "content_block_delta",
            "index": self.index,
            "delta": {"type": delta, field: piece.text},
        }
        return out + named_event("content_block_delta", content)

    def end(self, ending: Ending) -> bytes:
        usage = usage_fields(ending.usage)
        delta = named_event(
            "message_delta", {"type": "message_delta", "delta": stop_fields(ending), "usage": usage}
        )
        return self._close() + delta + named_event("message_stop", {"type": "message_stop"})

    def fail(self, refusal: Refusal) -> bytes:
        return named_event("error", anthropic_error(refusal))

    def _start(self, block: Block) -> bytes:
        self.index += 1
        self.open = block.kind
        content = {
            "type": "content_block_start",
            "index": self.index,
            "content_block": whole_block(block),
        }
        return named_event("content_block_start", content)

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        self.open = None
        return named_event(
            "content_block_stop", {"type": "content_block_stop", "index": self.index}
        )

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_fields(usage),
        }


def whole_block(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {
        "type": "tool_use",
        "id": block.id,
        "name": block.name,
        "input": arguments_of(block.text),
    }


def stop_fields(ending: Ending) -> dict[str, Any]:
    if ending.stop is not None and ending.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": REASONS.get(ending.reason, "end_turn"), "stop_sequence": None}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Their input tokens are those that were not in a cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.answer,
    }
