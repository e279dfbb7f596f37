"""The engine's own process: lists of commands in, one message out per step.

The step loop must not share an interpreter lock with the formatting of events: 64 streams at 5 ms a
step are 12,800 events a second. So this process does nothing but step. One thread reads commands,
because a server that waits for room in the socket while the engine waits for the same would stand
still for ever; the commands themselves are carried out between steps, by the thread that steps.
Grammars are compiled in threads of their own, since that may take seconds: requests join the
others when their grammar is ready, and those of one grammar join them together.

It ends when the server's end of the socket closes, however that happened. SIGINT and SIGTERM are
the server's business: a terminal or a supervisor sends them to the whole group, and the requests in
flight are still to be finished.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flyweight import garbage
from flyweight.engine.grammar import Grammars
from flyweight.errors import FlyweightError, RequestError
from flyweight.server.messages import (
    FAILED,
    REFUSED,
    Alive,
    Cancel,
    CannotStart,
    Delta,
    Hung,
    Load,
    ResetPrefixCache,
    Started,
    Step,
    Submit,
)
from flyweight.server.schemas import Schemas
from flyweight.server.step_watch import StepWatch, describe, end_process, patience_for

if TYPE_CHECKING:
    from flyweight.engine.embedding import Embedder
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import Chunk, Request


def run_engine(
    connection: Connection, model: str, options: dict[str, Any], patience: float = 30.0
) -> None:
    """Where the process begins. `patience`: seconds that a step may take without progress."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warnings.formatwarning = lambda message, *_, **__: f"flyweight: {message}\n"
    from flyweight.engine.llm import LLM

    try:
        llm = LLM(model, **options)
        begin = time.perf_counter()
        llm.warm_up()
        warm_up_seconds = time.perf_counter() - begin
        garbage.settle()
    except FlyweightError as error:
        connection.send(CannotStart(str(error)))
        return
    # A GPU compiles while it warms up, which says nothing of how long its steps take.
    slowness = warm_up_seconds if llm.device.type == "cpu" else 0.0
    connection.send(Started(facts(llm) | {"warm_up_seconds": slowness}))
    EngineLoop(llm, connection, patience=patience_for(patience, slowness)).run()


def kernels_compiled() -> int:
    from flyweight.kernels.compiler import compilations

    return compilations()


def facts(llm: LLM) -> dict[str, Any]:
    engine, pool, memory = llm.engine, llm.engine.pool, llm.memory()
    return {
        "pid": os.getpid(),
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "max_model_len": engine.max_model_len,
        "vocabulary": engine.vocabulary,
        "blocks": pool.blocks,
        "block_size": pool.block_size,
        "max_num_seqs": engine.scheduler.max_num_seqs,
        "prompt_tokens_beside": engine.scheduler.prompt_tokens_beside,
        "kv_bytes": memory.kv,
        "weight_bytes": memory.weights,
        "workspace_bytes": memory.workspace,
        "graph_bytes": memory.graphs,
        "prefix_cache": engine.prefix_cache,
    }


