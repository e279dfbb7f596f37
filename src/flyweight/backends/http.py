"""A small HTTP/1.1 client on asyncio streams: POST a JSON body, read the answer as it comes.

By hand, because the moment at which bytes arrive is what is measured here: between the socket and
the caller's clock stand a readline and nothing else. Connections are kept and used again, as the
clients of other benchmarks do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

LONGEST_LINE = 1 << 24  # bytes


class HttpError(Exception):
    """An answer that is not a 200; `kind` is what a result row calls it."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status
        self.kind = f"http {status}"


class Client:
    """For one server. Not for several event loops at once."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self.host, self.secure = parts.hostname or "localhost", parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = dict(headers or {})
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def lines(self, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[bytes]:
        """The lines of the answer, each as soon as it is whole; `body` makes it a POST."""
        reader, writer = await self._send(path, body)
        whole = False
        try:
            status, headers = await read_head(reader)
            if status != 200:
                content = b"".join([part async for part in read_body(reader, headers)])
                raise HttpError(status, content.decode(errors="replace").strip())
            rest = b""
            async for part in read_body(reader, headers):
                *ready, rest = (rest + part).split(b"\n")
                for line in ready:
                    yield line.rstrip(b"\r")
            if rest:
                yield rest
            whole = headers.get("connection", "").lower() != "close" and (
                "content-length" in headers or "transfer-encoding" in headers
            )
        finally:
            if whole:
                self.free.append((reader, writer))
            else:
                writer.close()

    async def text(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        return b"\n".join([line async for line in self.lines(path, body)]).decode()

    async def _send(
        self, path: str, body: Mapping[str, Any] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": f"{self.host}:{self.port}", "Accept": "*/*", **self.headers}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        head = f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1\r\n"
        message = (
            head + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        ).encode() + content
        while self.free:
            reader, writer = self.free.pop()
            # else the server has closed it meanwhile
            if not reader.at_eof() and not writer.is_closing():
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(
                self.host, self.port, ssl=self.secure or None, limit=LONGEST_LINE
            )
        writer.write(message)
        await writer.drain()
        return reader, writer

    def close(self) -> None:
        for _, writer in self.free:
            writer.close()
        self.free.clear()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await reader.readline()
    if not first:
        raise ConnectionError("the server closed the connection without an answer")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split()[1]), headers


async def read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():  # trailers
            pass
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left and (part := await reader.read(left)):
            left -= len(part)
            yield part
    else:
        while part := await reader.read(1 << 16):
            yield part
