"""Fields and refusals, shapes and headers, on the tiny model."""

import json

import pytest

ASK = dict(prompt="hello", max_tokens=4, temperature=0)
CHAT = dict(messages=[{"role": "user", "content": "hé"}], max_tokens=4, temperature=0)


def error(answer, status):
    assert answer.status_code == status, answer.text
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def events(answer):
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    )
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (
            "/v1/completions",
            ASK | {"use_beam_search": True},
            "use_beam_search is not supported and would change",
            "use_beam_search",
        ),
        ("/v1/completions", ASK | {"suffix": "end"}, "suffix is not supported", "suffix"),
        (
            "/v1/completions",
            ASK | {"best_of": 2},
            "best_of is not supported, except where it equals n",
            "best_of",
        ),
        ("/v1/completions", ASK | {"bad_words": ["x"]}, "bad_words is not supported", "bad_words"),
        ("/v1/completions", ASK | {"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        (
            "/v1/completions",
            ASK | {"max_tokens": "4"},
            "max_tokens: Input should be a valid integer",
            "max_tokens",
        ),
        (
            "/v1/completions",
            ASK | {"temperature": -1},
            "temperature: Input should be greater than or equal to 0",
            "temperature",
        ),
        (
            "/v1/completions",
            ASK | {"logprobs": 21},
            "logprobs: Input should be less than or equal to 20",
            "logprobs",
        ),
        (
            "/v1/completions",
            ASK | {"logit_bias": {"x": 1}},
            "logit_bias must map token ids",
            "logit_bias",
        ),
        (
            "/v1/completions",
            ASK | {"min_tokens": 9},
            "min_tokens is 9, more than max_tokens 4",
            "min_tokens",
        ),
        ("/v1/completions", ASK | {"stop": [""]}, "stop must hold non-empty strings", "stop"),
        (
            "/v1/completions",
            ASK | {"stream_options": {}},
            "stream_options needs stream",
            "stream_options",
        ),
        ("/v1/completions", ASK | {"prompt": []}, "the prompt is empty", "prompt"),
        ("/v1/completions", ASK | {"prompt": ""}, "the prompt is empty", None),
        (
            "/v1/completions",
            ASK | {"prompt": [1, 9999]},
            "token id 9999 in the prompt is outside the vocabulary of 264",
            None,
        ),
        (
            "/v1/completions",
            ASK | {"prompt": [1] * 4093},
            "the prompt has 4093 tokens and the answer asks for 4 more, but this "
            "model's context holds 4096",
            "max_tokens",
        ),
        ("/v1/completions", ASK | {"prompt": [1] * 5000}, "the prompt has 5000 tokens", "prompt"),
        (
            "/v1/completions",
            ASK | {"prompt": ["a"] * 600},
            "are 600 samples, but this server holds at most 264",
            "n",
        ),
        (
            "/v1/completions",
            ASK | {"response_format": {"type": "json_schema"}},
            "json_schema, and no other",
            "response_format",
        ),
        (
            "/v1/completions",
            ASK | {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "contradict",
            "ignore_eos",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tool_choice": {"type": "function"}},
            "tool_choice needs tools",
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tool_choice": "required"},
            "tool_choice needs tools",
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"reasoning_effort": "most"},
            "reasoning_effort: Input should be",
            "reasoning_effort",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"top_logprobs": 2},
            "top_logprobs needs logprobs",
            "top_logprobs",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_completion_tokens": 9},
            "two names of one thing",
            "max_tokens",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"messages": []},
            "messages: List should have at least 1 item",
            "messages",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content of type 'image_url' is not supported",
            "messages",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs.chat_template cannot be set",
            "chat_template_kwargs",
        ),
        ("/tokenize", {}, "give either prompt or messages", "prompt"),
        ("/detokenize", {"tokens": [264]}, "token id 264 is outside the vocabulary", "tokens"),
    ],
)
def test_refusals_name_the_field_and_the_numbers(tiny, path, body, message, param):
    body = error(tiny.post(path, **body), 400)
    assert message in body["message"] and body["param"] == param


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1},
        {"logprobs": None},
        {"repetition_penalty": 1.0},
        {"use_beam_search": False},
        {"length_penalty": 1},
        {"suffix": None},
        {"skip_special_tokens": True},
        {"user": "me"},
        {"n": None},
        {"stop": None},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"top_k": -1},
        {"stream": False, "stream_options": None},
        {"priority": 3},
    ],
)
def test_neutral_values_are_accepted_and_change_nothing(tiny, neutral):
    plain, answer = (
        tiny.post("/v1/completions", **ASK),
        tiny.post("/v1/completions", **ASK | neutral),
    )
    assert answer.status_code == 200 and answer.json()["choices"] == plain.json()["choices"]
    assert "x-warning" not in answer.headers


