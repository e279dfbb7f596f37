"""The load: conversations sent to a target at their times (open loop) or as fast as it answers
(closed loop).

One coroutine a conversation, on the clock of the event loop. A request is due at its scheduled
arrival, whether or not the client or the server keeps up, and TTFT counts from there; how late the
client sent it is recorded as its lag. With several processes each has its share of the requests and
one clock, which Linux shares between processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from flyweight.backends.base import Backend
from flyweight.backends.http import HttpError
from flyweight.backends.openai import Endpoint, Event, Prompt, Reply
from flyweight.bench.datasets import Conversation
from flyweight.clock import Answer, clock
from flyweight.errors import FlyweightError

START_UP = 3.0  # seconds that client processes get to import and connect


class Target(Protocol):
    async def ask(self, prompt: Prompt, output: int) -> Reply: ...


@dataclass(frozen=True)
class Record:
    """One request: its answer, or the kind of its failure."""

    index: int
    turn: int
    answer: Answer
    input: int | None
    output: int
    source: str | None = None
    cached: int | None = None
    end: float | None = None
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def e2e(self) -> float:
        return (
            self.answer.last if self.answer.chunks else self.end or self.answer.arrival
        ) - self.answer.arrival

    @property
    def lag(self) -> float:
        return max(0.0, (self.answer.sent or self.answer.arrival) - self.answer.arrival)


class EngineTarget:
    """The native engine in this process: requests share its batch."""

    def __init__(self, llm: Any, choice: Mapping[str, Any]):
        self.llm, self.choice = llm, choice
        llm.pace_prompts()
        llm.warm_up()  # as a server does before its first request

    async def ask(self, prompt: Prompt, output: int) -> Reply:
        from flyweight.engine.request import SamplingParams

        now = asyncio.get_running_loop().time
        reply = Reply(now())
        params = SamplingParams(
            max_tokens=output, min_tokens=output, ignore_eos=True, **self.choice
        )
        async for chunk in self.llm.stream(prompt, params):
            reply.events.append(Event(now(), chunk.text, tuple(chunk.token_ids)))
            reply.finish_reason = chunk.finish_reason
        return reply


class SerialTarget:
    """An engine that answers one request at a time; the others wait, as they would behind it."""

    def __init__(self, backend: Backend):
        self.backend, self.turn = backend, asyncio.Lock()

    async def ask(self, prompt: Prompt, output: int) -> Reply:
        reply = Reply(asyncio.get_running_loop().time())
        async with self.turn:
            run = await asyncio.to_thread(self.backend.generate, [prompt], output)  # type: ignore[list-item]
        # the loop's clock may have another zero
        shift = asyncio.get_running_loop().time() - clock()
        ids = iter(run.answers[0].token_ids)
        reply.events = [
            Event(when + shift, "", tuple(next(ids) for _ in range(count)))
            for when, count in run.answers[0].chunks
        ]
        return reply


async def run_load(
    target: Target,
    conversations: Sequence[Conversation],
    *,
    concurrency: int | None = None,
    begin: float | None = None,
    timeout: float = 600.0,
) -> list[Record]:
    """All requests, in the order they ended. Without arrivals `concurrency` conversations are kept
    going.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time() if begin is None else begin
    gate = asyncio.Semaphore(concurrency or len(conversations) or 1)
    records: list[Record] = []

    async def open_loop(index: int, talk: Conversation) -> None:
        due = begin + (talk.arrival or 0.0)
        await asyncio.sleep(max(0.0, due - loop.time()))
        async with gate:
            await hold(index, talk, due)

    async def hold(index: int, talk: Conversation, due: float) -> None:
        history: list[Any] = []
        for number, turn in enumerate(talk.turns):
            prompt = (
                [*history, *turn.prompt]
                if not isinstance(turn.prompt, str)
                else [*history, {"role": "user", "content": turn.prompt}]
            )
            record, reply = await ask(
                target, prompt, turn.output, index=index, turn=number, due=due, timeout=timeout
            )
            records.append(record)
            if reply is None:
                return
            history = (
                [*prompt, {"role": "assistant", "content": reply.text}]
                if isinstance(turn.prompt, str)
                else [*prompt, *reply.token_ids]
            )
            due = loop.time()

    async def closed_loop(waiting: Any) -> None:
        for index, talk in waiting:
            await hold(index, talk, loop.time())

    if any(talk.arrival is not None for talk in conversations):
        await asyncio.gather(*(open_loop(index, talk) for index, talk in enumerate(conversations)))
    else:
        await asyncio.sleep(max(0.0, begin - loop.time()))
        waiting = iter(enumerate(conversations))
        await asyncio.gather(*(closed_loop(waiting) for _ in range(concurrency or 1)))
    return records


async def ask(
    target: Target, prompt: Any, output: int, *, index: int, turn: int, due: float, timeout: float
) -> tuple[Record, Reply | None]:
    loop = asyncio.get_running_loop()
    sent, length = loop.time(), len(prompt) if prompt and isinstance(prompt[0], int) else None

    def failed(kind: str, detail: object = "") -> tuple[Record, None]:
        return Record(
            index,
            turn,
            Answer(due, (), sent=sent),
            length,
            output,
            end=loop.time(),
            error=kind,
            detail=str(detail)[:200],
        ), None

    try:
        async with asyncio.timeout(timeout):
            reply = await target.ask(prompt, output)
    except TimeoutError:
        return failed("timeout")
    except HttpError as error:
        return failed(error.kind, error)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return failed("connection", error)
    except FlyweightError as error:
        return failed("refused", error)
    source, chunks = reply.chunks()
    if not chunks:
        return failed("no tokens")
    counted = reply.usage.get("prompt_tokens")
    return Record(
        index,
        turn,
        Answer(due, chunks, reply.token_ids, sent=reply.sent),
        counted if length is None else length,
        output,
        source,
        reply.cached_tokens,
        loop.time(),
    ), reply


@dataclass(frozen=True)
class Share:
    """What one client process has to do."""

    url: str
    model: str
    exact: bool
    conversations: tuple[Conversation, ...]
    concurrency: int | None
    begin: float
    timeout: float
    choice: Mapping[str, Any] | None


def run_share(share: Share) -> list[Record]:
    async def main() -> list[Record]:
        endpoint = Endpoint(share.url, share.model, sampling=share.choice, exact=share.exact)
        try:
            return await run_load(
                endpoint,
                share.conversations,
                concurrency=share.concurrency,
                begin=share.begin,
                timeout=share.timeout,
            )
        finally:
            endpoint.client.close()

    return asyncio.run(main())


def run_processes(
    url: str,
    model: str,
    conversations: Sequence[Conversation],
    *,
    processes: int,
    concurrency: int | None = None,
    exact: bool = True,
    timeout: float = 600.0,
    choice: Mapping[str, Any] | None = None,
) -> list[Record]:
    """The load from `processes` processes, requests dealt out in turn."""
    begin = time.monotonic() + START_UP * (processes > 1)  # the clock of event loops
    each = None if concurrency is None else -(-concurrency // processes)
    shares = [
        Share(
            url, model, exact, tuple(conversations[number::processes]), each, begin, timeout, choice
        )
        for number in range(processes)
    ]
    if processes == 1:
        return run_share(shares[0])
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [record for records in pool.map(run_share, shares) for record in records]
