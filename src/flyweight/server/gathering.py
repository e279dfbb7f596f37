"""Requests that come at once go to the engine together: it computes their prompts in one step. Sent
one by one, the first would be computed alone, and the others would wait for its steps.

An engine at work gets what there is. One that has nothing to do waits for requests that are being
read, and for those that come turn by turn of the event loop, until the first step is worth while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from flyweight.server.messages import Submit

LONGEST = 0.03  # seconds that the first request of a burst waits for the others


class Gathering:
    def __init__(
        self,
        send: Callable[[list[Submit]], None],
        *,
        in_flight: Callable[[], int],
        step_tokens: Callable[[], int],
    ):
        """`in_flight`: samples that are not over, the gathered ones among them; `step_tokens`: what
        a step takes of prompts beside answers.
        """
        self._send = send
        self._in_flight = in_flight
        self._step_tokens = step_tokens
        self._gathered: list[Submit] = []
        self._tokens = 0
        self._since = 0.0
        self._preparing = 0  # requests that are being read

    def add(self, command: Submit) -> None:
        if not self._gathered:
            self._since = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._turn_is_over)
        self._gathered.append(command)
        self._tokens += len(command.prompt)
        if self._is_enough():
            self.flush()

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """While a request is read, before it is submitted."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
            asyncio.get_running_loop().call_soon(self._turn_is_over)

    def flush(self) -> None:
        gathered = self._gathered
        self.drop()
        if gathered:
            self._send(gathered)

    def drop(self) -> None:
        """There is no engine that could get them."""
        self._gathered = []
        self._tokens = 0

    def _is_enough(self) -> bool:
        """Whether nothing is gained by waiting: the first step has half of its tokens, which keep
        the device at work while the others are read, or time is up.
        """
        return (
            self._tokens >= self._step_tokens() // 2 or time.perf_counter() - self._since > LONGEST
        )

    def _turn_is_over(self, known: int = 0) -> None:
        """Of the event loop, in whose last turn `known` requests were there."""
        count = len(self._gathered)
        if not count:
            return
        idle = self._in_flight() <= sum(command.params.n for command in self._gathered)
        loop = asyncio.get_running_loop()
        if not idle or self._is_enough():
            self.flush()
        elif count > known:
            loop.call_soon(self._turn_is_over, count)
        elif self._preparing:
            loop.call_later(LONGEST, self._turn_is_over)
        else:
            self.flush()
