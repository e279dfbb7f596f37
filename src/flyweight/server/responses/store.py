"""Responses that can be gone on from: the latest, in memory, and no more than fit."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from flyweight.server.refusals import Refusal

MOST = 1000  # responses
MOST_BYTES = 64 << 20  # of their JSON


class UnknownResponse(Refusal):
    status = 404
    code = "response_not_found"


@dataclass(frozen=True)
class Stored:
    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the whole conversation, this answer included
    size: int


class ResponseStore:
    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES):
        self.most = most
        self.most_bytes = most_bytes
        self.bytes = 0
        self.kept: OrderedDict[str, Stored] = OrderedDict()

    def get(self, name: str, *, param: str | None = None) -> Stored:
        if name not in self.kept:
            raise UnknownResponse(
                f"there is no response {name!r}: it was never stored, or newer ones took its place",
                param=param,
            )
        self.kept.move_to_end(name)
        return self.kept[name]

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        size = len(json.dumps([response, messages]))
        self.kept[response["id"]] = Stored(response, messages, size)
        self.bytes += size
        while len(self.kept) > self.most or self.bytes > self.most_bytes:
            _, oldest = self.kept.popitem(last=False)
            self.bytes -= oldest.size

    def delete(self, name: str) -> None:
        self.bytes -= self.get(name).size
        del self.kept[name]
