"""What happens when too much is asked, when clients leave, and when the engine dies."""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tiny_server import DEADLINE, START, serving, wait_for

ASK = dict(prompt="hello", temperature=0, ignore_eos=True)
LONG = ASK | {"max_tokens": 4000}


@pytest.fixture(scope="module")
def small(tiny_folder):
    """One seat, one place in the queue."""
    keys = ("secret-key", "other-key")
    with serving(
        tiny_folder, max_queue=1, api_keys=keys, strict=True, engine={"max_num_seqs": 1}
    ) as running:
        running.client.headers["authorization"] = "Bearer secret-key"
        yield running


@pytest.fixture
def frozen(small):
    """The engine stands still for as long as a test needs a known state."""
    pid = small.engine.facts["pid"]
    os.kill(pid, signal.SIGSTOP)
    yield small
    os.kill(pid, signal.SIGCONT)
    wait_for(small.idle, "the blocks to come back")


def open_stream(running, **body):
    """A raw socket that has sent its request and reads nothing."""
    request = httpx.Request(
        "POST",
        running.url + "/v1/completions",
        json=body | {"stream": True},
        headers={"authorization": "Bearer secret-key"},
    )
    connection = socket.create_connection((request.url.host, request.url.port))
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return connection


def test_a_full_queue_is_429_with_a_time_to_come_back(frozen):
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(frozen.post, "/v1/completions", **ASK, max_tokens=2) for _ in range(2)
        ]
        wait_for(lambda: frozen.engine.in_flight == 2, "two requests in flight")
        refused = frozen.post("/v1/completions", **ASK, max_tokens=2)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert (
            "2 samples run or wait and 1 more would be over the limit of 2"
            in refused.json()["error"]["message"]
        )
        os.kill(frozen.engine.facts["pid"], signal.SIGCONT)
        assert [future.result().status_code for future in waiting] == [200, 200]


def test_a_client_that_goes_away_frees_its_blocks_long_before_its_answer_would_have_ended(small):
    before, pid = small.engine.load.steps, small.engine.facts["pid"]
    with small.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        lines = stream.iter_lines()  # the connection closes with this iterator
        assert next(lines).startswith("data:")
        os.kill(pid, signal.SIGSTOP)  # so that its steps do not race with the news
        assert small.engine.load.free_blocks < small.engine.load.blocks
    wait_for(lambda: not small.engine.tickets, "the server to notice")
    os.kill(pid, signal.SIGCONT)
    wait_for(small.idle, "the blocks to come back")
    assert small.engine.load.steps - before < LONG["max_tokens"]


def test_a_client_that_goes_away_before_the_first_token_is_cancelled_too(frozen):
    for body in (LONG, LONG | {"stream": True}):
        connection = open_stream(frozen, **body)
        wait_for(lambda: frozen.engine.in_flight == 1, "the request")
        connection.close()
        wait_for(lambda: frozen.engine.in_flight == 0, "its cancellation")


def test_a_reader_that_does_not_read_stalls_nobody(tiny):
    # Enough events to fill every buffer between the two: logprobs make them large.
    before = tiny.engine.load.steps
    idler = open_stream(tiny, **ASK, logprobs=20, max_tokens=3000)
    wait_for(lambda: tiny.engine.load.steps > before, "the idle reader's first step")
    for _ in range(5):
        assert tiny.post("/v1/completions", **ASK, max_tokens=4).status_code == 200
    wait_for(tiny.idle, "the answer nobody reads: finished, it holds no seat and no blocks")
    assert tiny.engine.load.steps - before >= 3000
    idler.close()


