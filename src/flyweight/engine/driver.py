"""Steps of an engine for who waits for answers: until all are there, chunk by chunk in the caller's
thread, or behind an event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator

from flyweight.engine.background import BackgroundSteps
from flyweight.engine.core import Engine
from flyweight.engine.prompts import Prepared, check_served
from flyweight.engine.request import Chunk, Request


class Driver:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._background = BackgroundSteps(engine)

    def run(self, submitted: list[list[Request]], *, progress: bool) -> None:
        requests = [request for group in submitted for request in group]
        if not progress:
            while not all(request.finished for request in requests):
                self.engine.step()
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(
                "generating", total=sum(request.limit - len(request.prompt) for request in requests)
            )
            while not all(request.finished for request in requests):
                self.engine.step()
                done = sum(
                    request.limit - len(request.prompt) if request.finished else request.generated
                    for request in requests
                )
                shown.update(task, completed=done)

    def chunks(self, prepared: Prepared, requests: list[Request]) -> Generator[Chunk, None, None]:
        chunks: deque[Chunk] = deque()  # a step of another thread may bring some too
        requests += self.engine.submit(
            prepared.tokens, prepared.params, listener=chunks.append, adapter=prepared.adapter
        )
        try:
            while chunks or not all(request.finished for request in requests):
                if not chunks:
                    self.engine.step()
                    continue
                chunk = chunks.popleft()
                check_served(chunk.finish_reason, chunk.stop_reason)
                yield chunk
        finally:
            self.engine.cancel(requests)

    async def chunks_async(
        self, prepared: Prepared, requests: list[Request]
    ) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        queue = asyncio.Queue[Chunk]()
        requests += self.engine.submit(
            prepared.tokens,
            prepared.params,
            listener=lambda chunk: self._background.deliver(loop, queue, chunk),
            adapter=prepared.adapter,
        )
        self._background.drive(loop)
        unfinished = len(requests)
        try:
            while unfinished:
                chunk = await queue.get()
                check_served(chunk.finish_reason, chunk.stop_reason)
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            self.engine.cancel(requests)
