"""Bodies that are JSON whatever their header says, and what to say of those that are not.

`curl -d` announces a form unless it is told otherwise, so a body of another kind is read as JSON
where no browser sent it. From a browser it is refused: a page of another site may send forms and
plain text to any address without asking, and must not put this server to work.
"""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError
from starlette.types import Scope

from flyweight.server.counts import MOST_TOKENS
from flyweight.server.refusals import BadRequest, Refusal

FROM_A_BROWSER = (b"origin", b"sec-fetch-site", b"sec-fetch-mode")
MOST_CONTAINERS = 100_000  # lists and objects; 10,000 messages of several parts have fewer
MOST_ELEMENTS = 2 * MOST_TOKENS


class NotJSON(Refusal):
    status = 415
    code = "unsupported_media_type"


def take_as_json(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Of a POST whose content type is not JSON: change the header, or refuse."""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if scope["method"] != "POST" or kind == b"application/json" or kind.endswith(b"+json"):
        return
    if any(name in headers for name in FROM_A_BROWSER):
        raise NotJSON("the body must be JSON: send the header content-type: application/json")
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]


def check_elements(body: bytes) -> None:
    """Refuse a body of very many values before it is parsed: that holds up every other request, in
    whatever thread it is done, and takes a hundred times the memory of the body.
    """
    if not has_too_many(body):
        return
    # what is left of quotes begins or ends a string
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    # else they are letters of a long text
    if strings > MOST_ELEMENTS or has_too_many(b"".join(plain.split(b'"')[::2])):
        raise BadRequest(
            f"the body has more than {MOST_CONTAINERS:,} lists and objects, or {MOST_ELEMENTS:,} "
            "values; send less"
        )


def has_too_many(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > MOST_CONTAINERS or body.count(b",") > MOST_ELEMENTS


def broken_json(error: RequestValidationError) -> str | None:
    """Where a body stops being JSON, by line and column; None if that is not what is wrong."""
    first = error.errors()[0]
    if first["type"] != "json_invalid":
        return None
    text = error.body if isinstance(error.body, str) else ""
    at = first["loc"][-1] if isinstance(first["loc"][-1], int) else 0
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    reason = first.get("ctx", {}).get("error", "not JSON")
    return f"the body is not JSON: {reason} at line {line}, column {column}{near(text, at)}"


def near(text: str, at: int) -> str:
    """The words around the place, so that it is found in a body that a program put together."""
    around = text[max(0, at - 20) : at + 20].strip()
    return f", near {around!r}" if around else ""
