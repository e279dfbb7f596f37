"""The HTTP client against a server whose token times are known: it reports those times, whatever
the server tells."""

import asyncio
import socket

import pytest
from virtual_server import Script, with_server

from flyweight.backends.base import EngineOptions
from flyweight.backends.http import HttpError
from flyweight.backends.openai import Endpoint, OpenAI
from flyweight.errors import OptionError, ResultError


def ask(script, prompt=(1, 2, 3), output=9):
    async def use(url):
        endpoint = Endpoint(url, "mock")
        reply = await endpoint.ask(list(prompt), output)
        endpoint.client.close()
        return reply

    return with_server(script, use)


@pytest.mark.parametrize("style", ["ids", "usage", "final", "text"])
def test_the_client_reports_the_times_at_which_the_server_sent_its_tokens(style):
    reply = ask(Script(first=0.2, gap=0.05, style=style))
    source, chunks = reply.chunks()
    assert source == {"ids": "token_ids", "usage": "usage", "final": "usage", "text": "text"}[style]
    assert [count for _, count in chunks] == [1] * 9
    expected = [0.2 + 0.05 * i for i in range(9)]
    assert [when - reply.sent for when, _ in chunks] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("style", "counts"),
    [("ids", [4, 4, 2]), ("usage", [4, 4, 2]), ("final", [1, 1, 8]), ("text", [1, 1, 1])],
)
def test_tokens_of_a_chunk_are_counted_as_well_as_the_server_allows(style, counts):
    reply = ask(Script(size=4, style=style), output=10)
    assert [count for _, count in reply.chunks()[1]] == counts


def test_a_role_only_chunk_is_no_token():
    reply = ask(Script(first=0.5, style="text"), prompt=[{"role": "user", "content": "hi"}])
    assert (
        reply.chunks()[1][0][0] - reply.sent == pytest.approx(0.5, abs=1e-6)
        and reply.text == "x" * 9
    )


def test_prompts_go_as_token_ids_with_exact_lengths():
    script = Script(cached=2)
    reply = ask(script, prompt=[5, 6, 7], output=4)
    path, body = script.bodies[0]
    assert path == "/v1/completions" and body["prompt"] == [5, 6, 7] and body["temperature"] == 0
    assert (
        body["max_tokens"] == body["min_tokens"] == 4
        and body["ignore_eos"]
        and body["return_token_ids"]
    )
    assert (
        reply.token_ids == (0, 1, 2, 3)
        and reply.cached_tokens == 2
        and reply.usage["prompt_tokens"] == 3
    )


def test_a_batch_is_as_many_streams_at_once():
    async def use(url):
        return await OpenAI("mock", EngineOptions(url=url))._generate([[1], [2], [3]], 5)

    run = with_server(Script(first=0.1, gap=0.02), use)
    assert run.seconds == pytest.approx(0.18, abs=1e-6) and [
        answer.tokens for answer in run.answers
    ] == [5, 5, 5]
    assert run.window() == (pytest.approx(0.08, abs=1e-6), 12)


def test_connections_are_used_again():
    script = Script()

    async def use(url):
        endpoint = Endpoint(url, "mock")
        for _ in range(3):
            await endpoint.ask([1], 2)
        endpoint.client.close()

    with_server(script, use)
    assert script.connections == 1


def test_a_server_that_refuses_exact_lengths_is_asked_without_them():
    script = Script(strict=True)

    async def use(url):
        endpoint = Endpoint(url, "mock")
        await endpoint.probe([1])
        endpoint.client.close()
        return endpoint.exact

    assert with_server(script, use) is False and "ignore_eos" not in script.bodies[-1][1]


def test_an_error_of_the_server_is_told_with_its_status():
    async def use(url):
        endpoint = Endpoint(url, "mock")
        with pytest.raises(HttpError, match="HTTP 503: busy") as error:
            await endpoint.ask([1], 2)
        return error.value.kind

    assert with_server(Script(refuse=[1]), use) == "http 503"


def test_no_server_is_a_clear_message():
    with socket.socket() as deaf:  # holds a port and does not listen
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(ResultError, match="no server answers at"):
            asyncio.run(Endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}", "mock").probe([1]))
    with pytest.raises(OptionError, match="needs --url"):
        OpenAI("mock", EngineOptions())
