"""/v1/responses with the official client: text, streams of events, tools, and going on from a
response that is kept."""

import json

import pytest
from tool_models import ADD, WEATHER

from flyweight.server.responses.store import ResponseStore, UnknownResponse

openai = pytest.importorskip(
    "openai", reason="the official client is not installed: pip install openai"
)

TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
PARIS = '{"city": "Paris", "unit": "C"}'


@pytest.fixture(scope="module")
def client(talking):
    with openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(talking):
    return talking.service.text_of(talking.engine.submitted[-1].prompt)


def test_a_text_is_answered(client, talking):
    response = client.responses.create(
        model="talker", input="say hello", instructions="Be kind.", max_output_tokens=50
    )
    assert (
        response.status == "completed"
        and response.output_text == "Hello! How are you?"
        and response.id.startswith("resp_")
    )
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert prompt_of(talking).startswith("<|start|>system\nBe kind.<|end|>")


def test_events_build_the_same_response(client):
    whole = client.responses.create(model="talker", input="say the weather", tools=TOOLS)
    events = list(
        client.responses.create(model="talker", input="say the weather", tools=TOOLS, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    final = events[-1].response
    assert final.output_text == whole.output_text == "I look."
    assert (
        "".join(
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta"
        )
        == PARIS
    )
    assert [item.type for item in final.output] == ["message", "function_call"] and final.output[
        1
    ].arguments == PARIS


def test_the_clients_own_stream_helper_follows(client):
    with client.responses.stream(model="talker", input="say hello") as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        assert stream.get_final_response().output_text == text == "Hello! How are you?"


def test_a_tool_is_called_and_its_result_goes_back_as_items(client, talking):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "say the weather"}]}]
    response = client.responses.create(model="talker", input=items, tools=TOOLS, store=False)
    call = response.output[1]
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", PARIS)
    items += [item.model_dump() for item in response.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
    assert (
        client.responses.create(model="talker", input=items, tools=TOOLS).output_text
        == "It is 21 degrees in Paris."
    )
    assert f'{{"name": "get_weather", "arguments": {PARIS}}}' in prompt_of(talking)
    assert "<tool_response>\n21 degrees" in prompt_of(talking)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_from_a_response(client, talking, streamed):
    asked = dict(model="talker", input="say the weather", tools=TOOLS)
    first = (
        list(client.responses.create(**asked, stream=True))[-1].response
        if streamed
        else client.responses.create(**asked)
    )
    output = {
        "type": "function_call_output",
        "call_id": first.output[1].call_id,
        "output": "21 degrees",
    }
    second = client.responses.create(
        model="talker", input=[output], previous_response_id=first.id, tools=TOOLS
    )
    assert (
        second.output_text == "It is 21 degrees in Paris."
        and second.previous_response_id == first.id
    )
    prompt = prompt_of(talking)
    assert prompt.index("say the weather") < prompt.index(PARIS) < prompt.index("21 degrees")
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(second.id)


def test_what_is_not_stored_cannot_be_gone_on_from(client):
    unstored = client.responses.create(model="talker", input="say hello", store=False)
    with pytest.raises(openai.NotFoundError, match="never stored"):
        client.responses.create(model="talker", input="more", previous_response_id=unstored.id)


def test_thinking_is_an_item_of_its_own(client):
    response = client.responses.create(
        model="talker", input="think hard", reasoning={"effort": "high"}
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (
        response.output[0].content[0].text == "Let me think."
        and response.output_text == "It is warm."
    )


def test_formats_and_choices_become_grammars(client, talking):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    client.responses.create(model="talker", input="say hello", text=form)
    assert json.loads(talking.engine.submitted[-1].schema) == schema
    client.responses.create(
        model="talker",
        input="say the weather",
        tools=TOOLS,
        tool_choice={"type": "function", "name": "add"},
    )
    assert "get_weather" not in talking.engine.submitted[-1].schema


def test_a_limit_makes_it_incomplete(client):
    response = client.responses.create(model="talker", input="say hello", max_output_tokens=1)
    assert (
        response.status == "incomplete"
        and response.incomplete_details.reason == "max_output_tokens"
    )
    assert response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input items of type 'item_reference' are not supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "content of type 'input_image' is not supported",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not supported"),
        ({"background": True}, "background is not supported"),
        ({"input": []}, "the input is empty"),
        ({"previous_response_id": "resp_x"}, "there is no response 'resp_x'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, fields, message):
    with pytest.raises(openai.APIStatusError, match=message):
        client.responses.create(**{"model": "talker", "input": "x"} | fields)


def test_memory_for_responses_is_bounded_in_number_and_bytes():
    store = ResponseStore(most=3, most_bytes=400)
    for number in range(5):
        store.put({"id": f"r{number}"}, [])
    assert list(store.kept) == ["r2", "r3", "r4"]
    store.get("r2")
    store.put({"id": "r5"}, [])
    assert list(store.kept) == ["r4", "r2", "r5"], "the one used longest ago went"
    store.put({"id": "large"}, ["x" * 370])
    assert list(store.kept) == ["large"], "the others had to make room"
    store.delete("large")
    assert store.bytes == 0
    with pytest.raises(UnknownResponse):
        store.get("large")
