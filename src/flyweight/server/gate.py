"""What every request passes first: its id, the host it names, the API key, the size of its body;
and what is written down when it is over.

A plain ASGI layer, because the usual middleware classes put a queue between each event and the
socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyweight.server.error_shapes import error_content
from flyweight.server.hosts import Hosts
from flyweight.server.json_body import check_elements, take_as_json
from flyweight.server.logs import log, logger
from flyweight.server.metrics import Metrics
from flyweight.server.refusals import BodyTooLarge, EngineFailed, Refusal, TooSlow, WrongKey
from flyweight.server.settings import Settings

# no secrets, no work for the engine
OPEN_PATHS = {"/", "/health", "/live", "/ready", "/metrics", "/docs", "/openapi.json"}
BODY_SECONDS = 120.0  # 8 MB at half a megabit a second
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self.app, self.settings, self.metrics = app, settings, metrics
        self.hosts = Hosts(settings.allowed_hosts, keys=bool(settings.api_keys))
        self.keys = [digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"], state["facts"] = request_id.decode(), {}
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self.hosts.check(headers.get(b"host", b""))
            self.check_key(
                scope["path"],
                headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b""),
            )
            take_as_json(scope, headers)
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await read_body(receive, headers, self.settings.max_body)
            except TimeoutError:
                raise TooSlow(
                    f"the request's body did not arrive within {BODY_SECONDS:g} seconds"
                ) from None
            check_elements(body)
            await self.app(scope, replay(body, receive), tagged)
        except Refusal as refusal:
            state["facts"]["error"] = str(refusal)
            await refuse(refusal, tagged, scope["path"])
        except Exception:
            logger.exception("server_error", extra={"fields": {"request_id": state["request_id"]}})
            if not status:
                await refuse(
                    EngineFailed("the server failed on this request; its log says why"),
                    tagged,
                    scope["path"],
                )
        finally:
            self.write_down(scope, status, time.perf_counter() - begin)

    def check_key(self, path: str, authorization: bytes) -> None:
        """In constant time: neither the length of a right beginning nor which of the keys it was
        can be measured.
        """
        if not self.keys or path in OPEN_PATHS:
            return
        scheme, _, token = authorization.partition(b" ")
        found = digest(token.strip() if scheme.lower() == b"bearer" else b"")
        if not sum([hmac.compare_digest(found, key) for key in self.keys]):
            raise WrongKey("a valid API key is needed: Authorization: Bearer KEY")

    def write_down(self, scope: Scope, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", "other")
        self.metrics.responses.labels(path, str(status)).inc()
        level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
        log(
            "request",
            level=level,
            request_id=scope["state"]["request_id"],
            method=scope["method"],
            path=path,
            status=status,
            ms=round(1000 * seconds, 1),
            **scope["state"]["facts"],
        )


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(receive: Receive, headers: dict[bytes, bytes], limit: int) -> bytes:
    """All of it, but no more than the limit, whatever the client says about its length."""
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise BodyTooLarge(
            f"the request has {int(length)} bytes, but this server takes at most {limit}"
        )
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise BodyTooLarge(
                f"the request has more than {size} bytes, but this server takes at most {limit}"
            )
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


async def refuse(refusal: Refusal, send: Send, path: str) -> None:
    body = json.dumps(error_content(path, refusal)).encode()
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": refusal.status,
        "headers": headers,
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
