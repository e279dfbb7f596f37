"""Requests of other APIs are made into chat requests here; what does not fit is the client's
mistake, and is told so.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from flyweight.server.protocol import ChatRequest
from flyweight.server.refusals import BadRequest


def as_chat(fields: dict[str, Any]) -> ChatRequest:
    """None stands for a field that was not sent."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(
            f"{where}: {first['msg']}", param=str(first["loc"][0]) if first["loc"] else None
        ) from error