def test_a_message_larger_than_a_sockets_buffer_arrives_whole(tiny):
    """uvloop makes the engine's socket non-blocking: half a message looked like a dead engine."""
    body = dict(prompt=[7, 8, 9, 10] * 1000, max_tokens=0, echo=True, logprobs=20)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(tiny.post, "/v1/completions", **body) for _ in range(4)]
        answers = [future.result() for future in asked]
    assert [len(answer.json()["choices"][0]["logprobs"]["tokens"]) for answer in answers] == [
        4000
    ] * 4
    assert tiny.engine.restarts == 0 and tiny.engine.state == "ready"


def test_an_answer_that_takes_too_long_is_504(frozen, monkeypatch):
    monkeypatch.setattr(frozen.engine, "timeout", 0.3)
    before = frozen.metric("request_errors_total")
    for stream in (False, True):
        answer = frozen.post("/v1/completions", **LONG, stream=stream)
        assert (
            answer.status_code == 504
            and "limit of 0.3 seconds" in answer.json()["error"]["message"]
        )
    assert frozen.engine.in_flight == 0 and frozen.metric("request_errors_total") == before + 2


def test_the_api_key_guards_everything_but_the_state(small):
    for given in (None, "Bearer wrong", "secret-key", "Basic secret-key", "Bearer"):
        with httpx.Client(
            base_url=small.url, headers={"authorization": given} if given else {}, timeout=DEADLINE
        ) as stranger:
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/tokenize",
                "/detokenize",
                "/reset_prefix_cache",
            ):
                answer = stranger.post(path, json=ASK)
                assert (
                    answer.status_code == 401
                    and answer.json()["error"]["code"] == "invalid_api_key"
                )
            assert stranger.get("/v1/models").status_code == 401
            for path in ("/", "/health", "/live", "/ready", "/metrics", "/docs"):
                assert stranger.get(path).status_code == 200
    assert (
        small.client.get("/v1/models", headers={"authorization": "bearer other-key"}).status_code
        == 200
    )


def test_with_a_key_the_prefix_cache_can_be_reset(small):
    ask = ASK | {"prompt": "a prompt of more than one block of sixteen tokens", "max_tokens": 1}
    cached = [
        small.post("/v1/completions", **ask).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for _ in range(2)
    ]
    assert cached[1] >= 32
    assert small.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert (
        small.post("/v1/completions", **ask).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        == 0
    )


def test_a_salt_keeps_prefixes_among_those_who_know_it(small):
    def cached(**options):
        ask = (
            ASK
            | {"prompt": "another prompt of more than one block of tokens", "max_tokens": 1}
            | options
        )
        return small.post("/v1/completions", **ask).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert [cached(), cached()] == [0, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 32, 0]
    assert cached() == 32 and small.post("/v1/completions", **ASK, cache_salt="").status_code == 400


def test_cached_tokens_can_be_hidden_from_clients_and_are_still_logged(small, monkeypatch):
    monkeypatch.setattr(
        small.service,
        "settings",
        dataclasses.replace(small.service.settings, hide_cached_tokens=True),
    )
    counted = small.metric("cached_prompt_tokens_total")
    ask = ASK | {"prompt": "a third prompt of more than one block of tokens", "max_tokens": 1}
    for _ in range(2):
        answer = small.post("/v1/completions", **ask).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (
            0,
            len(ask["prompt"]),
        )
    assert small.metric("cached_prompt_tokens_total") == counted + 32