def test_unknown_fields_are_warned_about(tiny):
    answer = tiny.post("/v1/completions", **ASK | {"temprature": 1, "wörd\n": 2})
    assert answer.status_code == 200
    assert answer.headers["x-warning"] == (
        "unknown field 'temprature'; did you mean 'temperature'? (ignored); "
        "unknown field 'w\\xf6rd\\n' (ignored)"
    )
    nested = tiny.post(
        "/v1/completions", **ASK | {"stream": True, "stream_options": {"includ_usage": True}}
    )
    assert "stream_options.includ_usage" in nested.headers["x-warning"]


def test_bodies_that_are_no_requests_are_refused(tiny):
    json_type = {"content-type": "application/json"}
    assert (
        "JSON"
        in error(tiny.client.post("/v1/completions", content=b"{", headers=json_type), 400)[
            "message"
        ]
    )
    error(tiny.client.post("/v1/completions", content=b"[" * 100_000, headers=json_type), 400)
    error(tiny.client.post("/v1/completions", content=b"\xff", headers=json_type), 400)
    error(
        tiny.client.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=json_type),
        400,
    )
    error(
        tiny.client.post(
            "/v1/completions", content=b'{"prompt": "a", "temperature": NaN}', headers=json_type
        ),
        400,
    )
    error(tiny.client.get("/v1/completions"), 405)
    error(tiny.client.get("/no/such/path"), 404)
    error(tiny.client.get("/../../etc/passwd"), 404)


def test_a_body_over_the_limit_is_413_whether_it_says_so_or_not(tiny):
    text = json.dumps(ASK | {"prompt": "x" * (1 << 20)}).encode()
    headers = {"content-type": "application/json"}
    declared = error(tiny.client.post("/v1/completions", content=text, headers=headers), 413)
    assert str(len(text)) in declared["message"] and str(1 << 20) in declared["message"]
    pieces = (text[i : i + 65536] for i in range(0, len(text), 65536))
    assert (
        "more than"
        in error(tiny.client.post("/v1/completions", content=pieces, headers=headers), 413)[
            "message"
        ]
    )


def test_characters_are_never_torn(tiny):
    prompt = tiny.post("/tokenize", prompt="naïve 漢字 👩‍👧").json()
    assert prompt["count"] == len("naïve 漢字 👩‍👧".encode()) and prompt["max_model_len"] == 4096
    assert tiny.post("/detokenize", tokens=prompt["tokens"]).json() == {"prompt": "naïve 漢字 👩‍👧"}
    names = tiny.post("/tokenize", prompt="é!", return_token_strs=True).json()["token_strs"]
    assert names == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    chunks = events(
        tiny.post(
            "/v1/completions",
            **ASK
            | {
                "max_tokens": 40,
                "temperature": 1,
                "seed": 2,
                "stream": True,
                "return_token_ids": True,
            },
        )
    )
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert text == bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_names_of_the_model(tiny):
    data = tiny.client.get("/v1/models").json()["data"]
    assert [item["id"] for item in data] == ["tiny", "little"] and data[0]["root"] == "tiny"
    assert "/" in tiny.server.settings.model and "/" not in json.dumps(data), (
        "folders of this machine are nobody's business"
    )
    assert tiny.post("/v1/completions", **ASK | {"model": "little"}).json()["model"] == "little"
    assert tiny.post("/v1/completions", **ASK).json()["model"] == "tiny"
    assert (
        error(tiny.post("/v1/completions", **ASK | {"model": "gpt"}), 404)["code"]
        == "model_not_found"
    )


def test_the_chat_template_gets_tools_kwargs_and_the_last_message(tiny):
    def rendered(**options):
        tokens = tiny.post("/tokenize", messages=CHAT["messages"], **options).json()["tokens"]
        return tiny.post("/detokenize", tokens=tokens).json()["prompt"]

    assert rendered() == "<|start|>user\nhé<|end|>\n<|start|>assistant\n"
    assert rendered(add_generation_prompt=False) == "<|start|>user\nhé<|end|>\n"
    assert rendered(chat_template_kwargs={"enable_thinking": True}).endswith("assistant\n<think>\n")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    assert '"look_up"' in rendered(tools=[tool])
    answer = tiny.post(
        "/v1/chat/completions", **CHAT | {"chat_template_kwargs": {"mood": "good"}, "tools": [tool]}
    )
    assert answer.headers["x-warning"].startswith(
        "this model's chat template does not know 'mood' (ignored); "
    )
    assert "no format of tool calls that is known" in answer.headers["x-warning"]
    assert answer.json()["usage"]["prompt_tokens"] > 80
    without = tiny.post("/v1/chat/completions", **CHAT | {"tools": [tool], "tool_choice": "none"})
    assert without.json()["usage"]["prompt_tokens"] < 30


