"""A step that does not come to an end: it is noticed, reported, and its process is replaced."""

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tiny_server import DEADLINE, START, serving, wait_for

from flyweight.kernels import compiler
from flyweight.server import step_watch
from flyweight.server.engine_process import EngineLoop
from flyweight.server.messages import Alive, Hung
from flyweight.server.step_watch import StepWatch, patience_for


class Watched:
    def __init__(self, patience=30.0):
        self.compiled, self.alive, self.hangs = 0, 0, []
        self.watch = StepWatch(
            patience, progress=lambda: self.compiled, on_alive=self.count, on_hang=self.hangs.append
        )
        self.watch.begin()
        self.begun = self.watch.begun

    def count(self):
        self.alive += 1


def test_a_step_within_its_patience_is_a_sign_of_life():
    watched = Watched()
    for seconds in (8, 15, 22, 30):
        watched.watch.look(watched.begun + seconds)
    assert watched.alive == 4 and watched.hangs == []


def test_a_step_beyond_its_patience_is_a_hang():
    watched = Watched()
    watched.watch.look(watched.begun + 31)
    assert watched.alive == 0 and watched.hangs == [pytest.approx(31)]


def test_between_steps_nothing_hangs():
    watched = Watched()
    watched.watch.end()
    watched.watch.look(watched.begun + 1000)
    assert watched.alive == 0 and watched.hangs == []


def test_compiling_is_progress():
    watched = Watched()
    watched.compiled = 1
    watched.watch.look(watched.begun + 31)
    watched.watch.look(watched.begun + 60)
    assert watched.alive == 2 and watched.hangs == []
    watched.watch.look(watched.begun + 62)
    assert watched.hangs == [pytest.approx(31)]


def test_slow_cpus_get_more():
    assert patience_for(30, 0.5) == 30 and patience_for(30, 7) == 70


def test_the_report_says_where_the_threads_stand_and_which_kernels_gave_up(monkeypatch, capfd):
    monkeypatch.setattr("flyweight.kernels.stall.stalled", lambda: ["batch.cu (thread block 7)"])
    assert (
        step_watch.describe(31.4)
        == "a step made no progress for 31 seconds; gave up waiting: batch.cu (thread block 7)"
    )
    assert "test_step_watch.py" in capfd.readouterr().err


def test_compilations_are_counted(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    before = compiler.compilations()
    for _ in range(2):  # the second comes from the cache
        compiler.compile_cubin("token.cu", dict(FP16=0, WIDTH=1000, THREADS=256), "sm_80")
    assert compiler.compilations() == before + 1


def stuck(connection):
    """An engine process whose step never ends, as a kernel that waits for ever makes it."""
    engine = SimpleNamespace(
        busy=True, step=threading.Event().wait, scheduler=SimpleNamespace(pace=None)
    )
    llm = SimpleNamespace(
        engine=engine, device=SimpleNamespace(type="cuda"), pace_prompts=lambda: None
    )
    EngineLoop(llm, connection, patience=0.2).run()


def test_a_process_whose_step_hangs_reports_and_ends():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=stuck, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    heard = []
    with contextlib.suppress(EOFError):
        while ours.poll(START):
            heard.append(ours.recv())
    process.join(DEADLINE)
    assert process.exitcode == step_watch.HUNG
    assert isinstance(heard[-1], Hung) and "a step made no progress" in heard[-1].message
    assert heard[:-1] and set(heard[:-1]) == {Alive()}, "until then it says that it is at work"


def test_requests_of_an_engine_that_hung_get_the_reason_with_503(tiny_folder):
    with (
        serving(tiny_folder, engine={"max_num_seqs": 1}) as running,
        ThreadPoolExecutor(1) as thread,
    ):
        engine, pid = running.engine, running.engine.facts["pid"]
        os.kill(pid, signal.SIGSTOP)
        answer = thread.submit(running.post, "/v1/completions", prompt="hello", max_tokens=2)
        wait_for(lambda: engine.in_flight == 1, "the prompt")

        def end():
            engine._hear(Hung("a step made no progress for 30 seconds"))
            os.kill(pid, signal.SIGKILL)

        running.server.servers[0].get_loop().call_soon_threadsafe(end)
        assert answer.result().status_code == 503
        assert (
            "(a step made no progress for 30 seconds) while it worked on this request"
            in answer.result().text
        )
        wait_for(lambda: engine.state == "ready", "the new engine", seconds=START)
        assert engine.facts["pid"] != pid
