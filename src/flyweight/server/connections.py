"""How many connections there may be and how slow they may be, below everything that speaks HTTP.

A connection costs a descriptor for as long as it is open, whether it asks for anything or not. So a
request's head has a size and a time, a reader that has stopped reading has a time, one client
cannot have all connections, and some descriptors are kept for the engine, for files and for whoever
comes next. uvicorn itself closes a connection that is idle after an answer, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyweight.server.refusals import HeaderTooLarge, Refusal, TooManyConnections, TooSlow

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
else:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    # then uvicorn's own protocol serves, which limits the size of a head and nothing else
    except ImportError:
        Base = None

RESERVED = 64  # descriptors for other things than connections
WANTED = 65_536  # descriptors, where the system lets us have them
PHRASES = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass
class ConnectionLimits:
    total: int = 4096
    per_client: int = 2048
    header_bytes: int = 64 << 10  # beyond which a head that has not ended is refused
    # from the first byte, or from the connection, to the end of the head
    header_seconds: float = 20.0
    stalled_seconds: float = 60.0  # that a reader may leave its full buffer unread
    clients: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_this_process(cls) -> ConnectionLimits:
        """As many as there are descriptors, but for a reserve; one client may have half of them."""
        total = max(RESERVED, raise_descriptors() - RESERVED)
        return cls(total=total, per_client=max(1, total // 2))


def raise_descriptors() -> int:
    """The limit of open files, raised as far as may be: 1,024 is the usual, and little for a
    server.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def bounded_protocol(limits: ConnectionLimits) -> Any:
    """What uvicorn is to speak: its own protocol within these limits."""
    return "auto" if Base is None else type("BoundedHTTP", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(Base if Base is not None else object):  # type: ignore[misc]
    limits: ConnectionLimits
    name: str | None = None  # of the client, once it is counted
    head_timer: asyncio.TimerHandle | None = None  # runs while the head of a request is awaited
    stall_timer: asyncio.TimerHandle | None = None
    head_bytes = 0
    in_body = False  # of a request whose head has ended; its answer may be there before it

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        name = str(self.client[0]) if self.client else ""
        if (
            len(self.connections) > self.limits.total
            or self.limits.clients[name] >= self.limits.per_client
        ):
            self.refuse(
                TooManyConnections(
                    "too many connections; close some, or try again later", retry_after=5
                )
            )
            return
        self.name = name
        self.limits.clients[name] += 1
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        self._stop_stall_timer()
        if self.name is not None:
            self.limits.clients[self.name] -= 1
            if not self.limits.clients[self.name]:
                del self.limits.clients[self.name]
            self.name = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self.head_bytes += len(data)
        super().data_received(data)
        waits = self.head_timer is not None and not self.in_body
        if waits and self.head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self.refuse(
                HeaderTooLarge(
                    f"the request's headers have more than {self.limits.header_bytes} bytes"
                )
            )

    def on_headers_complete(self) -> None:
        self._head_is_over()
        self.in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_is_over()
        self.in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read, and what is kept for it has reached its limit."""
        super().pause_writing()
        self._stop_stall_timer()
        self.stall_timer = self.loop.call_later(self.limits.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def refuse(self, refusal: Refusal) -> None:
        """An answer below ASGI, and the end of the connection."""
        self._head_is_over()
        body = json.dumps(refusal.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **refusal.headers,
        }
        lines = [
            f"HTTP/1.1 {refusal.status} {PHRASES[refusal.status]}",
            *(f"{key}: {value}" for key, value in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _await_head(self) -> None:
        self.head_bytes = 0
        self.head_timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.in_body:  # the rest of one that was refused for its size: it has its answer
            self.transport.abort()
        else:
            self.refuse(
                TooSlow(
                    f"the request's headers did not arrive within {self.limits.header_seconds:g} "
                    "seconds"
                )
            )

    def _head_is_over(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _stop_stall_timer(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None
