"""Steps of an engine for readers in an event loop: in one thread of the engine's own, always the
same one, because every new thread would start a team of OpenMP workers of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flyweight.engine.core import Engine
from flyweight.engine.request import Chunk


@dataclass(frozen=True)
class Delivery:
    """What a step that an event loop waits for has brought to readers in that loop."""

    loop: asyncio.AbstractEventLoop
    chunks: deque[tuple[asyncio.Queue[Chunk], Chunk]]


class BackgroundSteps:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flyweight-step")
        self._driver: asyncio.Task[None] | None = None
        self._delivery: Delivery | None = None  # of the step that runs in that thread

    def drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep steps running in the background for as long as there is work."""
        if self._driver is not None and not self._driver.done() and self._driver.get_loop() is loop:
            return

        async def run() -> None:
            step = Delivery(loop, deque())
            while self.engine.busy:
                # the engine has told every request that waited for it
                with contextlib.suppress(Exception):
                    await loop.run_in_executor(self._thread, self._step_for, step)
                while step.chunks:
                    queue, chunk = step.chunks.popleft()
                    queue.put_nowait(chunk)

        self._driver = loop.create_task(run())

    def _step_for(self, delivery: Delivery) -> None:
        self._delivery = delivery
        try:
            self.engine.step()
        finally:
            self._delivery = None

    def deliver(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Chunk], chunk: Chunk
    ) -> None:
        """A loop gets all chunks of its own step when the step returns. To be woken for each would
        make its thread and the step's take turns at the interpreter, once for every row of the
        batch.
        """
        delivery = self._delivery
        if delivery is not None and delivery.loop is loop:
            delivery.chunks.append((queue, chunk))
        elif not loop.is_closed():  # else the reader is gone, and its request about to be cancelled
            loop.call_soon_threadsafe(queue.put_nowait, chunk)
