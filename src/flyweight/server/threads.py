"""Work that strangers' texts make, off the event loop and with a time limit.

Each piece of work has a thread of its own, because one that is over its time is stopped by an
exception from outside, which may arrive a moment after its end: then it must find nobody else's
work there. Python code (a chat template) stops at its next instruction; a library's own code (a
tokenizer) goes on to its end, and keeps its place among `AT_ONCE` until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from flyweight.server.refusals import QueueFull, Refusal

Result = TypeVar("Result")
AT_ONCE = max(2, os.cpu_count() or 1)


class Stopped(BaseException):
    """Raised in a thread whose time is over; no `except Exception` keeps it."""


class Threads:
    def __init__(self) -> None:
        self.places = asyncio.Semaphore(AT_ONCE)

    async def run(self, work: Callable[[], Result], *, seconds: float, refusal: Refusal) -> Result:
        """Its result or its exception; after so many seconds the refusal, whether it has stopped or
        not.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.places.acquire()
        except TimeoutError:
            raise QueueFull(
                "too many long prompts are being read at once; try again later", retry_after=5
            ) from None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            self.places.release()
            if not future.done():
                set_outcome(outcome)

        def call() -> None:
            try:
                outcome: tuple[Callable[[Any], None], Any] = future.set_result, work()
            except BaseException as error:
                outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the server is gone
                loop.call_soon_threadsafe(finish, *outcome)

        thread = threading.Thread(target=call, daemon=True, name="flyweight-prompt")
        thread.start()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            future.cancel()
            stop(thread)
            raise refusal from None


def stop(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)
        )
