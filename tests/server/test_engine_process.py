"""The engine's side of the pipe, in this process: what it says for what it is told."""

import multiprocessing
import signal
import threading

import pytest
from tiny_server import DEADLINE, ScriptedEngine, serving, wait_for

from flyweight.engine.kv_cache import BlockPool
from flyweight.engine.llm import LLM
from flyweight.engine.pace import Pace
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.scheduler import Scheduler
from flyweight.server.engine_process import EngineLoop, facts, run_engine
from flyweight.server.messages import (
    FAILED,
    REFUSED,
    Cancel,
    CannotStart,
    ResetPrefixCache,
    Step,
    Submit,
)
from flyweight.server.schemas import Schemas

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(tiny_folder, device="cpu", max_num_seqs=2)


@pytest.fixture
def loop(llm):
    """One that is turned by hand; `say` gives a command and the Step that came of it."""
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(llm, theirs)

    def say(*commands) -> Step:
        loop.commands.extend(commands)
        loop.turn()
        assert ours.poll(DEADLINE)
        return ours.recv()

    loop.say, loop.ours = say, ours
    yield loop
    llm.engine.cancel([*llm.engine.scheduler.running, *llm.engine.scheduler.waiting])
    assert llm.engine.pool.available == llm.engine.pool.blocks


def test_every_step_is_one_message_with_all_its_tokens(loop):
    step = loop.say(Submit(7, PROMPT, GREEDY), Submit(8, PROMPT[:3], GREEDY))
    assert sorted(delta.key for delta in step.deltas) == [7, 8] and step.load.running == 2
    assert all(delta.started is not None and len(delta.token_ids) == 1 for delta in step.deltas)
    later = [loop.say() for _ in range(5)]
    assert all(len(step.deltas) == 2 for step in later) and later[-1].load.running == 0
    assert {delta.finish_reason for delta in later[-1].deltas} == {"length"} and later[0].deltas[
        0
    ].started is None
    assert later[-1].time > step.time and later[-1].load.steps == 6 and not loop.requests


def test_a_cancelled_request_has_given_its_blocks_back_at_the_next_message(loop):
    held = loop.say(Submit(1, PROMPT, GREEDY)).load
    assert held.free_blocks < held.blocks
    step = loop.say(Cancel(1))
    assert (
        step.load.free_blocks == step.load.blocks
        and step.deltas == []
        and step.load.steps == held.steps
    )


def test_what_is_refused_is_said_and_disturbs_nobody(loop):
    step = loop.say(Submit(1, [9999], GREEDY), Submit(2, PROMPT, GREEDY))
    assert [(delta.key, delta.finish_reason) for delta in step.deltas] == [(1, REFUSED), (2, None)]
    assert "outside the vocabulary" in step.deltas[0].stop_reason
    loop.say(Cancel(2))


