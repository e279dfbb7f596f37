"""/v1/embeddings with the official client: the vectors that transformers gives, pooled, of unit
length."""

import pytest
import torch
from tiny_server import serving

openai = pytest.importorskip(
    "openai", reason="the official client is not installed: pip install openai"
)

TEXTS = ["hello", "a longer text, of more than sixteen tokens: two blocks", "é"]


@pytest.fixture(scope="module")
def server(tiny_folder):
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    with serving(tiny_folder, embeddings="mean", engine=engine, max_queue=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_folder):
    """By pooling and text."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def vector(text, pooling):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
        return pooled / pooled.norm()

    return vector


def test_vectors_are_those_of_transformers(client, expected):
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert [item.index for item in answer.data] == [
        0,
        1,
        2,
    ] and answer.usage.prompt_tokens == 5 + 54 + 2
    for text, item in zip(TEXTS, answer.data, strict=True):
        torch.testing.assert_close(
            torch.tensor(item.embedding), expected(text, "mean"), rtol=1e-4, atol=1e-5
        )


def test_the_last_token_is_the_other_pooling(tiny_folder, expected):
    """Without a server: the engine's side of it alone."""
    from flyweight.engine.embedding import Embedder
    from flyweight.engine.llm import LLM

    llm = LLM(tiny_folder, device="cpu", max_num_seqs=2)
    texts = [llm.tokenizer.encode(text) for text in TEXTS]
    for text, vector in zip(TEXTS, Embedder(llm).embed(texts, "last"), strict=True):
        torch.testing.assert_close(
            torch.tensor(vector), expected(text, "last"), rtol=1e-4, atol=1e-5
        )


def test_token_ids_and_floats_give_the_same(client, server):
    tokens = server.post("/tokenize", prompt="hello").json()["tokens"]
    by_text = (
        client.embeddings.create(model="tiny", input="hello", encoding_format="float")
        .data[0]
        .embedding
    )
    by_tokens = client.embeddings.create(model="tiny", input=tokens).data[0].embedding
    assert by_tokens == pytest.approx(by_text, abs=1e-6) and sum(
        x * x for x in by_text
    ) == pytest.approx(1, abs=1e-5)


def test_more_texts_than_the_queue_holds_are_read_in_parts(client, server):
    texts = [f"text {number}" for number in range(20)]
    answer = client.embeddings.create(model="tiny", input=texts)
    alone = client.embeddings.create(model="tiny", input=texts[13]).data[0].embedding
    assert len(answer.data) == 20 and answer.data[13].embedding == pytest.approx(alone, abs=1e-5)
    assert server.engine.in_flight == 0


def test_answers_go_on_beside_embeddings(client, server):
    whole = server.post(
        "/v1/completions", prompt="hello", max_tokens=8, temperature=0, ignore_eos=True
    ).json()
    client.embeddings.create(model="tiny", input=TEXTS * 4)
    again = server.post(
        "/v1/completions", prompt="hello", max_tokens=8, temperature=0, ignore_eos=True
    ).json()
    assert whole["choices"] == again["choices"]


def test_ollamas_client_gets_them_too(server, client):
    ollama = pytest.importorskip(
        "ollama", reason="the official client is not installed: pip install ollama"
    )
    ours = client.embeddings.create(model="tiny", input="hello").data[0].embedding
    (theirs,) = ollama.Client(host=server.url).embed("tiny", "hello").embeddings
    assert list(theirs) == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "the input is empty"),
        ({"input": []}, "input has 0 texts"),
        ({"input": [[1], [9999]]}, "outside the vocabulary"),
        ({"input": "x", "dimensions": 3}, "this model's vectors have 32"),
        ({"input": "x" * 5000}, "context holds 4096"),
    ],
)
def test_what_cannot_be_embedded_is_refused(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.embeddings.create(model="tiny", **fields)


def test_without_the_option_it_says_what_to_do(tiny):
    answer = tiny.post("/v1/embeddings", model="tiny", input="x")
    assert (
        answer.status_code == 400
        and "--embeddings mean or last" in answer.json()["error"]["message"]
    )
