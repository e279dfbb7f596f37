"""Servers that are started here, measured over HTTP and stopped again: each is a command line and
the rest is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from flyweight.backends.base import EngineOptions, Limits, need
from flyweight.backends.http import Client, HttpError
from flyweight.backends.openai import OpenAI
from flyweight.clock import clock
from flyweight.errors import ResultError

PATIENCE = 900  # seconds: the first start of a large model may compile for minutes


class Server(OpenAI):
    """A subclass says `command`; the model it serves is named after the folder."""

    package: ClassVar[str | None] = None
    ready: ClassVar[str] = "/health"  # answers 200 once the model is loaded

    def __init__(self, model: str, options: EngineOptions):
        if self.package:
            need(self.package)
        self.model, self.options, self.exact = model, options, True
        self.kv_dtype: str | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, folder: str, limits: Limits, port: int) -> list[str]:
        raise NotImplementedError

    def start(self, limits: Limits) -> None:
        if self.process is not None:
            return
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with tempfile.NamedTemporaryFile(
            prefix=f"{self.name}-", suffix=".log", delete=False
        ) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                self.command(self.model, limits, self.port), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            asyncio.run(self._wait())
            super().start(limits)
        except BaseException:
            self.stop()
            raise

    async def _wait(self) -> None:
        """Until it says that it is well."""
        begin = clock()
        while clock() - begin < PATIENCE:
            if self.process is None or self.process.poll() is not None:
                raise ResultError(
                    f"{self.name} ended before it answered: {last_line(self.log)} (all "
                    f"of it: {self.log})"
                )
            with contextlib.suppress(
                OSError, HttpError, ConnectionError, asyncio.IncompleteReadError
            ):
                client = Client(self.url)
                await client.text(self.ready)
                return client.close()
            await asyncio.sleep(0.25)
        raise ResultError(f"{self.name} did not answer within {PATIENCE} s; see {self.log}")

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


class NativeServer(Server):
    """This package's own server, as a process of its own."""

    name = "native-server"
    ready = "/ready"

    def command(self, folder: str, limits: Limits, port: int) -> list[str]:
        settings = {
            "port": port,
            "device": self.options.device,
            "dtype": self.options.dtype,
            "max-model-len": limits.context,
            "max-num-seqs": limits.batch,
            "no-prefix-cache": True,
            **{key.replace("_", "-"): value for key, value in self.options.extra.items()},
        }
        return [sys.executable, "-m", "flyweight", "serve", folder, *flags(settings)]


def flags(settings: Mapping[str, Any]) -> list[str]:
    """--key value; True is the flag alone, None and False nothing."""
    found: list[str] = []
    for key, value in settings.items():
        if value is not None and value is not False:
            found += (
                [f"--{key}"]
                if value is True
                else [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
            )
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_line(path: Path) -> str:
    lines = [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1].strip()[:200] if lines else "it said nothing"
