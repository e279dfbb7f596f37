"""A ticket's deltas made into a response: one JSON object, or server-sent events of one token each.

The role goes out with the first token and never earlier, and the response itself begins with it, so
that a refusal, a full queue or a dead engine still has its own status code. What came in while a
reader was busy is sent in one write.

Most events differ from the one before in their text alone: what stands around it is encoded once
(`Answer._frame`).
"""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii
from typing import Any

from flyweight.server.formats import Format, join
from flyweight.server.messages import Delta
from flyweight.server.pieces import Arguments, Call, Piece, Text, Thought
from flyweight.server.protocol import SamplingFields
from flyweight.server.refusals import Refusal
from flyweight.server.ticket import Ticket

DONE = b"data: [DONE]\n\n"
# `json.dumps` would make one for every event
ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class Answer:
    def __init__(self, request: SamplingFields, ticket: Ticket, form: Format, *, model: str):
        self.request, self.ticket, self.form = request, ticket, form
        self.created = int(time.time())
        self.id = f"{form.prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.sent = 0  # tokens of the answer that were given out
        # What stands before and after the text of an event, by sample and kind of text.
        self.frames: dict[Hashable, tuple[bytes, bytes]] = {}
        self.begun: set[int] = set()  # samples that have had an event

    @functools.cached_property
    def bare(self) -> bool:
        """Whether events say nothing but text between a sample's first and last."""
        request = self.request
        # completions may want 0 of them, chats say whether
        logprobs = getattr(request, "logprobs", None)
        if logprobs is not None and logprobs is not False:
            return False
        return not (request.continuous_usage or request.return_token_ids or request.max_tokens == 0)

    async def whole(self) -> dict[str, Any]:
        parts: list[list[Delta]] = [[] for _ in self.ticket.samples]
        while deltas := await self.ticket.next():
            for number, delta in deltas:
                parts[number].append(delta)
                self.sent += len(delta.token_ids)
        choices = []
        for number, part in enumerate(parts):
            delta = join(part)
            choices.append(
                self.form.choice(number, delta, self.form.pieces(number, delta), whole=True)
            )
        return {
            "id": self.id,
            "object": self.form.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **self.form.envelope(first=True),
            "usage": self.usage(),
            "timings": timings(self.ticket),
        }

    async def events(self, first: list[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Beginning with the deltas that were waited for already."""
        deltas, begins = first, True
        try:
            while deltas:
                yield b"".join(
                    self._event(number, delta, first=begins and not at)
                    for at, (number, delta) in enumerate(deltas)
                )
                deltas, begins = await self.ticket.next(), False
        except Refusal as refusal:
            yield encode_event(refusal.body())
            return
        if self.request.wants_usage:
            yield encode_event(
                self._chunk([]) | {"usage": self.usage(), "timings": timings(self.ticket)}
            )
        yield DONE

    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.ticket.prompts))
        answer = self.sent if self.request.max_tokens != 0 else 0
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self.ticket.cached},
        }
        if drafted := sum(sample.drafted for sample in self.ticket.samples):
            accepted = sum(sample.accepted for sample in self.ticket.samples)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage

    def _event(self, number: int, delta: Delta, *, first: bool) -> bytes:
        self.sent += len(delta.token_ids)
        pieces = self.form.pieces(number, delta)
        ordinary = self.bare and len(pieces) == 1 and number in self.begun
        if (
            ordinary
            and delta.finish_reason is None
            and delta.logprobs is None
            and not isinstance(pieces[0], Call)
        ):
            before, after = self._frame(number, delta, pieces[0])
            return before + encode_basestring_ascii(pieces[0].text).encode() + after
        self.begun.add(number)
        return encode_event(self._whole_chunk(number, delta, pieces, first=first))

    def _frame(
        self, number: int, delta: Delta, piece: Text | Thought | Arguments
    ) -> tuple[bytes, bytes]:
        """The event of such a piece, without its text."""
        kind = number, type(piece), getattr(piece, "index", None)
        if kind not in self.frames:
            mark = uuid.uuid4().hex
            chunk = self._whole_chunk(number, delta, [replace(piece, text=mark)], first=False)
            before, after = encode_event(chunk).split(f'"{mark}"'.encode())
            self.frames[kind] = before, after
        return self.frames[kind]

    def _whole_chunk(
        self, number: int, delta: Delta, pieces: Sequence[Piece], *, first: bool
    ) -> dict[str, Any]:
        chunk = self._chunk([self.form.choice(number, delta, pieces, whole=False)])
        if first:
            chunk |= self.form.envelope(first=True)
        if self.request.continuous_usage:
            chunk["usage"] = self.usage()
        elif self.request.wants_usage:
            chunk["usage"] = None
        elif delta.finish_reason and not self.ticket.unfinished:
            chunk["timings"] = timings(self.ticket)
        return chunk

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.form.chunk_kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def encode_event(chunk: dict[str, Any]) -> bytes:
    return f"data: {ENCODER.encode(chunk)}\n\n".encode()


def timings(ticket: Ticket) -> dict[str, Any]:
    """The names are llama-server's; `queue_ms` and `ttft_ms` count from the request's arrival."""
    samples = [
        sample for sample in ticket.samples if sample.first is not None and sample.last is not None
    ]
    if not samples:
        return {}
    started = min(sample.started or ticket.arrival for sample in samples)
    first = min(sample.first or ticket.arrival for sample in samples)
    last = max(sample.last or first for sample in samples)
    prompt = sum(map(len, ticket.prompts))
    cached = ticket.cached
    tokens = sum(sample.tokens for sample in samples)
    prompt_ms, answer_ms = 1000 * (first - started), 1000 * (last - first)
    after = tokens - len(samples)  # tokens that came after the first ones
    return {
        "queue_ms": round(1000 * (started - ticket.arrival), 3),
        "ttft_ms": round(1000 * (first - ticket.arrival), 3),
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": rate(prompt - cached, prompt_ms),
        "predicted_n": tokens,
        "predicted_ms": round(answer_ms, 3),
        "predicted_per_token_ms": round(answer_ms / after, 3) if after > 0 else None,
        "predicted_per_second": rate(after, answer_ms),
        "total_ms": round(1000 * (last - ticket.arrival), 3),
    }


def rate(count: int, milliseconds: float) -> float | None:
    return round(1000 * count / milliseconds, 2) if milliseconds > 0 and count > 0 else None
