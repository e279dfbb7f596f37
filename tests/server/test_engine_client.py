"""The server's side of its engine: one that hangs, one that cannot be started again, and a socket
that never blocks."""

import asyncio
import multiprocessing
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
from tiny_server import DEADLINE, START, serving, wait_for

from flyweight.engine.request import SamplingParams
from flyweight.server import engine_client, gathering
from flyweight.server.engine_client import BEATS, MOST_DEATHS, EngineClient
from flyweight.server.messages import Cancel, CannotStart
from flyweight.server.pipe import EnginePipe

PROMPTS = [[65] * 4000] * 60  # pickled, more than a socket holds


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    pipe = EnginePipe(ours)
    yield pipe, theirs
    pipe.close()
    theirs.close()


def test_sending_to_an_engine_that_does_not_read_returns_at_once(pipe):
    ours, theirs = pipe
    for key in range(20):
        ours.send((key, b"x" * 200_000))
    assert [theirs.recv()[0] for _ in range(20)] == list(range(20)), (
        "nothing is lost, and the order is kept"
    )


def test_half_a_message_is_waited_for_without_blocking(pipe):
    ours, theirs = pipe
    data = bytes(ForkingPickler.dumps(Cancel(7)))
    framed = struct.pack("!i", len(data)) + data
    assert ours.read() == []
    for part in (framed[:2], framed[2:9]):
        os.write(theirs.fileno(), part)
        assert ours.read() == []
    os.write(theirs.fileno(), framed[9:] + framed + framed[:3])
    assert ours.read() == [Cancel(7), Cancel(7)]
    theirs.close()
    with pytest.raises(EOFError):
        ours.read()


def test_closing_ends_a_send_that_waits():
    ours, theirs = multiprocessing.Pipe()
    before = set(threading.enumerate())
    pipe = EnginePipe(ours)
    (sender,) = set(threading.enumerate()) - before
    pipe.send(b"x" * 10_000_000)
    pipe.close()
    sender.join(timeout=DEADLINE)
    assert not sender.is_alive()
    theirs.close()


class Failing(EngineClient):
    """One that was ready once, and whose further starts end as `ends` says."""

    def __init__(self, *ends):
        super().__init__(
            "model", {}, max_queue=1, timeout=1, on_change=self.note, on_fatal=self.end
        )
        self.state, self.ends, self.events, self.delays = "ready", list(ends), [], []
        self.over = asyncio.Event()

    def note(self, event, facts):
        self.events.append((event, facts.get("cause")))

    def end(self, error):
        self.error = error
        self.over.set()

    def _spawn(self):
        end = self.ends.pop(0)
        if isinstance(end, OSError):
            raise end
        self._hear(end)
        self._failed(
            f"the engine process ended ({self.complaint})"
        )  # what its closed socket leads to


def run(client_of):
    async def go():
        client = client_of()
        client._failed("the engine process ended (killed by SIGKILL)")
        states = {client.state}
        async with asyncio.timeout(DEADLINE):
            await client.over.wait()
        return client, states

    return asyncio.run(go())


def test_a_restart_that_fails_is_tried_again_and_then_ends_the_server(monkeypatch):
    monkeypatch.setattr(engine_client, "BACK_OFF", (0.0, 0.001, 0.002))
    ends = [OSError(24, "Too many open files"), CannotStart("no memory"), CannotStart("no memory")]
    client, states = run(lambda: Failing(*ends))
    assert (
        states == {"restarting"}
        and client.state == "stopped"
        and not client.available
        and not client.ends
    )
    assert [cause for _, cause in client.events] == [
        "the engine process ended (killed by SIGKILL)",
        "the engine process cannot be started ([Errno 24] Too many open files)",
        *["the engine process ended (no memory)"] * 2,
    ]
    assert str(client.error) == "the engine process ended (no memory), 4 times within 600 seconds"
    assert client.restarts == MOST_DEATHS


def test_a_first_start_that_fails_is_not_tried_again():
    async def go():
        client = Failing(OSError(12, "Cannot allocate memory"))
        client.state = "loading"
        client.start()
        return client

    client = asyncio.run(go())
    assert client.state == "stopped" and "Cannot allocate memory) while it loaded the model" in str(
        client.error
    )


