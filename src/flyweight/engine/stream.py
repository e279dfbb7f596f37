"""An answer as it is made: for a `for` loop and for an `async for` loop alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Self

from flyweight.engine.request import Chunk


class Stream:
    """Chunks of one prompt. Nothing runs before the first is asked for; leaving the loop cancels the rest.

    `for chunk in stream` runs the engine's steps in the caller's thread. `async for chunk in stream` runs
    them in the engine's own thread, and any number of such streams share the batch.
    """

    def __init__(self, plain: Callable[[], Generator[Chunk, None, None]],
                 asynchronous: Callable[[], AsyncGenerator[Chunk, None]]):
        self._start_plain = plain
        self._start_asynchronous = asynchronous
        self._plain: Generator[Chunk, None, None] | None = None
        self._asynchronous: AsyncGenerator[Chunk, None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._plain is None:
            self._plain = self._start_plain()
        return next(self._plain)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._asynchronous is None:
            self._asynchronous = self._start_asynchronous()
        return await anext(self._asynchronous)

    def close(self) -> None:
        """Cancel what is still to come of a `for` loop."""
        if self._plain is not None:
            self._plain.close()

    async def aclose(self) -> None:
        """Cancel what is still to come of an `async for` loop."""
        if self._asynchronous is not None:
            await self._asynchronous.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()
