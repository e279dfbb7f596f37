"""The official client against the default real model: every endpoint and option it knows, and ours
through extra_body."""

import json

import httpx
import pytest

openai = pytest.importorskip(
    "openai", reason="the official client is not installed: pip install openai"
)

MODEL = "smollm2-135m"
PARIS = dict(model=MODEL, prompt="The capital of France is", max_tokens=6, temperature=0)
HELLO = dict(
    model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
)


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(
        base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def paris(client):
    return client.completions.create(**PARIS)


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 512) and model.root
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="did you mean 'smollm2-135m'"):
        client.models.retrieve("smollm2")


def test_completion_continues_a_text(paris):
    (choice,) = paris.choices
    assert (
        paris.object == "text_completion" and paris.id.startswith("cmpl-") and paris.model == MODEL
    )
    assert choice.text.startswith(" Paris") and choice.finish_reason == "length"
    assert (paris.usage.prompt_tokens, paris.usage.completion_tokens, paris.usage.total_tokens) == (
        5,
        6,
        11,
    )
    assert paris.usage.prompt_tokens_details.cached_tokens == 0
    assert paris.timings["predicted_n"] == 6 and paris.timings["ttft_ms"] > 0


def test_completion_streams_one_token_a_chunk(client, paris):
    chunks = list(
        client.completions.create(**PARIS, stream=True, stream_options={"include_usage": True})
    )
    *tokens, last = chunks
    assert "".join(chunk.choices[0].text for chunk in tokens) == paris.choices[0].text
    assert len(tokens) == 6 and [chunk.choices[0].finish_reason for chunk in tokens] == [
        None
    ] * 5 + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in tokens) and len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**PARIS, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]


def test_prompts_as_lists_and_token_ids_give_the_same(client, real, paris):
    tokens = real.post("/tokenize", prompt=PARIS["prompt"]).json()["tokens"]
    for prompt in (tokens, [PARIS["prompt"]], [tokens]):
        assert (
            client.completions.create(**PARIS | {"prompt": prompt}).choices[0].text
            == paris.choices[0].text
        )
    both = client.completions.create(**PARIS | {"prompt": ["Water boils at", PARIS["prompt"]]})
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[
        1
    ].text == paris.choices[0].text
    assert both.usage.completion_tokens == 12