def test_thinking_is_told_from_the_answer(tiny):
    thinking = CHAT | {"chat_template_kwargs": {"enable_thinking": True}}
    message = tiny.post("/v1/chat/completions", **thinking).json()["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] == ""
    chunks = events(tiny.post("/v1/chat/completions", **thinking | {"stream": True}))
    said = "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks)
    assert said == message["reasoning_content"]
    plain = tiny.post("/v1/chat/completions", **CHAT).json()["choices"][0]["message"]
    assert plain["reasoning_content"] is None and plain["content"]


def test_json_schemas_shape_the_answer_and_bad_ones_are_refused(tiny):
    pytest.importorskip(
        "llguidance", reason="the grammar library is not installed: pip install llguidance"
    )

    def ask(schema, **options):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return tiny.post(
            "/v1/chat/completions",
            **CHAT | {"temperature": 1, "seed": 4, "max_tokens": 64, **options},
            response_format=form,
        )

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for choice in ask(schema, n=4).json()["choices"]:
        assert (
            set(json.loads(choice["message"]["content"])) == {"a", "b"}
            and choice["finish_reason"] == "stop"
        )
    assert "cannot be followed" in error(ask({"type": 5}), 400)["message"]
    assert (
        "cannot be followed"
        in error(ask({"type": "object", "not": {}}, stream=True), 400)["message"]
    )


def test_metrics_count_what_was_done(tiny):
    before = {
        name: tiny.metric(name)
        for name in ("generation_tokens_total", "prompt_tokens_total", "samples_total")
    }
    assert (
        tiny.post(
            "/v1/completions", **ASK | {"n": 2, "max_tokens": 3, "ignore_eos": True}
        ).status_code
        == 200
    )
    assert tiny.metric("generation_tokens_total") == before["generation_tokens_total"] + 6
    assert tiny.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 5
    assert tiny.metric("samples_total") == before["samples_total"] + 2
    assert (
        tiny.metric("up") == 1
        and tiny.metric("samples_in_flight") == 0
        and tiny.metric("kv_usage_ratio") == 0
    )
    assert (
        tiny.metric("time_to_first_token_seconds_count") > 0
        and tiny.metric("time_per_output_token_seconds_count") > 0
    )
    assert tiny.metric("http_responses_total") > 0


@pytest.mark.parametrize(
    ("state", "reason", "lives"),
    [
        ("loading", "the model is being loaded", True),
        ("restarting", "is being started again", True),
        ("draining", "takes no new requests", True),
        ("stopped", "the server's log says why", False),
    ],
)
def test_health_says_why_no_requests_are_taken(tiny, monkeypatch, state, reason, lives):
    monkeypatch.setattr(tiny.engine, "state", state)
    answer = tiny.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == state
    assert reason in answer.json()["reason"]
    assert tiny.client.get("/ready").status_code == 503
    assert tiny.client.get("/live").status_code == (200 if lives else 503)


def test_a_wrong_path_or_method_is_told_where_the_right_ones_are(tiny):
    missing = tiny.client.post("/v1/nothing", json={})
    assert missing.status_code == 404
    assert "/docs lists" in missing.json()["error"]["message"]
    wrong = tiny.client.get("/v1/completions")
    assert wrong.status_code == 405
    assert "another method" in wrong.json()["error"]["message"]


def test_health_ready_and_docs(tiny):
    assert tiny.client.get("/health").json() == {"status": "ok"}
    assert tiny.client.get("/live").json() == {"status": "ready"}
    assert tiny.client.get("/ready").json()["status"] == "ready"
    docs = tiny.client.get("/docs").text
    assert (
        "/v1/chat/completions" in docs
        and "repetition_penalty" in docs
        and "http://" not in docs
        and "https://" not in docs
    )
    document = tiny.client.get("/openapi.json").json()
    assert "422" not in json.dumps(document) and set(
        document["paths"]["/v1/completions"]["post"]["responses"]
    ) > {"400", "429"}
