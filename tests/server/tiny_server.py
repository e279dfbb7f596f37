"""A server in a thread of the tests' own process, with its engine in a process of its own, on a
model of a few weights.

The tokenizer has one token per byte, so any text round-trips and characters arrive in pieces; the
chat template knows tools and thinking.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import httpx
import torch
from safetensors.torch import save_file
from tiny_configs import BYTES

from flyweight.engine.byte_level import byte_alphabet
from flyweight.models.presets import PresetWeights
from flyweight.server.engine_client import EngineClient, EngineError
from flyweight.server.messages import Cancel, Delta, Load, Started, Step, Submit
from flyweight.server.run import Server, listen
from flyweight.server.settings import Settings

SPECIALS = ["<|start|>", "<|end|>", "<|pad|>"]
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}<think>\n{% endif "
    "%}{% endif %}"
    "{# an answer may hold <think>…</think> #}"
)
DEADLINE = 120.0  # seconds until a test gives up waiting for what takes milliseconds
START = 600.0  # and for what imports torch and loads a model first


def make_model(
    folder: Path,
    *,
    template: str = TEMPLATE,
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
) -> Path:
    """`special` and `added` are further tokens, at most five: the vocabulary has room for no
    more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    source = PresetWeights(BYTES, "fp32")
    torch.manual_seed(0)
    save_file(
        {name: source.tensor(name).clone().contiguous() for name in source.names()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(BYTES))
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (*SPECIALS, *special)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|start|>",
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "chat_template": template,
            }
        )
    )
    return folder


class Running:
    """A server that answers at `url`; `server.engine` and `server.service` can be looked into."""

    def __init__(self, server: Server, port: int):
        self.server, self.engine, self.service = server, server.engine, server.service
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE)

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == f"flyweight_{name}"
        )

    def idle(self) -> bool:
        """Nothing in flight, and every block is free again."""
        load = self.engine.load
        return (
            self.engine.in_flight == 0
            and not self.engine.tickets
            and load.running == 0
            and load.free_blocks == load.blocks
        )


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        threading.Event().wait(0.005)


class ScriptedEngine(EngineClient):
    """No process and no model: it says what `answers` holds for the last words of a prompt, a few
    characters a step."""

    answers: ClassVar[dict[str, str]] = {}
    submitted: ClassVar[list[Submit]] = []
    endless = "never ends"  # a prompt with these words is answered until it is cancelled

    def start(self) -> None:
        self.connection, self.cancelled = self, set()
        facts = {
            "pid": 0,
            "device": "none",
            "dtype": "none",
            "max_model_len": 4096,
            "vocabulary": 264,
            "blocks": 64,
            "block_size": 16,
            "max_num_seqs": 8,
            "prompt_tokens_beside": 512,
            "prefix_cache": True,
        }
        facts |= {f"{name}_bytes": 0 for name in ("kv", "weight", "workspace", "graph")}
        self.inbox = deque([Started(facts)])
        self._read()

    def read(self):
        return [self.inbox.popleft()]

    def _watch(self) -> None:
        """Nobody to watch."""

    def _disconnect(self) -> None:
        self.connection = None

    def send(self, commands) -> None:
        for command in commands:
            if isinstance(command, Cancel):
                self.cancelled.add(command.key)
            elif isinstance(command, Submit):
                self.answer(command)

    def answer(self, command: Submit) -> None:
        self.submitted.append(command)
        words = bytes(token for token in command.prompt if token < 256).decode(errors="replace")
        text = next(
            (answer for question, answer in self.answers.items() if question in words),
            "plain answer",
        )
        pieces = (
            ["again "] * 10**6
            if self.endless in words
            else [text[i : i + 5] for i in range(0, len(text), 5)]
        )
        limit = command.params.max_tokens or 10**6
        reason = "length" if limit < len(pieces) else "stop"
        for sample in range(command.params.n):
            asyncio.get_running_loop().call_soon(
                self.say, command.key, sample, pieces[:limit], 0, reason
            )

    def say(self, key: int, sample: int, pieces: list[str], at: int, reason: str) -> None:
        if self.connection is None or key in self.cancelled:
            return
        last = at == len(pieces) - 1
        delta = Delta(
            key,
            sample,
            pieces[at],
            [65],
            finish_reason=reason if last else None,
            started=time.perf_counter(),
        )
        self.inbox.append(
            Step(
                time.perf_counter(), [delta], Load(at, int(not last), 0, 64 - 8 * (not last), 64, 0)
            )
        )
        self._read()
        if not last:
            asyncio.get_running_loop().call_later(
                0.002, self.say, key, sample, pieces, at + 1, reason
            )


@contextlib.contextmanager
def serving(
    model: Path | str,
    *,
    wait: bool = True,
    threads: str | None = "1",
    engine_class: type[EngineClient] = EngineClient,
    **options,
) -> Iterator[Running]:
    from flyweight.commands.serve import open_tokenizer

    listener = listen("127.0.0.1", 0)
    root, tokenizer = open_tokenizer(str(model))
    engine = {"device": "cpu", **options.pop("engine", {})}
    others = options.pop("others", ())
    server = Server(
        Settings(model=root, engine=engine, **({"names": ("tiny",)} | options)),
        listener,
        tokenizer=tokenizer,
        signals=False,
        engine_class=engine_class,
        others=others,
    )
    if threads:  # of the engine process: the tiny model is too small to share out
        os.environ["OMP_NUM_THREADS"] = threads

    def run() -> None:
        with contextlib.suppress(EngineError):  # kept in `server.fatal`
            server.run_all()

    running = Running(
        server, listener.getsockname()[1]
    )  # now: a server that ends at once closes its socket
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if wait:
            # A scripted engine is ready before the socket listens.
            wait_for(
                lambda: (server.started and server.engine.state == "ready") or server.fatal,
                "the engine",
                seconds=START,
            )
            assert server.fatal is None
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join(timeout=DEADLINE)
        listener.close()
