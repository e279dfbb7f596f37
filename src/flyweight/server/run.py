"""Listens, loads, serves, drains. SIGTERM and SIGINT let the requests in flight finish; a second
one ends all at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from flyweight.device import pick_device
from flyweight.engine.tokenizer import Tokenizer
from flyweight.errors import OptionError
from flyweight.server.app import create_app
from flyweight.server.connections import bounded_protocol
from flyweight.server.engine_client import EngineClient, EngineError
from flyweight.server.fleet import Fleet
from flyweight.server.logs import log
from flyweight.server.memory_shares import MemoryShares
from flyweight.server.service import Service
from flyweight.server.settings import Settings


class Server(uvicorn.Server):
    """One listening socket and one engine, or one for each model. `run_all` is the whole life of
    it.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        *,
        tokenizer: Tokenizer | None,
        signals: bool = True,
        engine_class: type[EngineClient] = EngineClient,
        others: Sequence[tuple[Settings, Tokenizer | None]] = (),
    ):
        """`others`: further models, with settings and tokenizers of their own."""
        self.settings, self.listener = settings, listener
        self.fatal: EngineError | None = None
        self.signals = signals
        services = [
            self.make_service(one, words, engine_class)
            for one, words in [(settings, tokenizer), *others]
        ]
        self.engines = [service.engine for service in services]
        self.service: Service | Fleet = services[0]
        if others:
            device = str(pick_device(settings.engine.get("device")))
            self.service = Fleet(
                services,
                MemoryShares(len(services), device),
                lazy=settings.lazy,
                most=settings.max_loaded,
                on_fatal=self.give_up,
            )
        self.engine = self.service.engine
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                log_config=None,
                access_log=False,
                server_header=False,
                http=bounded_protocol(settings.connections),
                timeout_graceful_shutdown=max(1, int(settings.drain)),
                lifespan="on",
            )
        )

    def make_service(
        self, settings: Settings, tokenizer: Tokenizer | None, engine_class: type[EngineClient]
    ) -> Service:
        engine = engine_class(
            settings.model,
            settings.engine,
            max_queue=settings.max_queue,
            timeout=settings.timeout,
            patience=settings.engine_timeout,
            on_change=tell,
            on_fatal=self.give_up,
        )
        return Service(settings, engine, tokenizer)

    def run_all(self) -> None:
        """In this thread, on the fastest event loop there is."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.run_until_over())

    async def run_until_over(self) -> None:
        loop = asyncio.get_running_loop()
        if self.signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.on_signal, number)
        await self.serve(sockets=[self.listener])
        if self.fatal:
            raise self.fatal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # ours are set above: uvicorn's would end the process by the signal, even after a clean end
        yield

    def on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.should_exit:
            log("killed", signal=name, abandoned=self.engine.in_flight)
            for engine in self.engines:
                if engine.process is not None:
                    engine.process.kill()
            os._exit(128 + number)
        log(
            "draining",
            signal=name,
            in_flight=self.engine.in_flight,
            at_most_seconds=self.settings.drain,
        )
        for engine in self.engines:
            if engine.state == "ready":
                engine.state = "draining"
        self.should_exit = True

    def give_up(self, error: EngineError) -> None:
        self.fatal = error
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Before the model is loaded: a port that is taken should cost no minutes."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from error
    return listener


def tell(event: str, facts: dict[str, Any]) -> None:
    """The engine's starts and ends, in words."""
    if event != "engine_ready":
        log(event, **facts)
        return
    memory = {
        f"{name}_gb": round(facts[f"{name}_bytes"] / 1e9, 3)
        for name in ("weight", "graph", "workspace", "kv")
    }
    model = {"model": facts["model"]} if "model" in facts else {}
    log(
        event,
        **model,
        pid=facts["pid"],
        device=facts["device"],
        dtype=facts["dtype"],
        **memory,
        kv_tokens=facts["blocks"] * facts["block_size"],
        context=facts["max_model_len"],
        seats=facts["max_num_seqs"],
        prefix_cache=facts["prefix_cache"],
    )
