"""Tools with the official client: calls parsed and streamed for every family, twenty turns of an
agent, every choice."""

import json

import pytest
from tiny_server import serving
from tool_models import ADD, FAMILIES, WEATHER, fits, make_family, scripted

from flyweight.server.protocol import ChatRequest
from flyweight.server.refusals import Refusal

openai = pytest.importorskip(
    "openai", reason="the official client is not installed: pip install openai"
)

PARIS = '{"city": "Paris", "unit": "C"}'
SUM = '{"a": 2, "b": 3}'
WEATHER_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
SUM_CALL = f'{{"name": "add", "arguments": {SUM}}}'
ONE = {  # family → an answer with one call
    "qwen": f"Let me see.\n<tool_call>\n{WEATHER_CALL}\n</tool_call>",
    "spelled": f"Let me see.\n<tool_call>\n{WEATHER_CALL}\n</tool_call>",
    "llama": f'{{"name": "get_weather", "parameters": {PARIS}}}',
    "mistral": f"[TOOL_CALLS][{WEATHER_CALL}]",
    "new mistral": f"[TOOL_CALLS]get_weather[ARGS]{PARIS}",
    "coder": (
        "Let me see.\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
    ),
}
TWO = {  # and with two, where the family's template knows of that
    "qwen": f"{ONE['qwen']}\n<tool_call>\n{SUM_CALL}\n</tool_call>",
    "spelled": f"{ONE['qwen']}\n<tool_call>\n{SUM_CALL}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{WEATHER_CALL}, {SUM_CALL}]",
    "new mistral": f"{ONE['new mistral']}[TOOL_CALLS]add[ARGS]{SUM}",
    "coder": (
        f"{ONE['coder']}\n<tool_call>\n<function=add>\n"
        "<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
}
WORDS = {"qwen": "Let me see.", "spelled": "Let me see.", "coder": "Let me see."}
BEFORE_WORDS = {"harmony": "<|channel|>final<|message|>"}
WRONG = {"coder": ("\nC\n", "\nK\n")}  # a unit that there is not
SHOWN = {"coder": "<parameter=city>\nParis\n</parameter>"}  # a call in the next prompt


def script(family):
    answers = {
        "weather and sum": TWO.get(family, ""),
        "weather": ONE[family],
        "chat": f"{BEFORE_WORDS.get(family, '')}Just words, no call.",
    }
    return scripted({f"{question}?": answer for question, answer in answers.items()})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = make_family(request.param, tmp_path_factory.mktemp("family") / "model")
    with (
        serving(folder, engine_class=script(request.param)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield request.param, running, client


def ask(client, question, **options):
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"{question}?"}],
        tools=[WEATHER, ADD],
        **options,
    )


def gather(stream):
    """What a client puts together from deltas: (words, calls, finish reason)."""
    words, calls, finish = "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        words += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            call = calls.setdefault(
                delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""}
            )
            call["arguments"] += delta.function.arguments or ""
        finish = choice.finish_reason or finish
    return words, list(calls.values()), finish


def test_a_call_is_parsed_whole_and_streamed(family):
    name, _, client = family
    (choice,) = ask(client, "weather").choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == WORDS.get(name)
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "get_weather",
        PARIS,
    )
    words, (streamed,), finish = gather(ask(client, "weather", stream=True))
    assert finish == "tool_calls" and words == WORDS.get(name, "")
    assert (streamed["name"], streamed["arguments"]) == ("get_weather", PARIS) and streamed[
        "id"
    ] != call.id


def test_parallel_calls_have_their_own_indices_and_ids(family):
    name, _, client = family
    if name not in TWO:
        pytest.skip("this family calls one tool at a time")
    calls = ask(client, "weather and sum").choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", PARIS),
        ("add", SUM),
    ]
    _, streamed, _ = gather(ask(client, "weather and sum", stream=True))
    assert [(call["name"], call["arguments"]) for call in streamed] == [
        ("get_weather", PARIS),
        ("add", SUM),
    ]
    assert len({call["id"] for call in streamed}) == 2


