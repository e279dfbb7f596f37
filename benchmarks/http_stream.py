"""The least HTTP client that can read server-sent events: one connection a request, plain asyncio.

Hundreds of clients share a machine with the server under test, so what a client costs counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Event:
    time: float
    text: bytes

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Read when it is wanted: hundreds of clients share one process here, and would slow each
        other.
        """
        return json.loads(self.text)


class Refused(Exception):
    def __init__(self, status: int, headers: dict[str, str], body: str):
        super().__init__(f"HTTP {status}: {body[:200]}")
        self.status, self.headers = status, headers


async def _request(
    method: str, port: int, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        f"application/json\r\nconnection: close\r\n"
    )
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return int(lines[0].split()[1]), dict(
        line.lower().split(": ", 1) for line in lines[1:] if ": " in line
    )


async def next_event(reader: asyncio.StreamReader) -> bytes:
    """What follows `data: `, or nothing where all is over. Chunks of HTTP's own encoding may begin
    before it.
    """
    try:
        return (await reader.readuntil(b"\n\n")).partition(b"data: ")[2].strip()
    except asyncio.IncompleteReadError:
        return b""


async def stream(
    port: int, body: dict[str, Any], *, path: str = "/v1/completions"
) -> AsyncIterator[Event]:
    """Closing the iterator early closes the connection: a client that goes away."""
    reader, writer = await _request(
        "POST", port, path, json.dumps(body | {"stream": True}).encode()
    )
    try:
        status, headers = await _head(reader)
        if status != 200:
            raise Refused(status, headers, (await reader.read()).decode())
        while (event := await next_event(reader)) not in (b"[DONE]", b""):
            yield Event(time.perf_counter(), event)
    finally:
        writer.transport.abort()


async def call(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
    reader, writer = await _request(method, port, path, content)
    try:
        status, headers = await _head(reader)
        text = (await reader.readexactly(int(headers["content-length"]))).decode()
        if status != 200:
            raise Refused(status, headers, text)
        return json.loads(text)
    finally:
        writer.close()


@dataclass(frozen=True)
class Served:
    port: int
    pid: int  # of the server
    engine: int  # pid of its engine
    facts: dict[str, Any]  # what it said when the engine was ready


@contextlib.contextmanager
def server(model: str, *options: str, log: str = os.devnull) -> Iterator[Served]:
    """A `flyweight serve` that is ready; what it logs from then on goes to `log`."""
    command = [
        sys.executable,
        "-m",
        "flyweight.cli",
        "serve",
        model,
        "--port",
        "0",
        "--log-format",
        "json",
        *options,
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    assert process.stderr is not None
    drain, port, facts = None, 0, None
    try:
        while facts is None:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("the server ended before it was ready")
            event = json.loads(line) if line.startswith("{") else {}
            if not event:
                print(line, end="", file=sys.stderr)
            port = event.get("port", port)
            facts = event if event.get("event") == "engine_ready" else None
        with open(log, "w") as file:
            # its log must not fill the pipe
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=file)
        yield Served(port, process.pid, facts["pid"], facts)
    finally:
        process.terminate()
        process.wait()
        if drain is not None:
            drain.wait()


def run(clients: Coroutine[Any, Any, Result]) -> Result:
    """On the server's kind of event loop, where it is there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(clients)
    return uvloop.run(clients)


def resident(pid: int) -> int:
    """MB in memory."""
    with open(f"/proc/{pid}/status") as file:
        return next(
            int(line.split()[1]) * 1024 // 10**6 for line in file if line.startswith("VmRSS")
        )


def gpu_memory() -> int | None:
    """MB in use on the device, by all."""
    from flyweight.bench.environment import nvidia

    used = nvidia("memory.used")
    return round(int(used.split()[0]) * 1.048576) if used else None


def about(model: str) -> dict[str, Any]:
    """What every row about a model says."""
    from flyweight.bench.facts import Variant, facts_of

    return facts_of(Variant(model)).fields() | {"backend": "native"}


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        f"p{share}": ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))]
        for share in (50, 90, 95, 99)
    }
    return (
        {
            name: round(value, 3)
            for name, value in (at | {"mean": sum(ordered) / len(ordered)}).items()
        }
        if ordered
        else {}
    )
