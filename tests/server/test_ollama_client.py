"""Ollama's official client: chat, generate, tools, thinking, formats, and what it asks about
models."""

import pytest
from tool_models import ADD, WEATHER

from flyweight.server.ollama.facts import weight_bytes

ollama = pytest.importorskip(
    "ollama", reason="the official client is not installed: pip install ollama"
)

PARIS = {"city": "Paris", "unit": "C"}


@pytest.fixture(scope="module")
def client(talking):
    return ollama.Client(host=talking.url)


def say(text):
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_and_streamed(client):
    whole = client.chat("talker", messages=say("say hello"))
    assert (
        whole.message.content == "Hello! How are you?"
        and whole.done
        and whole.done_reason == "stop"
    )
    assert whole.prompt_eval_count > 0 and whole.eval_count > 0 and whole.total_duration > 0
    parts = list(client.chat("talker:latest", messages=say("say hello"), stream=True))
    assert (
        "".join(part.message.content for part in parts) == whole.message.content and len(parts) > 2
    )
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_answers_a_prompt(client, talking):
    whole = client.generate(
        "talker",
        "say hello",
        system="Be kind.",
        options={"temperature": 0, "num_predict": 50, "num_ctx": 9},
    )
    assert whole.response == "Hello! How are you?" and whole.done_reason == "stop"
    params = talking.engine.submitted[-1].params
    assert (params.temperature, params.max_tokens) == (0, 50)
    assert "Be kind." in talking.service.text_of(talking.engine.submitted[-1].prompt)
    assert (
        "".join(part.response for part in client.generate("talker", "say hello", stream=True))
        == whole.response
    )
    assert client.generate("talker", "").done_reason == "load"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_goes_back(client, talking, streamed):
    messages = say("say the weather")
    if streamed:
        calls = [
            call
            for part in client.chat("talker", messages=messages, tools=[WEATHER, ADD], stream=True)
            for call in part.message.tool_calls or ()
        ]
        messages.append({"role": "assistant", "tool_calls": calls})
    else:
        answer = client.chat("talker", messages=messages, tools=[WEATHER, ADD])
        assert answer.message.content == "I look."
        calls = answer.message.tool_calls
        messages.append(answer.message)
    (call,) = calls
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)
    messages.append({"role": "tool", "tool_name": "get_weather", "content": "21 degrees"})
    assert (
        client.chat("talker", messages=messages, tools=[WEATHER]).message.content
        == "It is 21 degrees in Paris."
    )
    assert "<tool_response>\n21 degrees" in talking.service.text_of(
        talking.engine.submitted[-1].prompt
    )


def test_a_python_function_is_a_tool(client):
    def get_weather(city: str, unit: str) -> str:
        """The weather.

        Args:
            city: where
            unit: C or F
        """
        return f"{city} {unit}"

    (call,) = client.chat(
        "talker", messages=say("say the weather"), tools=[get_weather]
    ).message.tool_calls
    assert get_weather(**call.function.arguments) == "Paris C"


def test_thinking_is_apart(client, talking):
    answer = client.chat("talker", messages=say("think hard"), think=True)
    assert (answer.message.thinking, answer.message.content) == ("Let me think.", "It is warm.")
    parts = list(client.generate("talker", "think hard", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Let me think."
    client.chat("talker", messages=say("say hello"), think=False)
    assert talking.service.text_of(talking.engine.submitted[-1].prompt).endswith(
        "<think>\n\n</think>\n\n"
    )


def test_formats_become_grammars(client, talking):
    client.chat("talker", messages=say("say hello"), format="json")
    assert talking.engine.submitted[-1].schema == '{"type": "object"}'
    client.generate("talker", "say hello", format={"type": "integer"})
    assert talking.engine.submitted[-1].schema == '{"type": "integer"}'


def test_models_are_listed_and_shown(client):
    (model,) = client.list().models
    assert model.model == "talker" and model.size > 0 and model.details.family == "llama"
    assert [item.model for item in client.ps().models] == ["talker"]
    shown = client.show("talker")
    assert (
        shown.capabilities == ["completion", "tools", "thinking"] and "tool_call" in shown.template
    )
    assert shown.modelinfo["llama.context_length"] == 4096


def test_a_gguf_has_its_size(tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(tmp_path / "model.gguf")
    assert weight_bytes(str(folder)) == 1000 and weight_bytes("preset:tiny") == 0


def test_errors_are_one_message(client):
    with pytest.raises(
        ollama.ResponseError, match="unknown model 'talkr'; did you mean 'talker'"
    ) as caught:
        client.chat("talkr", messages=say("x"))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options.mirostat is not supported"):
        client.generate("talker", "x", options={"mirostat": 2})