def test_words_stay_words(family):
    _, _, client = family
    (choice,) = ask(client, "chat").choices
    assert choice.message.content == "Just words, no call." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert gather(ask(client, "chat", stream=True)) == ("Just words, no call.", [], "stop")


def test_results_go_back_through_the_template(family):
    """The message is sent back as the client got it, with all its nulls."""
    name, running, client = family
    message = ask(client, "weather").choices[0].message
    shown = SHOWN.get(name, PARIS)
    history = [
        {"role": "user", "content": "weather?"},
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"},
    ]
    tokens = running.post("/tokenize", messages=history, tools=[WEATHER]).json()["tokens"]
    text = running.post("/detokenize", tokens=tokens).json()["prompt"]
    assert "21 degrees" in text and shown in text and text.index(shown) < text.index("21 degrees")


def test_tool_choice_none_gives_the_template_no_tools(family):
    _, running, client = family
    ask(client, "weather", tool_choice="none")
    asked = running.engine.submitted[-1]
    assert asked.schema is None and "get_weather" not in running.service.text_of(asked.prompt)


def grammar_of(running, **options):
    """The grammar that a request goes to the engine with."""
    running.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "weather?"}],
        tools=[WEATHER, ADD],
        **options,
    )
    return running.engine.submitted[-1].schema


def allows(running, grammar, text):
    return fits(running.service.prompts.tokenizer.inner, grammar, text)


def test_the_grammar_lets_through_what_the_parser_reads(family):
    name, running, _ = family
    auto = grammar_of(running)
    required = grammar_of(running, tool_choice="required")
    only_sum = grammar_of(running, tool_choice={"type": "function", "function": {"name": "add"}})
    single = grammar_of(running, parallel_tool_calls=False)
    call = ONE[name].removeprefix("Let me see.\n")
    words = f"{BEFORE_WORDS.get(name, '')}Just words."
    assert allows(running, auto, ONE[name]) and allows(running, auto, words)
    assert allows(running, required, call) and not allows(running, required, words)
    assert not allows(running, only_sum, call)
    wrong = ONE[name].replace(*WRONG.get(name, ('"C"', '"K"')))
    assert not allows(running, auto, wrong) and not allows(
        running, required, wrong.removeprefix("Let me see.\n")
    )
    if name in TWO:
        assert allows(running, auto, TWO[name]) and not allows(running, single, TWO[name])


def test_allowed_tools_narrow_the_choice(family):
    name, running, _ = family
    named = [{"type": "function", "function": {"name": "add"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    assert not allows(
        running, grammar_of(running, tool_choice=choice), ONE[name].removeprefix("Let me see.\n")
    )


def test_an_agent_works_through_twenty_turns(tmp_path):
    """Streaming, every call parsed, every result in the next prompt; the last answer is words."""
    family = "qwen"
    turns = 20

    def call(turn):
        return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {turn}, "b": 1}}}}\n</tool_call>'

    answers = {f"result {turn} of {turns}": call(turn) for turn in range(1, turns)}
    answers |= {f"result {turns} of {turns}": "All done.", "begin": call(0)}
    folder = make_family(family, tmp_path / "model")

    class Agent(scripted(answers)):
        def answer(self, command):
            if hasattr(
                command, "prompt"
            ):  # only the last result counts: earlier ones stay in the prompt
                words = bytes(token for token in command.prompt if token < 256).decode()
                self.answers = {
                    question: answer
                    for question, answer in answers.items()
                    if words.rfind(question) == max(map(words.rfind, answers))
                }
            super().answer(command)

    messages = [{"role": "user", "content": "begin"}]
    made = []
    with (
        serving(folder, engine_class=Agent) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        while True:
            stream = client.chat.completions.create(
                model="tiny", messages=messages, tools=[WEATHER, ADD], stream=True
            )
            words, calls, finish = gather(stream)
            if not calls:
                break
            (found,) = calls
            made.append(json.loads(found["arguments"])["a"])
            assert finish == "tool_calls" and found["name"] == "add"
            function = {"name": found["name"], "arguments": found["arguments"]}
            messages += [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": found["id"], "type": "function", "function": function}],
                },
                {
                    "role": "tool",
                    "tool_call_id": found["id"],
                    "content": f"result {len(made)} of {turns}",
                },
            ]
    assert made == list(range(turns)) and (words, finish) == ("All done.", "stop")


