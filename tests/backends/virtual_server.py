"""An OpenAI-compatible server whose token times are known exactly, on an event loop whose clock is made up.

The loop's time stands still while anything is to do and jumps to the next timer otherwise, so a second of waiting costs
nothing and every time that the client reports can be compared with `==` up to rounding.
"""

import asyncio
import json
import selectors

GRACE = 0.002  # seconds of real time in which bytes must cross the loopback before the clock may jump


class JumpingSelector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        if found := super().select(0 if timeout is not None else 5):
            return found
        if timeout and not (found := super().select(GRACE)):
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
    """What the server does with a request: `first` seconds to the first token, `gap` between chunks of `size` tokens.

    `slots` requests are served at a time; the others wait. `style` is how much the server tells: ids, usage (with every
    chunk), final (usage at the end), text (nothing).
    """

    def __init__(self, *, first=0.2, gap=0.05, size=1, style="ids", slots=None, refuse=(), fail=0, strict=False, cached=0):
        self.first, self.gap, self.size, self.style, self.strict, self.cached = first, gap, size, style, strict, cached
        self.slots = asyncio.Semaphore(slots) if slots else None
        self.refuse, self.fail, self.bodies, self.connections = set(refuse), fail, [], 0

    async def handle(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readline():
                length = 0
                while (line := (await reader.readline()).strip()):
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
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
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
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": self.cached}}
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
    async def both():
        server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
        try:
            return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()

    return run_virtual(both())
