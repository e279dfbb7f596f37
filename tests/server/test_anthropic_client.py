"""Anthropic's official client: messages, streams, tools and their results, token counts, errors."""

import json

import pytest
from tiny_server import ScriptedEngine, serving
from tool_models import ADD, WEATHER

anthropic = pytest.importorskip(
    "anthropic", reason="the official client is not installed: pip install anthropic"
)

TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": "x",
        "input_schema": tool["function"]["parameters"],
    }
    for tool in (WEATHER, ADD)
]
PARIS = {"city": "Paris", "unit": "C"}


@pytest.fixture(scope="module")
def client(talking):
    with anthropic.Anthropic(base_url=talking.url, api_key="none", max_retries=0) as client:
        yield client


def ask(content, **options):
    return {
        "model": "talker",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": content}],
        **options,
    }


def test_a_message_is_answered(client):
    message = client.messages.create(
        **ask("say hello", system="Be kind.", metadata={"user_id": "me"})
    )
    assert message.type == "message" and message.role == "assistant" and message.model == "talker"
    assert [block.type for block in message.content] == ["text"] and message.content[
        0
    ].text == "Hello! How are you?"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_a_stream_builds_the_same_message(client):
    whole = client.messages.create(**ask("say hello"))
    with client.messages.stream(**ask("say hello")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (
        text == whole.content[0].text == final.content[0].text and final.stop_reason == "end_turn"
    )
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_their_order(client):
    kinds = [
        event.type
        for event in client.messages.create(**ask("say the weather", tools=TOOLS), stream=True)
    ]
    blocks = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert blocks == ["content_block_start", "content_block_stop"] * 2, "words, then a call"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_goes_back(client, talking, streamed):
    asked = ask("say the weather", tools=TOOLS, tool_choice={"type": "auto"})
    if streamed:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    words, call = message.content
    assert message.stop_reason == "tool_use" and words.text == "I look."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", PARIS)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "21 degrees"}],
        },
        {"type": "text", "text": "So?"},
    ]
    asked["messages"] += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(**asked).content[0].text == "It is 21 degrees in Paris."
    prompt = talking.service.text_of(talking.engine.submitted[-1].prompt)
    assert json.dumps(PARIS) in prompt and prompt.index(
        "<tool_response>\n21 degrees"
    ) < prompt.index("So?")


def test_choices_of_tools_become_grammars(client, talking):
    def grammar(**choice):
        client.messages.create(**ask("say the weather", tools=TOOLS, tool_choice=choice))
        return talking.engine.submitted[-1].schema

    assert "(TEXT |" in grammar(type="auto") and "(TEXT |" not in grammar(type="any")
    one = grammar(type="tool", name="add")
    assert '\\"add\\"' in one and "get_weather" not in one
    assert grammar(type="none") is None
    many, single = (
        grammar(type="auto", disable_parallel_tool_use=alone) for alone in (False, True)
    )
    assert len(many) > len(single), "the rule of further calls is gone"


def test_thinking_is_a_block_of_its_own(client):
    message = client.messages.create(
        **ask("think hard", thinking={"type": "enabled", "budget_tokens": 1024})
    )
    assert [
        (block.type, getattr(block, "thinking", None) or block.text) for block in message.content
    ] == [("thinking", "Let me think."), ("text", "It is warm.")]
    with client.messages.stream(**ask("think hard")) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


def test_the_limit_is_told(client, talking):
    assert (
        client.messages.create(**ask("say hello") | {"max_tokens": 1}).stop_reason == "max_tokens"
    )
    client.messages.create(
        **ask("say hello", stop_sequences=["\n\n"], extra_body={"top_k": 5, "temperature": 0.5})
    )
    params = talking.engine.submitted[-1].params
    assert (params.stop, params.top_k, params.temperature, params.max_tokens) == (
        ("\n\n",),
        5,
        0.5,
        100,
    )


def test_tokens_are_counted_as_they_are_used(client):
    counted = client.messages.count_tokens(
        model="talker", messages=ask("say hello")["messages"], system="Be kind.", tools=TOOLS
    )
    used = client.messages.create(**ask("say hello", system="Be kind.", tools=TOOLS)).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_errors_have_their_shape(client, tiny_folder):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ask("say hello") | {"model": "talkr"})
    assert caught.value.body["error"] == {
        "type": "not_found_error",
        "message": "unknown model 'talkr'; did you mean 'talker'?",
    }
    with pytest.raises(anthropic.BadRequestError, match="content of type 'image' is not supported"):
        client.messages.create(
            **ask(
                [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": ""},
                    }
                ]
            )
        )
    with pytest.raises(
        anthropic.BadRequestError, match="tools of type 'bash_20250124' are not supported"
    ):
        client.messages.create(**ask("x", tools=[{"type": "bash_20250124", "name": "bash"}]))
    with serving(tiny_folder, engine_class=ScriptedEngine, api_keys=("secret",)) as running:
        with (
            anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as locked,
            pytest.raises(anthropic.AuthenticationError),
        ):
            locked.messages.create(**ask("x") | {"model": "tiny"})
        with anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0) as opened:
            assert (
                opened.messages.create(**ask("x") | {"model": "tiny"}).content[0].text
                == "plain answer"
            )