def test_channels_are_thinking_and_answer_with_tools_or_without(tmp_path):
    """gpt-oss: its thinking comes apart, and goes back before the call that followed it; an effort
    reaches the template."""
    thought = "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|><|start|>assistant"
    answers = {
        "why?": f"{thought}<|channel|>final<|message|>So.",
        "call?": thought + ONE["harmony"],
    }
    folder = make_family("harmony", tmp_path / "model")
    with (
        serving(folder, engine_class=scripted(answers)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        ask_why = dict(model="tiny", messages=[{"role": "user", "content": "why?"}])
        message = client.chat.completions.create(**ask_why).choices[0].message
        assert (message.content, message.reasoning_content, message.tool_calls) == (
            "So.",
            "Hm, 2 < 3.",
            None,
        )
        deltas = [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(**ask_why, stream=True)
        ]
        assert "".join(delta.content or "" for delta in deltas) == "So."
        assert (
            "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            == "Hm, 2 < 3."
        )
        calling = ask(client, "call").choices[0].message
        assert (
            calling.reasoning_content == "Hm, 2 < 3."
            and calling.tool_calls[0].function.arguments == PARIS
        )
        history = [
            {"role": "user", "content": "call?"},
            calling.model_dump(),
            {"role": "tool", "tool_call_id": calling.tool_calls[0].id, "content": "21"},
        ]
        tokens = running.post(
            "/tokenize", messages=history, tools=[WEATHER], reasoning_effort="high"
        ).json()["tokens"]
        text = running.service.text_of(tokens)
        assert (
            "Reasoning: high" in text and "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|>" in text
        )


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"tool_choice": "any"},
            "tool_choice is auto, none, required or a function, not 'any'",
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "ad"}}},
            "unknown function 'ad'; did you mean 'add'?",
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice names a function", "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "of type 'custom' is not supported", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools needs a mode", "tool_choice"),
        (
            {"tool_choice": "required", "ignore_eos": True},
            "a call ends where it is complete",
            "tool_choice",
        ),
        ({"tools": [ADD, ADD]}, "no two of one name", "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "a tool has a name of letters",
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "are a JSON schema",
            "tools",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(fields, message, param):
    body = ChatRequest(
        messages=[{"role": "user", "content": "x"}], **{"tools": [WEATHER, ADD]} | fields
    )
    with pytest.raises(Refusal) as caught:
        body.check(strict=False)
    assert message in str(caught.value) and caught.value.param == param


def test_random_weights_under_required_still_call_within_the_schema(tmp_path):
    """The real engine: a model that knows nothing can write nothing but a right call."""
    folder = make_family("mistral", tmp_path / "model")
    with (
        serving(folder) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        for seed in range(3):
            choice = ask(
                client,
                "weather",
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
                temperature=1.0,
            ).choices[0]
            (call,) = choice.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert choice.finish_reason == "tool_calls"
            assert set(arguments) == (
                {"city", "unit"} if call.function.name == "get_weather" else {"a", "b"}
            )
        named = {"type": "function", "function": {"name": "add"}}
        stream = ask(
            client, "weather", tool_choice=named, parallel_tool_calls=False, stream=True, seed=1
        )
        _, (call,), finish = gather(stream)
        arguments = json.loads(call["arguments"])
        assert (
            finish == "tool_calls"
            and call["name"] == "add"
            and all(0 <= arguments[key] <= 99 for key in "ab")
        )
