"""An answer as it is made: for a `for` loop and for an `async for` loop alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Self

from flyweight.engine.driver import Driver
from flyweight.engine.prompts import Prepared
from flyweight.engine.request import Chunk, Output, Request


class Stream:
    """Chunks of one prompt. Nothing runs before the first is asked for; leaving cancels the rest.

    `for chunk in stream` runs the engine's steps in the caller's thread. `async for` runs them in
    the engine's own thread, and any number of such streams share the batch.
    """

    def __init__(self, prepared: Prepared, driver: Driver):
        self.prompt = prepared.text
        self.tokens = prepared.tokens
        self.requests: list[Request] = []  # filled when the first chunk is asked for
        self._prepared = prepared
        self._driver = driver
        self._plain: Generator[Chunk, None, None] | None = None
        self._asynchronous: AsyncGenerator[Chunk, None] | None = None

    @property
    def output(self) -> Output:
        """What has been made so far; after the last chunk, what `generate` would have returned."""
        return Output.of(self.prompt, self.tokens, self.requests)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._plain is None:
            self._plain = self._driver.chunks(self._prepared, self.requests)
        return next(self._plain)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._asynchronous is None:
            self._asynchronous = self._driver.chunks_async(self._prepared, self.requests)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
