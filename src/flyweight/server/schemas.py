"""Requests whose answers must fit a grammar: they join the others when it is compiled.

That may take seconds, so it is done in threads of its own. Requests of one grammar wait for one
compilation and join the others together; one whose grammar is known does not wait at all, because
agents send the same tools with every request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flyweight.engine.grammar import Constraints, Grammars
from flyweight.errors import RequestError
from flyweight.server.messages import Submit

COMPILERS = 2  # threads: one costly schema does not hold up the next


class Schemas:
    """`hold` is called by the thread that reads commands, the others by the one that steps;
    `on_ready` hears, from any thread, of requests that need not wait any longer.
    """

    def __init__(
        self, make_grammars: Callable[[], Grammars], on_ready: Callable[[Sequence[Submit]], None]
    ):
        self.make_grammars, self.on_ready = make_grammars, on_ready
        self.grammars: Grammars | None = None  # made by the first request that needs them
        self.making = threading.Lock()
        self.lock = threading.Lock()
        self.waiting: dict[str, list[Submit]] = {}  # by their schema
        self.keys: set[int] = set()  # of requests that wait, or did and were not seen yet
        self.cancelled: set[int] = set()  # of those, the ones that nobody waits for any more
        self.outcomes: dict[int, Constraints | Exception] = {}
        self.compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="flyweight-schemas")

    def hold(self, command: Any) -> bool:
        """Whether the command is a request that has to wait: then `on_ready` hears of it later."""
        if not isinstance(command, Submit) or command.schema is None:
            return False
        if (known := self._known(command.schema)) is not None:
            self.outcomes[command.key] = known
            return False
        with self.lock:
            self.keys.add(command.key)
            waiting = self.waiting.setdefault(command.schema, [])
            waiting.append(command)
        if len(waiting) == 1:
            self.compilers.submit(self._compile, command.schema)
        return True

    def cancel(self, key: int) -> None:
        if key in self.keys:
            self.cancelled.add(key)

    def was_cancelled(self, key: int) -> bool:
        """Of a request that is ready: then it is forgotten here."""
        self.keys.discard(key)
        if key not in self.cancelled:
            return False
        self.cancelled.remove(key)
        self.outcomes.pop(key, None)
        return True

    def take(self, key: int) -> Constraints | None:
        """What the answer must fit, if anything. Raises what is wrong with it."""
        outcome = self.outcomes.pop(key, None)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _known(self, schema: str) -> Constraints | Exception | None:
        try:
            return self.grammars.known(schema) if self.grammars is not None else None
        except RequestError as error:
            return error

    def _compile(self, schema: str) -> None:
        with self.lock:
            wanted = any(command.key not in self.cancelled for command in self.waiting[schema])
            unwanted = [] if wanted else self.waiting.pop(schema)
        if not wanted:
            self.on_ready(unwanted)
            return
        outcome: Constraints | Exception
        try:
            with self.making:
                self.grammars = self.grammars or self.make_grammars()
            outcome = self.grammars(schema)
        except Exception as error:  # the schema is a stranger's
            outcome = error
        with self.lock:
            commands = self.waiting.pop(schema)
        self.outcomes |= {command.key: outcome for command in commands}
        self.on_ready(commands)
