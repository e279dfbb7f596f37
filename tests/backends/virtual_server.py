"""An OpenAI-compatible server whose token times are known exactly, on an event loop whose clock is
made up.

The loop's time stands still while anything is to do and jumps to the next timer otherwise, so a
second of waiting costs nothing and every time that the client reports can be compared with `==` up
to rounding. Client and server are joined by a pair of sockets, on which what one end has written is
at the other when the call returns: bytes on a loopback device may still be under way on a busy
machine, when nothing seems to be left to do.
"""

import asyncio
import json
import selectors
import socket
from unittest import mock

PATIENCE = 60  # seconds of real time until a loop without a timer has nothing to wait for


class JumpingSelector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        found = super().select(PATIENCE if timeout is None else 0)
        assert found or timeout is not None, "everybody waits for everybody"
        if not found:
            self.now += timeout
        return found


def run_virtual(coroutine):
    """`asyncio.run` on made-up time."""

    def make_loop():
        selector = JumpingSelector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(coroutine)


class Script:
    """What the server does with a request: `first` seconds to the first token, `gap` between chunks
    of `size` tokens.

    `slots` requests are served at a time; the others wait. `style` is how much the server tells:
    ids, usage (with every chunk), final (usage at the end), text (nothing).
    """

    def __init__(
        self,
        *,
        first=0.2,
        gap=0.05,
        size=1,
        style="ids",
        slots=None,
        refuse=(),
        fail=0,
        strict=False,
        cached=0,
    ):
        self.first, self.gap, self.size, self.style, self.strict, self.cached = (
            first,
            gap,
            size,
            style,
            strict,
            cached,
        )
        self.slots = asyncio.Semaphore(slots) if slots else None
        self.refuse, self.fail, self.bodies, self.connections = set(refuse), fail, [], 0

    async def handle(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readline():
                length = 0
                while line := (await reader.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else None
                await self.answer(head.split()[1].decode(), body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, path, body, writer):
        if body is None:
            return send(writer, 200, json.dumps({"data": [{"id": "mock"}]}))
        self.bodies.append((path, body))
        if self.strict and "ignore_eos" in body:
            return send(writer, 400, "unknown field ignore_eos")
        if len(self.bodies) in self.refuse:
            return send(writer, 503, "busy")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if self.slots:
            async with self.slots:
                await self.stream(path, body, writer)
        else:
            await self.stream(path, body, writer)
        writer.write(b"0\r\n\r\n")

    async def stream(self, path, body, writer):
        chat = "chat" in path
        if chat:
            event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        prompt = body.get("prompt") or body.get("messages")
        usage = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        done, total = 0, body["max_tokens"]
        while done < total:
            await asyncio.sleep(self.first if done == 0 else self.gap)
            count = min(self.size, total - done)
            ids = list(range(done, done + count))
            done += count
            choice = {"delta": {"content": "x" * count}} if chat else {"text": "x" * count}
            if self.style == "ids":
                choice["token_ids"] = ids
            data = {"choices": [choice]}
            if self.style == "usage":
                data["usage"] = usage | {"completion_tokens": done}
            event(writer, data)
        if self.style != "text":
            event(writer, {"choices": [], "usage": usage | {"completion_tokens": done}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n")


def send(writer, status, text):
    writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


def event(writer, data):
    payload = f"data: {json.dumps(data)}\n\n".encode()
    writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")


def with_server(script, use):
    """Run `use(url)` beside the server on made-up time; returns what it returns."""
    open_stream, serving = asyncio.open_connection, set()

    async def connect(host, port, *, ssl, limit):
        ours, theirs = socket.socketpair()
        serving.add(asyncio.create_task(script.handle(*await open_stream(sock=theirs))))
        return await open_stream(sock=ours, limit=limit)

    with mock.patch("asyncio.open_connection", connect):
        return run_virtual(use("http://mock"))