class EngineLoop:
    def __init__(self, llm: LLM, connection: Connection, *, patience: float = 30.0):
        self.llm = llm
        self.engine = llm.engine
        self.connection = connection
        self.sending = threading.Lock()
        self.watch = StepWatch(
            patience, progress=kernels_compiled, on_alive=self.say_alive, on_hang=self.die
        )
        self.requests: dict[int, list[Request]] = {}  # by the server's key
        self.commands: deque[Any] = deque()
        self.schemas = Schemas(self.make_grammars, self.take_in)
        self.texts: deque[Submit] = deque()  # that want a vector
        self.deltas: list[tuple[Any, ...]] = []
        self.wake = threading.Event()
        llm.pace_prompts()
        self.steps = 0
        self.preemptions = 0  # of the requests that are over
        self.closed = False

    def run(self) -> None:
        threading.Thread(target=self.receive, daemon=True, name="flyweight-commands").start()
        self.watch.start()
        while not self.closed:
            if not self.engine.busy:
                self.rest()
            self.wake.clear()
            self.watch.begin()
            self.turn()
            self.watch.end()
        self.watch.stop()

    def rest(self) -> None:
        """Until there is something to do."""
        while not self.wake.is_set():
            self.watch.begin()
            prepared = self.engine.rest()
            self.watch.end()
            if not prepared:
                self.wake.wait()

    def send(self, message: Any) -> None:
        """From the loop's thread or the watch's: half a message of one must not follow half of
        another's.
        """
        with self.sending:
            self.connection.send(message)

    def say_alive(self) -> None:
        if not self.sending.acquire(blocking=False):  # the loop is saying something itself
            return
        with contextlib.suppress(OSError):
            self.connection.send(Alive())
        self.sending.release()

    def die(self, seconds: float) -> None:
        """A step hangs: report, and end the process."""
        message = describe(seconds)
        if self.sending.acquire(timeout=1.0):
            with contextlib.suppress(OSError):
                self.connection.send(Hung(message))
        end_process()

    def receive(self) -> None:
        while not self.closed:
            try:
                received = self.connection.recv()
            except (EOFError, OSError):
                received = [None]
            ready = [command for command in received if not self.schemas.hold(command)]
            if ready:
                self.take_in(ready)
            if None in ready:
                return

    def take_in(self, commands: Sequence[Any]) -> None:
        """From any thread: they are carried out between steps."""
        self.commands.extend(commands)
        self.wake.set()

    def make_grammars(self) -> Grammars:
        if self.llm.tokenizer is None:
            raise RequestError("a model without a tokenizer cannot follow a JSON schema")
        return Grammars(self.llm.tokenizer.inner, self.engine.vocabulary, self.engine.end_ids)

    def turn(self) -> None:
        """Carry out what was asked for, run a step, tell what came of it."""
        while self.commands:
            self.obey(self.commands.popleft())
        if self.closed:
            return
        if self.texts:
            self.embed()
        try:
            self.steps += self.engine.step() > 0
        # every request of the step was told; go on with those to come if the device still works
        except Exception:
            traceback.print_exc()
            self.check_device()
        deltas, self.deltas = self.deltas, []
        try:
            self.send(Step(time.perf_counter(), deltas, self.load()))
        except OSError:  # the server is gone
            self.closed = True

    def obey(self, command: Any) -> None:
        if command is None:
            self.closed = True
        elif isinstance(command, Submit) and command.pooling:
            self.texts.append(command)
        elif isinstance(command, Submit):
            self.submit(command)
        elif isinstance(command, Cancel):
            self.schemas.cancel(command.key)
            self.engine.cancel(self.requests.pop(command.key, []))
            self.texts = deque(text for text in self.texts if text.key != command.key)
        elif isinstance(command, ResetPrefixCache):
            self.engine.pool.forget()

    def submit(self, command: Submit) -> None:
        if self.schemas.was_cancelled(command.key):
            return
        params = command.params.with_defaults(self.llm.sampling_defaults)

        def listen(chunk: Chunk) -> None:
            self.tell(command.key, chunk)

        try:
            constraint = self.schemas.take(command.key)
            self.requests[command.key] = self.engine.submit(
                command.prompt,
                params,
                listener=listen,
                constraint=constraint,
                cache_salt=command.cache_salt,
                adapter=command.adapter,
            )
        except FlyweightError as error:
            self.deltas.append(
                Delta(command.key, 0, "", [], finish_reason=REFUSED, stop_reason=str(error))
            )
        except Exception as error:  # ours, not the client's: it must not end the requests of others
            traceback.print_exc()
            self.deltas.append(
                Delta(command.key, 0, "", [], finish_reason=FAILED, stop_reason=repr(error))
            )

    @functools.cached_property
    def embedder(self) -> Embedder:
        from flyweight.engine.embedding import Embedder

        return Embedder(self.llm)

    def embed(self) -> None:
        """One pass of texts; those that are left wait for the next turn, so that answers go on
        between.
        """
        pace = self.engine.scheduler.pace if self.engine.scheduler.running else None
        most = pace.tokens(self.embedder.most_tokens) if pace else None  # answers wait for the pass
        count = self.embedder.take([text.prompt for text in self.texts], most=most)
        texts = [self.texts.popleft() for _ in range(count)]
        for text in list(texts):
            try:
                self.embedder.check(text.prompt)
            except FlyweightError as error:
                texts.remove(text)
                self.deltas.append(
                    Delta(text.key, 0, "", [], finish_reason=REFUSED, stop_reason=str(error))
                )
        try:
            vectors = (
                self.embedder.embed([text.prompt for text in texts], texts[0].pooling or "mean")
                if texts
                else []
            )
            self.deltas += [
                Delta(text.key, 0, "", [], finish_reason="stop", embedding=vector)
                for text, vector in zip(texts, vectors, strict=True)
            ]
        except Exception as error:
            traceback.print_exc()
            self.deltas += [
                Delta(text.key, 0, "", [], finish_reason=FAILED, stop_reason=repr(error))
                for text in texts
            ]
            self.check_device()
        if self.texts:
            self.wake.set()

    def tell(self, key: int, chunk: Chunk) -> None:
        requests = self.requests.get(key)
        if requests is None:  # cancelled: nobody listens
            return
        request = requests[chunk.index]
        first = request.generated == len(chunk.token_ids)
        if not (first or request.finished or chunk.logprobs):
            self.deltas.append((key, chunk.index, chunk.text, chunk.token_ids))
            return
        if request.finished and (error := getattr(request.constraint, "error", None)):
            chunk = replace(chunk, finish_reason=FAILED, stop_reason=error)
        delta = Delta(
            key,
            chunk.index,
            chunk.text,
            chunk.token_ids,
            chunk.logprobs,
            chunk.finish_reason,
            chunk.stop_reason,
            *(
                (request.started, request.cached or 0, request.prompt_logprobs or None)
                if first
                else ()
            ),
        )
        if request.finished and request.drafted:
            delta = delta._replace(drafted=request.drafted, accepted=request.accepted)
        self.deltas.append(tuple(delta))
        if request.finished:
            self.preemptions += request.preemptions
            if all(other.finished for other in requests):
                del self.requests[key]

    def load(self) -> Load:
        scheduler, pool, guessing = self.engine.scheduler, self.engine.pool, self.engine.speculator
        guesses = (guessing.drafted, guessing.accepted) if guessing else (0, 0)
        return Load(
            self.steps,
            len(scheduler.running),
            len(scheduler.waiting),
            pool.available,
            pool.blocks,
            self.preemptions,
            *guesses,
        )

    def check_device(self) -> None:
        """Some CUDA errors stay for as long as the process lives: end it, and the server starts
        another.
        """
        import torch

        if self.llm.device.type != "cuda":
            return
        from flyweight.kernels.stall import explain

        try:
            torch.cuda.synchronize(self.llm.device)
        except Exception as error:
            with contextlib.suppress(OSError):
                self.send(Hung(" ".join(str(explain(error)).split("\n")[0].split())))
            raise
