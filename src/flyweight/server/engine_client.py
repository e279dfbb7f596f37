"""The server's side of the engine process: starts it, hands out tickets, and starts it again when
it dies.

A dead engine fails the requests it had and no others: the listening socket, the tokenizer and the
waiting clients are all in this process, so starting again here costs one loading of the model,
where leaving it to a supervisor would also drop every connection. An engine that keeps dying, or
cannot be started again, is another matter: after `MOST_DEATHS` within `DEATHS_WITHIN` seconds the
server ends with a clear message, because then a person or a supervisor has to decide.

An engine that hangs counts as dead. It says something after every step, during a long one
(`step_watch.py`, which reports and ends a process whose step makes no progress), and answers a
`Ping` between steps when it has nothing to do: silence for `patience` seconds is a hang of the
whole process, which is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from flyweight.engine.request import SamplingParams
from flyweight.errors import FlyweightError
from flyweight.server.engine_process import run_engine
from flyweight.server.gathering import Gathering
from flyweight.server.messages import (
    Cancel,
    CannotStart,
    Hung,
    Load,
    Ping,
    ResetPrefixCache,
    Started,
    Step,
    Submit,
)
from flyweight.server.pipe import EnginePipe
from flyweight.server.refusals import BadRequest, ContextTooLong, EngineAway, QueueFull, TookTooLong
from flyweight.server.step_watch import patience_for
from flyweight.server.ticket import Ticket

MOST_DEATHS, DEATHS_WITHIN = 3, 600.0
# seconds before the engine is started again, by how often it has died lately
BACK_OFF = (0.0, 1.0, 5.0)
LONGEST_RETRY = 60  # seconds
# looks at the engine within its patience; one alone may be late because this process was held up
# itself
BEATS = 4
ENDING = 5.0  # seconds for a process to end by itself
REAPING = 2.0  # seconds that a killed process has to be gone


class EngineError(FlyweightError):
    """The engine cannot be started, or keeps dying."""


class EngineClient:
    """All of it runs on the event loop; `on_change(event, facts)` hears of starts and deaths,
    `on_fatal` of the end.
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        *,
        max_queue: int,
        timeout: float,
        patience: float = 30.0,
        on_change: Callable[[str, dict[str, Any]], None],
        on_fatal: Callable[[EngineError], None],
    ):
        self.model, self.options = model, options
        self.max_queue, self.timeout, self.patience = max_queue, timeout, patience
        self.on_change, self.on_fatal = on_change, on_fatal
        self.state = "loading"  # loading, ready, restarting, draining, stopped
        self.facts: dict[str, Any] = {}
        self.load = Load(0, 0, 0, 0, 0, 0)
        self.load_changed = asyncio.Event()
        self.restarts = 0
        self.in_flight = 0  # samples that are not over
        self.seconds = 1.0  # a moving average of how long a sample takes
        # by key: the ticket, and which of its prompts
        self.tickets: dict[int, tuple[Ticket, int]] = {}
        self.keys = itertools.count()
        self.gathering = Gathering(
            self._send_all,
            in_flight=lambda: self.in_flight,
            step_tokens=lambda: self.facts["prompt_tokens_beside"],
        )
        self.deaths: deque[float] = deque()
        self.process: BaseProcess | None = None
        self.connection: EnginePipe | None = None
        self.silent = 0  # looks at the engine since it last said something
        self.complaint: str | None = None  # what is known of its end beside the exit code
        self.timer: asyncio.TimerHandle | None = None  # the next look, or the next start

    @property
    def available(self) -> bool:
        """Whether a request would be taken: what /health and /ready say."""
        return self.state == "ready" and self.connection is not None

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        self.complaint = None
        try:
            self._spawn()
        except OSError as error:  # no descriptors, no memory, no processes
            self._failed(f"the engine process cannot be started ({error})")

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with theirs:  # closed here, so that the socket closes with the process
            self.process = context.Process(
                target=run_engine,
                args=(theirs, self.model, self.options, self.patience),
                name="flyweight-engine",
                daemon=True,
            )
            try:
                self.process.start()
            except OSError:
                ours.close()
                self.process = None
                raise
        self.connection = EnginePipe(ours)
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._read)
        # uvloop has just made it non-blocking, and the sending thread must wait where there is no
        # room.
        os.set_blocking(self.connection.fileno(), True)

    def stop(self) -> None:
        """At once; draining has been waited for before."""
        loaded = self.state in ("ready", "draining")
        self.state = "stopped"
        self._disconnect()
        if self.process is not None:
            # it ends by itself between two steps, but not while it loads
            self._end(ENDING if loaded else 0)

    async def unload(self) -> None:
        """Let go of the process and its memory, while others go on; `start` makes another."""
        self._disconnect()
        if self.process is not None:
            await asyncio.to_thread(self._end)

    def disconnect(self) -> None:
        """Hear no more of a process that ends by itself."""
        self._disconnect()

    def _disconnect(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.gathering.drop()
        if self.connection is not None:
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self.connection.close()
            self.connection = None

    def _end(self, seconds: float = ENDING) -> None:
        """Its socket is closed: wait for the process to end by itself, and help it where it does
        not.
        """
        assert self.process is not None
        self.process.join(timeout=seconds)
        self._reap()

    def _reap(self) -> None:
        assert self.process is not None
        if self.process.is_alive():
            self.process.kill()
            # longer than that it is the kernel's, and nothing can be done
            self.process.join(timeout=REAPING)

    def _read(self) -> None:
        assert self.connection is not None
        try:
            messages = self.connection.read()
        except (EOFError, OSError):
            self._died()
            return
        self.silent = 0
        for message in messages:
            self._hear(message)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Started):
            self.facts = message.facts
            self.load = Load(0, 0, 0, message.facts["blocks"], message.facts["blocks"], 0)
            self.state = "ready" if self.state in ("loading", "restarting") else self.state
            self.on_change("engine_ready", message.facts)
            self._watch()
        elif isinstance(message, CannotStart):
            if self.state == "loading":
                self._give_up(message.message)
            # it ends now, and may find what it needs the next time
            self.complaint = message.message
        elif isinstance(message, Hung):
            self.complaint = message.message  # it ends now

    def _watch(self) -> None:
        """The engine has been silent for so many looks: ask it, and after `BEATS` of them take it
        for dead.
        """
        patience = patience_for(self.patience, self.facts.get("warm_up_seconds", 0.0))
        if self.silent > BEATS:
            self.complaint = f"no sign of life for {patience:g} seconds, so it was killed"
            self._died()
            return
        if self.silent:
            self._send(Ping())
        self.silent += 1
        self.timer = asyncio.get_running_loop().call_later(patience / BEATS, self._watch)

    def _died(self) -> None:
        assert self.process is not None
        self._disconnect()
        if self.state == "stopped":
            return
        if self.complaint is None:
            self.process.join(timeout=REAPING)  # its socket is closed, so it ends
        self._reap()
        code = self.process.exitcode or 0
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._failed(f"the engine process ended ({self.complaint or cause})")

    def _failed(self, what: str) -> None:
        """There is no engine: start another, after a while if the last one was gone soon, or give
        up.
        """
        now = time.monotonic()
        self.deaths.append(now)
        while now - self.deaths[0] > DEATHS_WITHIN:
            self.deaths.popleft()
        first = self.state == "loading"
        draining = self.state == "draining"  # then nothing is left to be done by another
        again = not first and not draining and len(self.deaths) <= MOST_DEATHS
        then = "it is being started again" if again else "it is not started again"
        for ticket, _ in list(self.tickets.values()):
            ticket.fail(
                EngineAway(f"{what} while it worked on this request; {then}", retry_after=5)
            )
        self.on_change(
            "engine_died", {"cause": what, "pid": self.process.pid if self.process else None}
        )
        if draining:
            return
        if not again:
            self._give_up(
                what
                + (
                    " while it loaded the model"
                    if first
                    else f", {len(self.deaths)} times within {DEATHS_WITHIN:g} seconds"
                )
            )
            return
        self.restarts += 1
        self.state = "restarting"
        delay = BACK_OFF[len(self.deaths) - 1]
        if delay:
            self.timer = asyncio.get_running_loop().call_later(delay, self.start)
        else:
            self.start()

    def _give_up(self, message: str) -> None:
        self.state = "stopped"
        self.on_fatal(EngineError(message))

    # -- requests ----------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Most samples that may run or wait at once."""
        return self.facts["max_num_seqs"] + self.max_queue

    def check_room(self, prompts: int, n: int) -> int:
        """How many samples that makes; raises a Refusal where there is no engine or no room for
        them.
        """
        if self.state not in ("ready", "draining") or self.connection is None:
            raise EngineAway(f"the engine is {self.state}; try again later", retry_after=5)
        wanted = prompts * n
        if wanted > self.capacity:
            raise BadRequest(
                f"{prompts} prompts of n = {n} are {wanted} samples, but this server holds at most "
                f"{self.capacity} at once",
                param="n",
            )
        if self.in_flight + wanted > self.capacity:
            raise QueueFull(
                f"the queue is full: {self.in_flight} samples run or wait and {wanted} more would "
                f"be over the limit of {self.capacity}",
                retry_after=self.retry_after(),
            )
        return wanted

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        schema: str | None = None,
        pooling: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Ticket:
        """Raises a Refusal where there is no engine, no room, or no context long enough."""
        wanted = self.check_room(len(prompts), params.n)
        for prompt in prompts:
            self._check_length(len(prompt), params.max_tokens)
        ticket = Ticket(prompts, params.n)
        ticket.timer = asyncio.get_running_loop().call_later(
            self.timeout,
            ticket.fail,
            TookTooLong(
                f"the answer was not finished within this server's limit of {self.timeout:g} "
                "seconds"
            ),
        )
        self.in_flight += wanted
        for index, prompt in enumerate(prompts):
            key = next(self.keys)
            self.tickets[key] = ticket, index
            ticket.keys.append(key)
            self.gathering.add(
                Submit(
                    key,
                    prompt,
                    params,
                    schema=schema,
                    pooling=pooling,
                    cache_salt=cache_salt,
                    adapter=adapter,
                )
            )
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Its reader is done or gone: whatever still runs is cancelled."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        for key in ticket.keys:
            if self.tickets.pop(key, None) is not None:
                self._send(Cancel(key))
        self.in_flight -= ticket.unfinished
        ticket.unfinished = 0

    def reset_prefix_cache(self) -> None:
        if self.state != "ready":
            raise EngineAway(f"the engine is {self.state}; try again later", retry_after=5)
        self._send(ResetPrefixCache())

    def retry_after(self) -> int:
        """Seconds until the queue has likely moved."""
        waiting = max(1, self.in_flight - self.facts["max_num_seqs"])
        return min(LONGEST_RETRY, math.ceil(self.seconds * waiting / self.facts["max_num_seqs"]))

    def _check_length(self, prompt: int, answer: int | None) -> None:
        context = self.facts["max_model_len"]
        if prompt + (answer or 1) > context:
            asked = f" and the answer asks for {answer} more" if answer else ""
            raise ContextTooLong(
                f"the prompt has {prompt} tokens{asked}, but this model's context holds {context}",
                param="max_tokens" if answer and prompt < context else "prompt",
            )

    def _send_all(self, commands: list[Submit]) -> None:
        if self.connection is not None:
            self.connection.send(commands)

    def _send(self, command: Any) -> None:
        self.gathering.flush()  # which it may be about
        if self.connection is not None:
            self.connection.send([command])

    def _deliver(self, step: Step) -> None:
        self.load = step.load
        self.load_changed.set()
        for delta in step.deltas:
            found = self.tickets.get(delta.key)
            if found is None:  # cancelled meanwhile
                continue
            ticket, prompt = found
            before = ticket.unfinished
            ticket.put(prompt, delta, step.time)
            self.in_flight -= before - ticket.unfinished
            if delta.finish_reason is not None:
                self.seconds += 0.1 * (step.time - ticket.arrival - self.seconds)
                samples = ticket.samples[prompt * ticket.n : (prompt + 1) * ticket.n]
                if all(sample.finish_reason for sample in samples):
                    del self.tickets[delta.key]
