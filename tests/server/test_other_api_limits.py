"""What bounds the chat endpoints bounds the APIs of others too: counts, the queue, and who may know
what of the cache."""

import dataclasses

import pytest
from pydantic import ValidationError

from flyweight.server import counts
from flyweight.server.anthropic.request import MessagesRequest
from flyweight.server.embeddings import EmbeddingRequest
from flyweight.server.ollama.request import OllamaChat
from flyweight.server.refusals import QueueFull
from flyweight.server.responses.request import ResponsesRequest

MESSAGE = {"role": "user", "content": "hello"}
ASKED = {  # path → a request for a chat
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 100},
    "/api/chat": {"model": "talker", "messages": [MESSAGE], "stream": False},
    "/api/generate": {"model": "talker", "prompt": "hello", "stream": False},
}


def message_of(answer) -> str:
    """Of a refusal, in whichever API's words."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessagesRequest, {"max_tokens": 1, "messages": [{}] * 5000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [MESSAGE], "tools": [{}] * 500}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * 5000}]}),
        (OllamaChat, {"model": "a", "messages": [{}] * 5000}),
        (ResponsesRequest, {"input": [1] * 5000}),
        (EmbeddingRequest, {"input": [{}] * 2000}),
    ],
)
def test_wrong_entries_are_reported_once_and_not_each(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 6  # one for each type that a field may have


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (
            MessagesRequest,
            {"max_tokens": 1, "messages": [MESSAGE] * (counts.MOST_MESSAGES + 1)},
            "messages",
        ),
        (
            MessagesRequest,
            {"max_tokens": 1, "messages": [MESSAGE], "stop_sequences": ["x"] * 65},
            "stop_sequences",
        ),
        (
            OllamaChat,
            {"model": "a", "messages": [MESSAGE] * (counts.MOST_MESSAGES + 1)},
            "messages",
        ),
        (ResponsesRequest, {"input": [MESSAGE] * (counts.MOST_MESSAGES + 1)}, "input"),
        (EmbeddingRequest, {"input": ["a"] * (counts.MOST_PROMPTS + 1)}, "input"),
    ],
)
def test_too_many_of_anything_are_refused_by_their_number(kind, body, field):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert any(
        error["type"] == "too_many" and error["loc"][0] == field for error in caught.value.errors()
    )


@pytest.mark.parametrize("path", ASKED)
def test_a_full_queue_refuses_before_the_prompt_is_read(talking, monkeypatch, path):
    monkeypatch.setattr(talking.engine, "in_flight", talking.engine.capacity)
    monkeypatch.setattr(
        talking.service.prompts.tokenizer, "inner", None
    )  # whoever tokenizes now fails
    answer = talking.post(path, **ASKED[path])
    assert answer.status_code == QueueFull.status and "the queue is full" in message_of(answer)


@pytest.mark.parametrize("path", ASKED)
def test_a_text_that_no_context_holds_is_not_tokenized(talking, monkeypatch, path):
    text = "x" * (4 * talking.service.prompts.longest_token * 4096 + 1)
    monkeypatch.setattr(talking.service.prompts.tokenizer.inner, "encode", None, raising=False)
    body = {
        name: text
        if value == "hello"
        else [{"role": "user", "content": text}]
        if value == [MESSAGE]
        else value
        for name, value in ASKED[path].items()
    }
    answer = talking.post(path, **body)
    assert answer.status_code == 400 and "more than this model's context" in message_of(answer)


@pytest.mark.parametrize("path", ASKED)
def test_neither_warnings_nor_errors_repeat_a_megabyte(talking, path):
    warned = talking.post(path, **ASKED[path], **{f"field_{i}": i for i in range(20_000)})
    assert warned.status_code == 200 and warned.headers["x-warning"].endswith(
        "19992 more unknown fields (ignored)"
    )
    refused = talking.post(path, **ASKED[path] | {"model": "x" * 500_000})
    assert refused.status_code == 404 and len(message_of(refused)) < 1000


@pytest.mark.parametrize("path", ASKED)
def test_a_grammar_that_takes_too_long_to_read_is_refused(talking, monkeypatch, path):
    """Beside the event loop: others are answered meanwhile."""
    from flyweight.server import prompts, service

    def endless(*_):
        while True:
            pass

    monkeypatch.setattr(prompts, "READING_SECONDS", 0.2)
    monkeypatch.setattr(service, "plan_answer", lambda *_, **__: endless())
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    tools = {
        "/v1/responses": [{"type": "function", **tool}],
        "/v1/messages": [{"name": "look", "input_schema": {}}],
    }
    given = (
        {}
        if path == "/api/generate"
        else {"tools": tools.get(path, [{"type": "function", "function": tool}])}
    )
    answer = talking.post(path, **ASKED[path], **given or {"format": "json"})
    assert answer.status_code == 400 and "could not be read within 0.2 seconds" in message_of(
        answer
    )


def test_who_may_not_know_of_the_cache_is_not_told_by_any_api(talking, monkeypatch):
    from flyweight.server.ticket import Ticket

    real = Ticket.put

    def put(self, prompt, delta, now):
        real(self, prompt, delta._replace(cached=3), now)

    monkeypatch.setattr(Ticket, "put", put)
    told = talking.post("/v1/messages", **ASKED["/v1/messages"]).json()["usage"]
    assert told["cache_read_input_tokens"] == 3
    hidden = dataclasses.replace(talking.service.settings, hide_cached_tokens=True)
    monkeypatch.setattr(talking.service, "settings", hidden)
    usage = talking.post("/v1/messages", **ASKED["/v1/messages"]).json()["usage"]
    assert usage["cache_read_input_tokens"] == 0
    usage = talking.post("/v1/responses", **ASKED["/v1/responses"]).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
