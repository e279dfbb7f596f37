"""An answer as it is made: for a `for` loop and for an `async for` loop alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Self

from flyweight.engine.request import Chunk, Output, Request

Plain = Generator[Chunk, None, None]
Asynchronous = AsyncGenerator[Chunk, None]


class Stream:
    """Chunks of one prompt. Nothing runs before the first is asked for; leaving cancels the rest.

    `for chunk in stream` runs the engine's steps in the caller's thread. `async for` runs them in
    the engine's own thread, and any number of such streams share the batch.
    """

    def __init__(
        self,
        prompt: str | None,
        tokens: list[int],
        plain: Callable[[list[Request]], Plain],
        asynchronous: Callable[[list[Request]], Asynchronous],
    ):
        self.prompt = prompt
        self.tokens = tokens
        self.requests: list[Request] = []  # filled when the first chunk is asked for
        self._start_plain = plain
        self._start_asynchronous = asynchronous
        self._plain: Plain | None = None
        self._asynchronous: Asynchronous | None = None

    @property
    def output(self) -> Output:
        """What has been made so far; after the last chunk, what `generate` would have returned."""
        return Output.of(self.prompt, self.tokens, self.requests)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._plain is None:
            self._plain = self._start_plain(self.requests)
        return next(self._plain)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._asynchronous is None:
            self._asynchronous = self._start_asynchronous(self.requests)
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
