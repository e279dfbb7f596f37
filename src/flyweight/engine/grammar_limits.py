"""What a grammar of a stranger may cost, and the processes that find out before the engine compiles
it.

A schema of twenty bytes can take a minute and gigabytes to compile, and a compilation cannot be
interrupted. So each grammar is first compiled in a process of its own (`grammar_trial.py`), under
limits of time and memory. What gets through is compiled again where it is needed: that takes as
long once more, but is known to be short.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyweight.errors import RequestError

PROGRAM = Path(__file__).with_name("grammar_trial.py")
PATIENCE = 10  # times the limit: a busy machine may give the trial a tenth of a core
STARTING = 20.0  # seconds beside it for the interpreter to start
LEAST_BYTES = 4096  # of a grammar in the cache, whatever was measured


@dataclass(frozen=True)
class GrammarLimits:
    seconds: float = 2.0  # of processor time, for one compilation
    megabytes: int = 64  # that one compilation may take at its peak
    cached: int = 64  # grammars that are kept
    cached_bytes: int = 256 << 20  # and the memory all of them may hold


class TooCostly(RequestError):
    """A grammar beyond the limits."""


class Trials:
    """`measure(grammar)` from any thread: the bytes the compiled grammar holds, or why there will
    be none.
    """

    def __init__(self, limits: GrammarLimits, *, vocabulary: int = 0, special: Sequence[str] = ()):
        """Grammars may speak of tokens: by numbers below `vocabulary`, or by the names of `special`
        ones.
        """
        self.limits = limits
        self.tokens = json.dumps({"vocabulary": vocabulary, "special": list(special)})
        self.idle: list[subprocess.Popen[str]] = []  # one for each that was ever needed at once
        # Python keeps a process that nobody has waited for, its pipes open, until it ends itself.
        weakref.finalize(self, end_all, self.idle)

    def measure(self, grammar: str) -> int:
        """Raises RequestError with the compiler's own words, or TooCostly."""
        process = self._take()
        asked = {
            "grammar": grammar,
            "seconds": self.limits.seconds,
            "megabytes": self.limits.megabytes,
        }
        timer = threading.Timer(PATIENCE * self.limits.seconds + STARTING, process.kill)
        timer.start()
        answer: dict[str, Any] = {}
        try:
            # it has died, perhaps in the middle of its line
            with contextlib.suppress(OSError, ValueError):
                print(json.dumps(asked), file=process.stdin, flush=True)
                answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        finally:
            timer.cancel()
            if not answer:
                end(process)
        if not answer:
            raise TooCostly(
                f"it cannot be compiled within {self.limits.seconds:g} s and "
                f"{self.limits.megabytes} MB; simplify it "
                "(multipleOf, patterns, long enums and large counts cost most)"
            )
        self.idle.append(process)
        if answer["error"]:
            raise RequestError(answer["error"].strip().splitlines()[0])
        return max(LEAST_BYTES, len(grammar), answer["bytes"])

    def _take(self) -> subprocess.Popen[str]:
        with contextlib.suppress(IndexError):
            while (process := self.idle.pop()).poll() is not None:
                end(process)
            return process
        # One arena, because each takes 64 MB of addresses, which are what the limit counts.
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        )
        with contextlib.suppress(OSError):  # it has died already: whoever asks it finds out
            print(self.tokens, file=process.stdin, flush=True)
        return process


def end_all(processes: list[subprocess.Popen[str]]) -> None:
    while processes:
        end(processes.pop())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not written goes nowhere
            pipe.close()  # type: ignore[union-attr]


class GrammarCache:
    """What was compiled or refused, by its text; the longest unused go first. Bounded in number and
    bytes.
    """

    def __init__(self, limits: GrammarLimits):
        self.limits = limits
        self.kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.bytes = 0
        self.lock = threading.Lock()

    def get(self, grammar: str) -> Any:
        with self.lock:
            if grammar not in self.kept:
                return None
            self.kept.move_to_end(grammar)
            return self.kept[grammar][0]

    def put(self, grammar: str, value: Any, size: int) -> None:
        with self.lock:
            _, before = self.kept.pop(grammar, (None, 0))
            if size > self.limits.cached_bytes:
                self.bytes -= before
                return
            self.kept[grammar] = value, size
            self.bytes += size - before
            while len(self.kept) > self.limits.cached or self.bytes > self.limits.cached_bytes:
                _, (_, freed) = self.kept.popitem(last=False)
                self.bytes -= freed
