"""Several models behind one address: each has an engine process of its own, loaded at the start or
when it is first asked for, and unloaded again, the one used longest ago first, when another needs
its memory.

Towards the routes a fleet is a `Service`: it finds the model's own by the name in the request,
waits until that is loaded, and lets it answer. A model is never unloaded while it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flyweight.errors import unknown
from flyweight.server.counts import LONGEST_NAME
from flyweight.server.engine_client import EngineClient, EngineError
from flyweight.server.logs import log
from flyweight.server.memory_shares import MemoryShares
from flyweight.server.messages import Load
from flyweight.server.metrics import Metrics
from flyweight.server.protocol import ChatRequest, CompletionRequest
from flyweight.server.refusals import EngineAway, QueueFull, UnknownModel
from flyweight.server.service import Service
from flyweight.server.settings import Settings

UNLOADED = "unloaded"
READY = ("ready", "draining")
# seconds until a model that could not be loaded, with all the memory there is, is tried again
BROKEN_FOR = 60.0


class Member:
    """One model of a fleet."""

    def __init__(self, service: Service):
        self.service = service
        self.engine: EngineClient = service.engine
        self.engine.state = UNLOADED
        self.used = 0  # which use of the fleet its last one was
        self.holds = 0  # requests on their way to the engine
        self.error: EngineError | None = None  # why the last load failed
        self.broken_until = 0.0

    @property
    def loaded(self) -> bool:
        return self.engine.state not in (UNLOADED, "stopped")

    @property
    def idle(self) -> bool:
        return self.engine.in_flight == 0 and self.holds == 0


class Fleet:
    def __init__(
        self,
        services: Sequence[Service],
        shares: MemoryShares,
        *,
        lazy: bool = False,
        most: int | None = None,
        on_fatal: Callable[[EngineError], None],
    ):
        """`lazy`: nothing is loaded at the start. `most`: models in memory at once, whatever room
        there is.
        """
        self.members = [Member(service) for service in services]
        self.shares = shares
        self.lazy = lazy
        self.most = most or len(self.members)
        self.on_fatal = on_fatal
        self.by_name = {
            name: member for member in self.members for name in member.service.settings.served
        }
        self.settings: Settings = services[0].settings
        self.engine = Engines([service.engine for service in services])
        self.metrics = Metrics(self.engine)  # type: ignore[arg-type]
        self.uses = itertools.count(1)
        self.changed = asyncio.Event()  # an engine is ready or gone, or an answer is finished
        self.loading = asyncio.Lock()  # one at a time: two would both find the same memory free
        self.starting: asyncio.Task[None] | None = None
        for member in self.members:
            self._listen(member)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    # -- what the routes ask for -------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        if name is not None and name not in self.by_name:
            raise UnknownModel(unknown("model", name[:LONGEST_NAME], self.by_name), param="model")
        return name or self.names[0]

    def of(self, name: str | None) -> Service:
        """The model's own service, loaded or not."""
        return self.by_name[self.check_model(name)].service

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        async with self.using(body.model) as service:
            return await service.complete(request, body)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        async with self.using(body.model) as service:
            return await service.chat(request, body)

    async def converse(
        self, request: Request, body: ChatRequest, *arguments: Any, **options: Any
    ) -> Response:
        async with self.using(body.model) as service:
            return await service.converse(request, body, *arguments, **options)

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Service]:
        """The model's service, loaded, and kept so until its engine has the request."""
        member = self.by_name[self.check_model(name)]
        member.holds += 1
        try:
            await self._ready_in_time(member)
            yield member.service
        finally:
            member.holds -= 1
            member.used = next(self.uses)
            self.changed.set()

    # -- loading and unloading ---------------------------------------------------------------------

    def start(self) -> None:
        if not self.lazy:
            self.starting = asyncio.create_task(self._load_first())

    def stop(self) -> None:
        if self.starting is not None:
            self.starting.cancel()
        self.engine.stop()

    async def _load_first(self) -> None:
        """As many as there is room for; one that cannot be loaded at all is a mistake in the
        command.
        """
        for member in self.members[: self.most]:
            loaded = [other for other in self.members if other.loaded]
            if loaded and not self.shares.fits(
                member.service.settings, [other.service.settings for other in loaded]
            ):
                return
            try:
                await self._ready(member)
            except EngineAway:
                self.on_fatal(
                    member.error or EngineError(f"{member.service.settings.model} cannot be loaded")
                )
                return

    async def _ready_in_time(self, member: Member) -> None:
        if member.engine.state not in READY and member.holds > self.settings.max_queue:
            raise QueueFull(
                f"{member.holds - 1} requests wait for this model to be loaded, which is this "
                "server's limit",
                retry_after=5,
            )
        try:
            async with asyncio.timeout(self.settings.timeout):
                await self._ready(member)
        except TimeoutError:
            raise EngineAway(
                f"{member.service.settings.served[0]} could not be loaded within this server's "
                f"limit of {self.settings.timeout:g} seconds",
                retry_after=30,
            ) from None

    async def _ready(self, member: Member) -> None:
        while member.engine.state not in READY:
            if member.engine.state == "stopped":
                raise EngineAway("the server is stopping", retry_after=5)
            if member.loaded:  # it is loading, or starting again
                await self._wait()
                continue
            async with self.loading:
                if not member.loaded:
                    await self._load(member)

    async def _load(self, member: Member) -> None:
        now = asyncio.get_running_loop().time()
        if member.error is not None and now < member.broken_until:
            raise EngineAway(
                f"the model cannot be loaded: {member.error}", retry_after=int(BROKEN_FOR)
            )
        whole = False
        while True:
            await self._make_room(member)
            others = [other.service.settings for other in self.members if other.loaded]
            member.engine.options = self.shares.grant(member.service.settings, others, whole=whole)
            if await self._attempt(member):
                return
            if others:  # perhaps it was the memory
                await self._unload_one(member)
            elif not whole:
                whole = True
            else:
                member.broken_until = now + BROKEN_FOR
                raise EngineAway(
                    f"the model cannot be loaded: {member.error}", retry_after=int(BROKEN_FOR)
                )

    async def _attempt(self, member: Member) -> bool:
        member.error = None
        member.engine.state = "loading"
        member.engine.start()
        while member.engine.state == "loading":
            await self._wait()
        return member.error is None

    async def _make_room(self, member: Member) -> None:
        while loaded := [other for other in self.members if other.loaded and other is not member]:
            settings = [other.service.settings for other in loaded]
            if len(loaded) < self.most and self.shares.fits(member.service.settings, settings):
                return
            await self._unload_one(member)

    async def _unload_one(self, wanted: Member) -> None:
        """The one that was used longest ago, as soon as one is idle."""
        while True:
            idle = [
                other
                for other in self.members
                if other.loaded and other.idle and other is not wanted
            ]
            if idle:
                break
            await self._wait()
        victim = min(idle, key=lambda other: other.used)
        log(
            "unloading",
            model=victim.service.settings.served[0],
            for_model=wanted.service.settings.served[0],
        )
        victim.engine.state = UNLOADED
        await victim.engine.unload()

    async def _wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    def _listen(self, member: Member) -> None:
        """Hear of the engine's life before whoever else does."""
        before = member.engine.on_change

        def on_change(event: str, facts: dict[str, Any]) -> None:
            before(event, {"model": member.service.settings.served[0], **facts})
            self.changed.set()

        def on_fatal(error: EngineError) -> None:
            member.error = error
            member.engine.state = UNLOADED
            member.engine.disconnect()
            log("cannot_load", model=member.service.settings.served[0], error=str(error))
            self.changed.set()

        member.engine.on_change = on_change
        member.engine.on_fatal = on_fatal
        member.service.when_finished = self.changed.set
        member.service.metrics = self.metrics


class Engines:
    """All engines of a fleet as one, for the probes and the metrics."""

    def __init__(self, engines: Sequence[EngineClient]):
        self.engines = engines

    @property
    def state(self) -> str:
        """ready as long as one is, or none has been asked for."""
        states = [engine.state for engine in self.engines]
        return next(
            (state for state in ("draining", "ready", "restarting", "loading") if state in states),
            "ready",
        )

    @property
    def available(self) -> bool:
        return self.state == "ready"

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.engines)

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines)

    @property
    def load(self) -> Load:
        loads = [engine.load for engine in self.engines if engine.state != UNLOADED]
        return Load(*map(sum, zip(*loads, strict=True))) if loads else Load(0, 0, 0, 0, 0, 0)

    @property
    def facts(self) -> dict[str, Any]:
        return self.engines[0].facts

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()

    def reset_prefix_cache(self) -> None:
        for engine in self.engines:
            if engine.state == "ready":
                engine.reset_prefix_cache()
