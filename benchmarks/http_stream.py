"""The least HTTP client that can read server-sent events: one connection a request, plain asyncio.

Hundreds of clients share a machine with the server under test, so what a client costs counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    time: float
    data: dict[str, Any]


class Refused(Exception):
    def __init__(self, status: int, headers: dict[str, str], body: str):
        super().__init__(f"HTTP {status}: {body[:200]}")
        self.status, self.headers = status, headers


async def _request(method: str, port: int, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)


async def stream(port: int, body: dict[str, Any], *, path: str = "/v1/completions") -> AsyncIterator[Event]:
    """Closing the iterator early closes the connection: a client that goes away."""
    reader, writer = await _request("POST", port, path, json.dumps(body | {"stream": True}).encode())
    try:
        status, headers = await _head(reader)
        if status != 200:
            raise Refused(status, headers, (await reader.read()).decode())
        while line := await reader.readline():  # chunk sizes are lines too, and no event looks like one
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield Event(time.perf_counter(), json.loads(line[6:]))
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


@contextlib.contextmanager
def server(model: str, *options: str) -> Iterator[tuple[int, int, int]]:
    """(port, pid of the server, pid of its engine) of a `flyweight serve` that is ready."""
    command = [sys.executable, "-m", "flyweight.cli", "serve", model, "--port", "0", "--log-format", "json", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    port = engine = 0
    try:
        while not engine:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("the server ended before it was ready")
            event = json.loads(line) if line.startswith("{") else {}
            port = event.get("port", port)
            engine = event["pid"] if event.get("event") == "engine_ready" else 0
        with open(os.devnull, "w") as nowhere:
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=nowhere)  # its log must not fill the pipe
        yield port, process.pid, engine
    finally:
        process.terminate()
        process.wait()
        drain.wait()


def about(model: str) -> dict[str, Any]:
    """What every row about a model says."""
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint(resolve(model))
    quantized = checkpoint.config.get("quantization_config", {}).get("quant_method")
    stored = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
    return {"model": model, "checkpoint": checkpoint.hash(), "weights": "trained", "backend": "native",
            "scheme": quantized or stored.replace("bfloat", "bf").replace("float", "fp")}


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{share}": ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))] for share in (50, 90, 95, 99)}
    return {name: round(value, 3) for name, value in (at | {"mean": sum(ordered) / len(ordered)}).items()} if ordered else {}
