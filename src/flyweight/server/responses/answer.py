"""Answers of /v1/responses: an object of output items, or the events that build one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from flyweight.server.pieces import Call, Piece
from flyweight.server.refusals import Refusal
from flyweight.server.responses.request import ResponsesRequest
from flyweight.server.telling import Block, Ending, Usage, kind_of, named_event

PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
DELTAS = {  # kind of block → the event of its pieces, and its last
    "thought": ("response.reasoning_text.delta", "response.reasoning_text.done"),
    "text": ("response.output_text.delta", "response.output_text.done"),
    "call": ("response.function_call_arguments.delta", "response.function_call_arguments.done"),
}
Keep = Callable[[dict[str, Any], list[Block]], None]


class ResponseTeller:
    def __init__(self, model: str, body: ResponsesRequest, keep: Keep):
        """`keep` gets the finished response."""
        self.model = model
        self.body = body
        self.keep = keep
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.sequence = 0
        self.items: list[dict[str, Any]] = []
        self.blocks: list[Block] = []  # those that events have told of
        self.open: Block | None = None

    def whole(self, blocks: list[Block], ending: Ending) -> dict[str, Any]:
        self.items = [item_of(block, "completed") for block in blocks]
        return self._finish(blocks, ending)

    def begin(self, usage: Usage) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def add(self, piece: Piece) -> bytes:
        kind = kind_of(piece)
        out = b""
        if isinstance(piece, Call) or self.open is None or self.open.kind != kind:
            out += self._close()
            out += self._start(
                Block(kind, id=getattr(piece, "id", ""), name=getattr(piece, "name", ""))
            )
        if isinstance(piece, Call):
            return out
        assert self.open is not None
        self.open.text += piece.text
        return out + self._event(
            DELTAS[kind][0], **self._place(), **self._part_fields(), delta=piece.text
        )

    def end(self, ending: Ending) -> bytes:
        out = self._close()
        response = self._finish(self.blocks, ending)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        return self._event(
            "response.failed", response=self._response("failed", None) | {"error": error}
        )

    # -- items -------------------------------------------------------------------------------------

    def _start(self, block: Block) -> bytes:
        self.open = block
        item = item_of(block, "in_progress")
        self.items.append(item)
        out = self._event(
            "response.output_item.added", output_index=len(self.items) - 1, item=bare(item)
        )
        if block.kind != "call":
            out += self._event(
                "response.content_part.added", **self._place(), content_index=0, part=part_of(block)
            )
        return out

    def _close(self) -> bytes:
        block = self.open
        if block is None:
            return b""
        done = DELTAS[block.kind][1]
        if block.kind == "call":
            out = self._event(done, **self._place(), arguments=block.text, name=block.name)
        else:
            out = self._event(done, **self._place(), **self._part_fields(), text=block.text)
            out += self._event(
                "response.content_part.done", **self._place(), content_index=0, part=part_of(block)
            )
        self.items[-1] = item_of(block, "completed") | {"id": self.items[-1]["id"]}
        self.blocks.append(block)
        self.open = None
        return out + self._event(
            "response.output_item.done", output_index=len(self.items) - 1, item=self.items[-1]
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part_fields(self) -> dict[str, Any]:
        assert self.open is not None
        if self.open.kind == "call":
            return {}
        return {"content_index": 0} | ({"logprobs": []} if self.open.kind == "text" else {})

    def _event(self, name: str, /, **content: Any) -> bytes:
        event = {"type": name, "sequence_number": self.sequence, **content}
        self.sequence += 1
        return named_event(name, event)

    # -- the object --------------------------------------------------------------------------------

    def _finish(self, blocks: list[Block], ending: Ending) -> dict[str, Any]:
        cut = ending.reason == "length"
        if cut and self.items:
            self.items[-1] = self.items[-1] | {"status": "incomplete"}
        response = self._response("incomplete" if cut else "completed", ending)
        self.keep(response, blocks)
        return response

    def _response(self, status: str, ending: Ending | None) -> dict[str, Any]:
        body = self.body
        form = body.text.format if body.text and body.text.format else {"type": "text"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": list(self.items),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.store is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "usage": usage_of(ending.usage) if ending else None,
            "background": False,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "user": (body.model_extra or {}).get("user"),
        }


def item_of(block: Block, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"{PREFIXES[block.kind]}_{uuid.uuid4().hex}", "status": status}
    if block.kind == "call":
        return item | {
            "type": "function_call",
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
        }
    if block.kind == "thought":
        return item | {"type": "reasoning", "summary": [], "content": [part_of(block)]}
    return item | {"type": "message", "role": "assistant", "content": [part_of(block)]}


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """As it is when it begins: its parts are told of one by one."""
    return item | {"content": []} if "content" in item else item


def part_of(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.answer,
    }