def test_several_answers_are_seeded_and_differ(client):
    ask = PARIS | dict(temperature=1.0, seed=7, n=3, max_tokens=8)
    first, second = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_completion_logprobs_and_echo(client):
    choice = client.completions.create(**PARIS | dict(max_tokens=3), logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text and logprobs.text_offset[0] == 0
    assert all(value <= 0 for value in logprobs.token_logprobs) and all(
        len(top) == 2 for top in logprobs.top_logprobs
    )
    judged = client.completions.create(**PARIS | dict(max_tokens=0), logprobs=1, echo=True)
    assert judged.choices[0].text == PARIS["prompt"] and judged.usage.completion_tokens == 0
    assert (
        judged.choices[0].logprobs.token_logprobs[0] is None
        and len(judged.choices[0].logprobs.token_logprobs) == 5
    )


def test_stop_strings_end_the_answer(client, paris):
    stop = paris.choices[0].text[3:6]
    stopped = client.completions.create(**PARIS, stop=stop).choices[0]
    assert (
        stopped.text == paris.choices[0].text[:3]
        and stopped.finish_reason == "stop"
        and stopped.stop_reason == stop
    )
    both = client.completions.create(**PARIS, stop=["no such text", stop]).choices[0]
    assert both.text == stopped.text


def test_penalties_bias_and_filters_change_the_answer(client, real, paris):
    first = real.post("/tokenize", prompt=paris.choices[0].text).json()["tokens"][0]
    biased = client.completions.create(**PARIS, logit_bias={str(first): -100})
    assert biased.choices[0].text != paris.choices[0].text
    loop = dict(model=MODEL, prompt="one one one one one one", max_tokens=6, temperature=0)
    plain = client.completions.create(**loop).choices[0].text
    for changed in (
        dict(presence_penalty=2.0, frequency_penalty=2.0),
        dict(extra_body={"repetition_penalty": 3.0}),
    ):
        assert client.completions.create(**loop, **changed).choices[0].text != plain
    hot = PARIS | dict(temperature=2.0, seed=1)
    for filtered in ({"top_k": 1}, {"min_p": 1.0}):
        assert (
            client.completions.create(**hot, extra_body=filtered).choices[0].text
            == paris.choices[0].text
        )
    assert (
        client.completions.create(**hot | {"top_p": 1e-4}).choices[0].text == paris.choices[0].text
    )


def test_min_tokens_and_ignore_eos_go_on_past_the_end(client):
    short = client.chat.completions.create(**HELLO | dict(max_tokens=64))
    assert short.choices[0].finish_reason == "stop" and short.usage.completion_tokens < 64
    count = short.usage.completion_tokens
    longer = client.chat.completions.create(
        **HELLO | dict(max_tokens=64), extra_body={"min_tokens": count + 5}
    )
    assert longer.usage.completion_tokens >= count + 5
    endless = client.chat.completions.create(
        **HELLO | dict(max_tokens=count + 9), extra_body={"ignore_eos": True}
    )
    assert (
        endless.usage.completion_tokens == count + 9
        and endless.choices[0].finish_reason == "length"
    )


def test_chat_answers_and_streams_the_same(client):
    whole = client.chat.completions.create(**HELLO)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**HELLO, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert deltas[0].content, "the role goes out with the first token, not before it"
    assert (
        chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason and chunks[-1].timings
    )


def test_chat_logprobs_have_bytes(client):
    ask = HELLO | {"max_tokens": 3}
    content = (
        client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert len(content) == 3 and all(len(item.top_logprobs) == 2 for item in content)
    assert all(bytes(item.bytes).decode() == item.token for item in content)
    streamed = client.chat.completions.create(**ask, logprobs=True, stream=True)
    assert [chunk.choices[0].logprobs.content[0].token for chunk in streamed] == [
        item.token for item in content
    ]


def test_max_completion_tokens_and_content_parts(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    answer = client.chat.completions.create(
        model=MODEL, messages=parts, max_completion_tokens=8, temperature=0
    )
    assert (
        answer.choices[0].message.content
        == client.chat.completions.create(**HELLO).choices[0].message.content
    )


def test_token_ids_come_back_on_request(client):
    answer = client.completions.create(**PARIS, extra_body={"return_token_ids": True}).choices[0]
    assert len(answer.token_ids) == 6 and len(answer.prompt_token_ids) == 5
    chunks = list(
        client.chat.completions.create(**HELLO, stream=True, extra_body={"return_token_ids": True})
    )
    assert all(len(chunk.choices[0].token_ids) == 1 for chunk in chunks)
    assert chunks[0].prompt_token_ids and not hasattr(chunks[1], "prompt_token_ids")


def test_a_repeated_prompt_is_cached_until_reset(client):
    prompt = (
        "The seven wonders of the ancient world are well known to everybody who has ever read a "
        "book about them. " * 2
    )
    ask = dict(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    first, second = (client.completions.create(**ask) for _ in range(2))
    assert (
        second.usage.prompt_tokens_details.cached_tokens
        >= 16
        > first.usage.prompt_tokens_details.cached_tokens
    )
    with pytest.raises(openai.PermissionDeniedError, match="--allow-reset"):
        client.post("/reset_prefix_cache".replace("/", "../", 1), cast_to=object)


def test_json_comes_back_as_json(client):
    pytest.importorskip(
        "llguidance", reason="the grammar library is not installed: pip install llguidance"
    )
    schema = {
        "type": "object",
        "required": ["name", "age"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 99},
        },
    }
    ask = dict(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person."}],
        max_tokens=60,
        temperature=0.7,
        seed=3,
    )
    answer = client.chat.completions.create(
        **ask,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema},
        },
    )
    person = json.loads(answer.choices[0].message.content)
    assert (
        set(person) == {"name", "age"}
        and isinstance(person["age"], int)
        and answer.choices[0].finish_reason == "stop"
    )
    free = client.chat.completions.create(
        **ask | {"max_tokens": 12}, response_format={"type": "json_object"}
    )
    assert free.choices[0].message.content.startswith("{")


def test_the_other_endpoints_answer_the_same_client(client):
    def ask(path, **body):
        call = client.post if body else client.get
        return call("../" + path, cast_to=httpx.Response, **({"body": body} if body else {}))

    tokens = ask("tokenize", model=MODEL, prompt=PARIS["prompt"]).json()
    assert tokens["count"] == len(tokens["tokens"]) == 5 and tokens["max_model_len"] == 512
    assert (
        ask("detokenize", model=MODEL, tokens=tokens["tokens"]).json()["prompt"] == PARIS["prompt"]
    )
    assert ask("health").json()["status"] == "ok" and ask("ready").json()["status"] == "ready"
    assert "flyweight_time_to_first_token_seconds_count" in ask("metrics").text
    assert "/v1/chat/completions" in ask("docs").text


def test_embeddings_and_nonsense_are_refused_clearly(client):
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(
        openai.BadRequestError,
        match=r"the prompt has 5 tokens and the answer asks for 600 more.* holds 512",
    ):
        client.completions.create(**PARIS | {"max_tokens": 600})
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**PARIS, best_of=3)
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.completions.create(**PARIS | {"model": "gpt-4"})
    with pytest.raises(
        openai.BadRequestError, match="tools are not supported: this model's chat template"
    ):
        client.chat.completions.create(
            **HELLO, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )


def test_the_request_id_is_ours_or_theirs(client):
    raw = client.completions.with_raw_response.create(
        **PARIS | {"max_tokens": 1}, extra_headers={"x-request-id": "my-7"}
    )
    assert raw.headers["x-request-id"] == "my-7" and raw.parse()._request_id == "my-7"
    assert len(client.models.with_raw_response.list().headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "body",
    [
        {
            "prompt": "a b",
            "temperature": 0.0,
            "best_of": 1,
            "logprobs": None,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },  # vllm bench serve
        {
            "prompt": "a b",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 2,
            "stream": True,
            "ignore_eos": True,
            "lora_path": None,
        },  # SGLang's serving benchmark
        {
            "prompt": "a b",
            "max_tokens": 2,
            "stream": True,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },  # guidellm
    ],
)
def test_what_the_serving_benchmarks_send_is_accepted_without_a_warning(real, body):
    answer = real.post("/v1/completions", model=MODEL, **body)
    assert answer.status_code == 200 and "x-warning" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")