def test_strict_refuses_unknown_fields(small):
    answer = small.post("/v1/completions", **ASK, temprature=1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temprature"
    assert (
        small.post("/v1/completions", **ASK, max_tokens=1, user="me", best_of=1).status_code == 200
    )


def test_neither_keys_nor_prompts_are_logged(small, caplog):
    def written():
        return [record for record in [*caplog.records] if record.name == logger.name]

    def by_request():  # the line of one before these may come only now
        return {record.fields.get("request_id"): record.fields for record in written()}

    caplog.set_level("DEBUG", logger="flyweight.server")
    logger = logging.getLogger("flyweight.server")
    logger.addHandler(caplog.handler)
    try:
        answers = [
            small.post("/v1/completions", **ASK | {"prompt": "a private matter"}, max_tokens=2),
            small.client.get("/v1/models", headers={"authorization": "Bearer nearly-secret"}),
        ]
        ids = [answer.headers["x-request-id"] for answer in answers]
        wait_for(lambda: set(ids) <= by_request().keys(), "both lines")
    finally:
        logger.removeHandler(caplog.handler)
    lines = [record.getMessage() + str(record.fields) for record in written()]
    assert not any(word in line for line in lines for word in ("private", "secret"))
    done, refused = (by_request()[one] for one in ids)
    assert (
        done["status"] == 200
        and done["completion_tokens"] == 2
        and done["ttft_ms"] > 0
        and refused["status"] == 401
    )


def test_a_killed_engine_fails_its_requests_and_comes_back(small, monkeypatch):
    pid, restarts, held = small.engine.facts["pid"], small.metric("engine_restarts_total"), []
    start = small.engine.start
    with ThreadPoolExecutor(2) as threads:
        streamed = threads.submit(small.post, "/v1/completions", **LONG, stream=True)
        wait_for(lambda: small.engine.load.running == 1, "the first request to run")
        os.kill(pid, signal.SIGSTOP)  # so that neither request ends by itself
        waiting = threads.submit(small.post, "/v1/completions", **LONG)
        wait_for(lambda: small.engine.in_flight == 2, "the second to wait")
        monkeypatch.setattr(small.engine, "start", lambda: held.append(asyncio.get_running_loop()))
        os.kill(pid, signal.SIGKILL)
        last = [line for line in streamed.result().text.split("\n\n") if line][-1]
        assert '"error"' in last and "killed by SIGKILL" in last and "started again" in last
        assert (
            waiting.result().status_code == 503
            and "SIGKILL" in waiting.result().json()["error"]["message"]
        )
    wait_for(lambda: held, "the moment to start a new one")
    away = small.post("/v1/completions", **ASK, max_tokens=1)
    assert away.status_code == 503 and away.headers["retry-after"]
    assert small.client.get("/ready").status_code == 503
    assert small.client.get("/live").status_code == 200, "this process mends itself"
    unwell = small.client.get("/health")
    assert unwell.status_code == 503
    assert "started again" in unwell.json()["reason"]
    held[0].call_soon_threadsafe(start)
    wait_for(lambda: small.engine.state == "ready", "the new engine", seconds=START)
    assert (
        small.engine.facts["pid"] != pid and small.metric("engine_restarts_total") == restarts + 1
    )
    assert small.post("/v1/completions", **ASK, max_tokens=2).status_code == 200
    wait_for(small.idle, "the blocks to come back")


def test_many_clients_of_which_some_leave_lose_and_leak_nothing(tiny):
    """The bounded version of benchmarks/serve_load.py: every answer that is read is the one its
    prompt gives alone."""
    prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(8)]
    ask = dict(temperature=0.7, max_tokens=24, ignore_eos=True)
    alone = [
        tiny.post("/v1/completions", prompt=prompt, seed=i, **ask).json()["choices"][0]["text"]
        for i, prompt in enumerate(prompts)
    ]
    wrong = []

    def visit(number):
        i = number % len(prompts)
        body = dict(prompt=prompts[i], seed=i, **ask)
        if number % 3 == 0:
            with httpx.stream(
                "POST", tiny.url + "/v1/completions", json=body | {"stream": True}, timeout=DEADLINE
            ) as stream:
                lines = stream.iter_lines()
                for _ in range(number % 7):
                    next(lines)
            return
        with httpx.Client(base_url=tiny.url, timeout=DEADLINE) as client:
            text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        if text != alone[i]:
            wrong.append((number, text, alone[i]))

    with ThreadPoolExecutor(24) as threads:
        list(threads.map(visit, range(72)))
    assert not wrong
    wait_for(tiny.idle, "the blocks to come back")