def test_an_engine_that_hangs_is_replaced_and_the_server_answers_all_the_while(tiny_folder):
    with (
        serving(tiny_folder, max_queue=100, engine={"max_num_seqs": 1}) as running,
        ThreadPoolExecutor(1) as thread,
    ):
        engine, pid = running.engine, running.engine.facts["pid"]

        def ask_standing_engine():
            os.kill(pid, signal.SIGSTOP)
            answer = thread.submit(running.post, "/v1/completions", prompt=PROMPTS, max_tokens=1)
            wait_for(lambda: engine.in_flight == len(PROMPTS), "the prompts")
            return answer

        short = ask_standing_engine()
        os.kill(pid, signal.SIGCONT)
        assert short.result().status_code == 200, (
            "what the socket could not hold at once has arrived"
        )
        waiting = ask_standing_engine()
        for path in ("/health", "/ready", "/metrics"):
            assert running.client.get(path).status_code == 200
        silent, engine.silent = engine.silent, BEATS + 1  # what so many seconds of silence come to
        assert silent <= 1, "an engine that has just spoken is not counted silent"

        def look():
            engine.timer.cancel()
            engine._watch()

        loop_of(running).call_soon_threadsafe(look)
        answer = waiting.result()
        assert (
            answer.status_code == 503 and "no sign of life for" in answer.json()["error"]["message"]
        )
        assert running.client.get("/ready").status_code == 503
        wait_for(lambda: engine.state == "ready", "the new engine", seconds=START)
        assert engine.facts["pid"] != pid and not os.path.exists(f"/proc/{pid}")
        assert running.post("/v1/completions", prompt="hello", max_tokens=2).status_code == 200


def loop_of(running):
    return running.server.servers[0].get_loop()


def test_an_idle_engine_answers_when_it_is_asked_for_a_sign_of_life(tiny):
    engine = tiny.engine
    wait_for(tiny.idle, "an idle engine")

    def look():
        engine.timer.cancel()
        engine.silent = BEATS
        engine._watch()

    loop_of(tiny).call_soon_threadsafe(look)
    wait_for(lambda: engine.silent == 0, "its answer")
    assert engine.available and engine.restarts == 0


class Gathering:
    """A client whose engine is ready, and what it sends."""

    def __init__(self, *, in_flight=0, step=512):
        self.client = EngineClient(
            "none", {}, max_queue=8, timeout=60.0, on_change=print, on_fatal=print
        )
        self.client.facts = {"max_model_len": 4096, "max_num_seqs": 8, "prompt_tokens_beside": step}
        self.client.state, self.client.in_flight, self.sent = "ready", in_flight, []
        self.client.connection = SimpleNamespace(send=self.sent.append)

    def ask(self, tokens=2):
        ticket = self.client.submit([[1] * tokens], SamplingParams())
        ticket.timer.cancel()
        return ticket

    @property
    def sizes(self):
        return [len(commands) for commands in self.sent]


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


def test_requests_of_one_turn_of_the_event_loop_go_to_the_engine_together():
    async def go():
        engine = Gathering()
        first, *_ = [engine.ask() for _ in range(3)]
        await turns()
        engine.client.release(first)
        engine.client.release(engine.ask())
        return [[type(command).__name__ for command in commands] for commands in engine.sent]

    assert asyncio.run(go()) == [["Submit"] * 3, ["Cancel"], ["Submit"], ["Cancel"]], (
        "none is told of a request that it does not know"
    )


@pytest.mark.parametrize("busy", [False, True])
def test_an_idle_engine_waits_for_requests_that_are_being_read(monkeypatch, busy):
    monkeypatch.setattr(gathering, "LONGEST", 60.0)

    async def go():
        engine = Gathering(in_flight=int(busy))
        with engine.client.gathering.coming():
            engine.ask()
            await turns()
            assert engine.sizes == [1] * busy
        engine.ask()
        await turns()
        return engine.sizes

    assert asyncio.run(go()) == ([1, 1] if busy else [2])


def test_an_idle_engine_waits_while_every_turn_brings_a_request(monkeypatch):
    monkeypatch.setattr(gathering, "LONGEST", 60.0)

    async def go():
        engine = Gathering()
        for _ in range(4):
            engine.ask()
            await turns(1)
        assert engine.sizes == []
        await turns()
        return engine.sizes

    assert asyncio.run(go()) == [4]


def test_an_engine_begins_when_there_is_enough_for_a_step_or_time_is_up(monkeypatch):
    async def go():
        engine = Gathering(step=20)
        with engine.client.gathering.coming():
            for _ in range(3):
                engine.ask(tokens=4)
            assert engine.sizes == [3], "others are still being read"
        late = Gathering()
        monkeypatch.setattr(gathering, "LONGEST", 0.0)
        with late.client.gathering.coming():
            late.ask()
            await turns()
            return late.sizes

    assert asyncio.run(go()) == [1]
