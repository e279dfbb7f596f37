"""Work that strangers' texts make, off the event loop and with a time limit.

Threads are kept and used again: starting one holds up the event loop, and a burst has hundreds of
pieces of work. A piece of work that is over its time is stopped by an exception from outside, which
may arrive a moment after its end: then it must find nobody else's work there. So a thread that was
stopped is never used again. Python code (a chat template) stops at its next instruction; a
library's own code (a tokenizer) goes on to its end, and keeps its place among `AT_ONCE` until then.

Few begin at once, since Python runs one thread at a time: of a burst of chats the first are read
while the others wait, where all together would be read only with the last. Work that takes longer
than `BRISK` seconds lets the next begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from flyweight.server.refusals import QueueFull, Refusal

Result = TypeVar("Result")
Job = Callable[[], None]
AT_ONCE = max(2, os.cpu_count() or 1)
BEGINNING = 3  # that were begun within the last `BRISK` seconds
BRISK = 0.02


class Stopped(BaseException):
    """Raised in a thread whose time is over; no `except Exception` keeps it."""


class Worker(threading.Thread):
    """Does one job after the other. The first that is told to stop is its last."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="flyweight-prompt")
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.stopped = False

    def run(self) -> None:
        with contextlib.suppress(Stopped):
            while not self.stopped:
                self.jobs.get()()

    def stop(self) -> None:
        self.stopped = True
        self.jobs.put(lambda: None)  # wakes it, where its work has just ended
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(Stopped)
            )


class Threads:
    """Of an event loop, which alone may call what is here."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(AT_ONCE)
        self.turns = asyncio.Semaphore(BEGINNING)
        self.idle: list[Worker] = []

    async def run(
        self, work: Callable[[], Result], *, seconds: float, refusal: Callable[[], Refusal]
    ) -> Result:
        """Its result or its exception; after so many seconds the refusal, whether it has stopped or
        not.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._take_place()
        except TimeoutError:
            raise QueueFull(
                "too many long prompts are being read at once; try again later", retry_after=5
            ) from None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        worker = self._take()
        over = turn_over = False

        def let_next_begin() -> None:
            nonlocal turn_over
            if not turn_over:
                turn_over = True
                self.turns.release()

        timer = loop.call_later(BRISK, let_next_begin)

        def finish(result: Any, error: BaseException | None) -> None:
            nonlocal over
            if over:
                return
            over = True
            timer.cancel()
            let_next_begin()
            self.places.release()
            if not worker.stopped:
                self.idle.append(worker)
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def tell(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server is gone
                loop.call_soon_threadsafe(finish, result, error)

        def job() -> None:
            try:
                try:
                    result = work()
                except BaseException as error:
                    tell(None, error)
                else:
                    tell(result, None)
            except Stopped as error:  # at any point of the above
                tell(None, error)

        worker.jobs.put(job)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            future.cancel()
            worker.stop()
            raise refusal() from None

    async def _take_place(self) -> None:
        await self.places.acquire()
        try:
            await self.turns.acquire()
        except BaseException:
            self.places.release()
            raise

    def _take(self) -> Worker:
        if self.idle:
            return self.idle.pop()
        worker = Worker()
        worker.start()
        return worker
