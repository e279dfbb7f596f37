"""Small requests that ask for much work: refused before it is done, or done where nobody else waits
for it."""

import asyncio
import sys
import threading

import pytest
from pydantic import ValidationError
from tiny_server import DEADLINE, ScriptedEngine, serving

from flyweight.server import counts, prompts, protocol
from flyweight.server import threads as pool
from flyweight.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from flyweight.server.refusals import BadRequest, ContextTooLong, QueueFull
from flyweight.server.threads import AT_ONCE, Threads, Worker

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, engine_class=ScriptedEngine) as running:
        yield running


@pytest.fixture
def tokenizer(server):
    return server.service.prompts.tokenizer


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 2000}),
        (CompletionRequest, {"prompt": [[{}] * 2000] * 2}),
        (CompletionRequest, {"prompt": [1] * 2000 + ["x"] * 2000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 60}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 200}),
        (ChatRequest, {"messages": [{}] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 5000}]}),
        (ChatRequest, {"messages": MESSAGES, "tools": [{}] * 1000}),
        (DetokenizeRequest, {"tokens": ["x"] * 5000}),
    ],
)
def test_wrong_entries_are_reported_once_and_not_each(kind, body):
    """Each report takes a kilobyte: 3.9 MB of them ended the server."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 6  # one for each type that a field may have


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionRequest, {"prompt": ["a"] * (counts.MOST_PROMPTS + 1)}, "prompt"),
        (CompletionRequest, {"prompt": [[1]] * (counts.MOST_PROMPTS + 1)}, "prompt"),
        (CompletionRequest, {"prompt": [[1] * (counts.MOST_TOKENS // 2)] * 3}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop": ["x"] * 65}, "stop"),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}},
            "logit_bias",
        ),
        (ChatRequest, {"messages": [MESSAGES[0]] * (counts.MOST_MESSAGES + 1)}, "messages"),
        (
            ChatRequest,
            {"messages": MESSAGES, "chat_template_kwargs": {str(i): 1 for i in range(65)}},
            "chat_template_kwargs",
        ),
        (DetokenizeRequest, {"tokens": [1] * (counts.MOST_TOKENS + 1)}, "tokens"),
    ],
)
def test_too_many_of_anything_are_refused_by_their_number(kind, body, field):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    (error,) = caught.value.errors()
    assert error["type"] == "too_many" and error["loc"][0] == field


def test_a_stop_string_of_a_megabyte_is_refused(server):
    assert (
        "stop string of 1000000 characters is too long"
        in refused(server.post("/v1/completions", prompt="a", stop="x" * 1_000_000))["message"]
    )


def test_prompts_that_find_no_room_are_not_tokenized(server, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "inner", None)  # whoever tokenizes now fails
    for many in (600, 400_000):
        assert "are" in refused(server.post("/v1/completions", prompt=["a"] * many))["message"]


def test_a_text_that_no_context_holds_is_not_tokenized(server, tokenizer, monkeypatch):
    longest = server.service.prompts.longest_token
    text = "x" * (4 * longest * 4096 + 1)
    monkeypatch.setattr(tokenizer.inner, "encode", None, raising=False)
    chat = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": chat}),
    ):
        assert refused(server.post(path, **body))["code"] == ContextTooLong.code


def test_thousands_of_unknown_fields_get_one_guess_and_a_number(server, monkeypatch):
    asked = []
    monkeypatch.setattr(
        protocol,
        "unknown",
        lambda kind, name, known: asked.append(name) or f"unknown {kind} {name!r}",
    )
    answer = server.post(
        "/v1/completions", prompt="hello", **{f"field_{i}": i for i in range(20_000)}
    )
    assert answer.status_code == 200 and asked == ["field_0"]
    assert answer.headers["x-warning"].endswith(
        "'field_7' (ignored); 19992 more unknown fields (ignored)"
    )


def test_an_error_does_not_repeat_a_megabyte(server):
    name = "x" * 500_000
    assert (
        len(refused(server.post("/v1/completions", prompt="hello", model=name), 404)["message"])
        < 1000
    )
    assert (
        len(
            refused(server.post("/v1/completions", prompt="hello", **{"temperature": name}))[
                "message"
            ]
        )
        < 3000
    )


def test_a_chat_template_that_never_ends_is_stopped(server, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer.inner, "chat_template", ENDLESS)
    monkeypatch.setattr(prompts, "READING_SECONDS", 0.2)
    message = refused(server.post("/v1/chat/completions", messages=MESSAGES))["message"]
    assert message == "this model's chat template did not finish within 0.2 seconds"
    for thread in threading.enumerate():
        if isinstance(thread, Worker) and thread.stopped:
            thread.join(timeout=DEADLINE)
            assert not thread.is_alive(), "the work itself must end, not only the waiting for it"
    monkeypatch.undo()
    assert server.post("/v1/chat/completions", messages=MESSAGES).status_code == 200


def test_long_work_is_refused_when_all_places_are_taken():
    async def go():
        threads = Threads()
        begun, release = threading.Semaphore(0), threading.Event()

        def work():
            begun.release()
            release.wait(DEADLINE)
            return "done"

        def late():
            return BadRequest("too late")

        running = [
            asyncio.create_task(threads.run(work, seconds=DEADLINE, refusal=late))
            for _ in range(AT_ONCE)
        ]
        for _ in running:
            await asyncio.to_thread(begun.acquire)
        with pytest.raises(QueueFull, match="too many long prompts"):
            await threads.run(work, seconds=0.01, refusal=late)
        release.set()
        return await asyncio.gather(*running), await threads.run(
            lambda: 5, seconds=DEADLINE, refusal=late
        )

    results, after = asyncio.run(go())
    assert set(results) == {"done"} and after == 5


def meet(parties, jobs):
    """Jobs that each wait until so many of them are at work; the most there were at once."""
    barrier, lock, here, most = threading.Barrier(parties), threading.Lock(), 0, 0

    def work():
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        barrier.wait(DEADLINE)
        with lock:
            here -= 1

    async def go():
        threads = Threads()
        await asyncio.gather(
            *(
                threads.run(work, seconds=DEADLINE, refusal=lambda: BadRequest("late"))
                for _ in range(jobs)
            )
        )

    asyncio.run(go())
    return most


def test_few_of_a_burst_are_read_at_once_and_long_work_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(pool, "AT_ONCE", 8)
    monkeypatch.setattr(pool, "BRISK", DEADLINE)
    assert meet(pool.BEGINNING, 4 * pool.BEGINNING) == pool.BEGINNING
    monkeypatch.setattr(pool, "BRISK", 0)
    assert meet(8, 8) == 8, "none of them ends before the last has begun"


def test_threads_are_used_again_unless_they_were_stopped():
    def endless():
        while True:
            pass

    async def go():
        threads = Threads()

        async def who(work=threading.current_thread, seconds=DEADLINE):
            return await threads.run(work, seconds=seconds, refusal=lambda: BadRequest("too late"))

        first = await who()
        assert await who() is first and threads.idle == [first]
        with pytest.raises(BadRequest, match="too late"):
            await who(endless, 0.05)
        assert await who() is not first
        with pytest.raises(SystemExit):
            await who(sys.exit)
        await asyncio.to_thread(first.join, DEADLINE)
        assert not first.is_alive() and len(threads.idle) == 1
        for _ in range(AT_ONCE):  # no place was lost
            await threads.places.acquire()

    asyncio.run(go())