def test_a_failing_step_ends_its_requests_and_not_the_loop(loop, monkeypatch, capsys):
    loop.say(Submit(1, PROMPT, GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(loop.engine.runner, "launch", lambda *_, **__: 1 / 0)
        step = loop.say()
    assert [(delta.key, delta.finish_reason) for delta in step.deltas] == [
        (1, FAILED)
    ] and "zero" in step.deltas[0].stop_reason
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert loop.say(Submit(2, PROMPT, GREEDY)).deltas[0].token_ids
    loop.say(Cancel(2))


def test_cached_tokens_are_told_until_the_cache_is_reset(loop):
    def cached(key):
        found = loop.say(Submit(key, PROMPT, GREEDY)).deltas[0].cached
        loop.say(Cancel(key))
        return found

    loop.say(ResetPrefixCache())
    assert [cached(1), cached(2)] == [0, 32]
    loop.say(ResetPrefixCache())
    assert cached(3) == 0


def test_it_sleeps_until_told_something_and_ends_when_the_server_is_gone(loop):
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    loop.ours.send([Submit(5, PROMPT, GREEDY)])
    deltas = []
    while len(deltas) < 6:
        assert loop.ours.poll(DEADLINE)
        deltas += loop.ours.recv().deltas
    assert deltas[-1].finish_reason == "length"
    loop.ours.close()  # what a killed server leaves behind
    thread.join(timeout=DEADLINE)
    assert not thread.is_alive()


def test_warm_up_leaves_nothing_behind(llm):
    llm.warm_up()
    assert (
        llm.engine.pool.available == llm.engine.pool.blocks
        and not llm.engine.pool.block_of
        and not llm.engine.busy
    )
    # keys and values of one layer
    assert (
        facts(llm)["kv_bytes"]
        == llm.engine.pool.blocks * 16 * 2 * 16 * llm.decoder.cache_dtype.itemsize
    )


def test_an_engine_that_cannot_start_says_why(tiny_folder, monkeypatch):
    said = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("warnings.formatwarning", None)
    run_engine(
        type("Connection", (), {"send": said.append}),
        str(tiny_folder),
        {"max_model_len": 5000, "device": "cpu"},
    )
    assert said == [
        CannotStart(
            "max_model_len 5000 is more than the 4096 tokens that this model is made for: give at "
            "most so many, or leave it out"
        )
    ]


def test_an_engine_that_cannot_start_ends_the_server_with_its_message(tiny_folder):
    class Hopeless(ScriptedEngine):
        def read(self):
            return [CannotStart("no such device")]

    with serving(tiny_folder, wait=False, engine_class=Hopeless) as running:
        wait_for(lambda: running.server.fatal, "the end")
    assert str(running.server.fatal) == "no such device"


class SlowGrammars:
    """None is known before `done` is set."""

    def __init__(self):
        self.done, self.compiled = threading.Event(), []

    def known(self, schema):
        return (lambda: None) if self.done.is_set() else None

    def __call__(self, schema):
        self.done.wait(DEADLINE)
        self.compiled.append(schema)
        return lambda: None


def read_keys(loop, count):
    """Of the requests that the next so many deltas are of."""
    deltas = []
    while len(deltas) < count:
        assert loop.ours.poll(DEADLINE)
        deltas += loop.ours.recv().deltas
    return {delta.key for delta in deltas}


def test_a_schema_that_compiles_long_holds_up_only_its_own_request(loop):
    """And one that is cancelled meanwhile never runs."""
    schemas = loop.schemas
    grammars = schemas.grammars = SlowGrammars()
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    loop.ours.send([Submit(1, PROMPT, GREEDY, schema="slow")])
    loop.ours.send([Submit(2, PROMPT, GREEDY, schema="slow too")])
    loop.ours.send([Submit(3, PROMPT, GREEDY)])
    loop.ours.send([Cancel(2)])
    assert read_keys(loop, 6) == {3}
    wait_for(lambda: schemas.cancelled == {2}, "the cancellation")
    grammars.done.set()
    assert read_keys(loop, 6) == {1}
    wait_for(
        lambda: not schemas.keys and not schemas.cancelled and not schemas.outcomes,
        "the second schema",
    )
    loop.ours.close()
    thread.join(timeout=DEADLINE)
    assert not thread.is_alive() and not loop.requests


def test_requests_of_one_schema_are_ready_together_and_a_known_one_at_once():
    ready = []
    schemas = Schemas(SlowGrammars, ready.append)
    grammars = schemas.grammars = SlowGrammars()
    asked = [Submit(key, PROMPT, GREEDY, schema="same") for key in range(3)]
    assert all(schemas.hold(command) for command in asked) and not schemas.hold(
        Submit(9, PROMPT, GREEDY)
    )
    grammars.done.set()
    wait_for(lambda: ready, "the schema")
    assert ready == [asked] and grammars.compiled == ["same"]
    assert not schemas.hold(Submit(3, PROMPT, GREEDY, schema="same"))
    assert all(not schemas.was_cancelled(key) and schemas.take(key) for key in range(4))
    assert not schemas.keys and not schemas.outcomes and not schemas.waiting


def test_the_loop_learns_what_prompts_cost_beside_answers(loop, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flyweight.engine.core.time.perf_counter", lambda: now[0])
    launch = loop.engine.runner.launch

    def timed(works, launched=None):
        now[0] += 0.1 + 0.01 * sum(work.known for work in works if work.known > 1)
        return launch(works, launched)

    monkeypatch.setattr(loop.engine.runner, "launch", timed)
    pace = loop.engine.scheduler.pace
    loop.say(Submit(1, PROMPT, GREEDY))
    loop.say()
    loop.say(Submit(2, PROMPT[:30], GREEDY))
    assert pace.answer_seconds == pytest.approx(0.1)
    assert pace.token_seconds > 0.01 and pace.tokens(512) == 32
    loop.say(Cancel(1), Cancel(2))


def test_guesses_are_told_with_the_last_token_and_in_the_load(loop, monkeypatch):
    from flyweight.engine.speculation.lengths import Fixed
    from flyweight.engine.speculation.ngram import NgramDrafter
    from flyweight.engine.speculation.speculator import Speculator

    monkeypatch.setattr(loop.engine, "speculator", Speculator(NgramDrafter(), Fixed(3)))
    answers = []
    for key in (1, 2):  # the second is guessed from the first
        steps = [
            loop.say(
                Submit(key, PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            )
        ]
        while steps[-1].load.running:
            steps.append(loop.say())
        deltas = [delta for step in steps for delta in step.deltas]
        answers.append([token for delta in deltas for token in delta.token_ids])
    assert answers[0] == answers[1] and len(deltas) < 10
    assert deltas[-1].accepted > 3 and deltas[-1].drafted >= deltas[-1].accepted
    assert steps[-1].load.accepted >= deltas[-1].accepted


def test_a_long_prompt_beside_chats_is_bounded_by_time():
    """30,000 tokens beside ten chats, by a clock of our own: no step takes more than three times
    one of answers alone, however long a token of a prompt takes on this machine."""
    scheduler = Scheduler(
        BlockPool(4000, 16), max_num_seqs=16, max_num_batched_tokens=512, prompt_tokens_beside=512
    )
    scheduler.pace = Pace()
    answer_seconds, token_seconds = 0.033, 0.0007

    def step():
        works = scheduler.schedule()
        answers = sum(work.count == 1 for work in works)
        prompts = sum(work.count for work in works) - answers
        seconds = answer_seconds * (answers > 0) + token_seconds * prompts
        scheduler.pace.learn(seconds, prompt_tokens=prompts, answers=answers)
        for work in works:
            if work.samples:
                work.request.tokens.append(7)
        return seconds

    plain = SamplingParams().with_defaults({})
    for number in range(10):
        scheduler.add(Request(number, [5] * 8, plain, seed=0, limit=2000))
    for _ in range(3):
        step()
    prompt = Request(10, [5] * 30_000, plain, seed=0, limit=31_000)
    scheduler.add(prompt)
    gaps = []
    while prompt.generated == 0:
        gaps.append(step())
    assert max(gaps[1:]) <= 3 * answer_seconds, (
        "the first is a guess: nothing of prompts is known then"
    )
    assert sorted(gaps)[len(gaps) // 2] > 2 * answer_seconds, "and the prompt gets its share"
