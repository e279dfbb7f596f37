"""Adapters behind the server: chosen by the model's name, listed beside it, several in flight at
once."""

import concurrent.futures
import json

import pytest
from adapter_files import linear_shapes, write_adapter
from safetensors.torch import load_file
from tiny_server import serving

from flyweight.commands.generate import adapters_of
from flyweight.errors import OptionError

ANSWER = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapted(tiny_folder, tmp_path_factory):
    weights = load_file(tiny_folder / "model.safetensors")
    shapes = linear_shapes(weights, ["q_proj", "v_proj", "down_proj"])
    folders = {}
    for seed, name in enumerate(("red", "blue")):
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        write_adapter(folders[name], shapes, seed=seed, lora_alpha=200)
    with serving(
        tiny_folder,
        names=("tiny",),
        embeddings="mean",
        engine={
            "max_num_seqs": 8,
            "adapters": {name: str(folder) for name, folder in folders.items()},
        },
    ) as running:
        yield running


def text_of(running, model):
    answer = running.client.post("/v1/completions", json=ANSWER | {"model": model}).json()
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def test_the_model_name_chooses_the_adapter(adapted):
    alone = {name: text_of(adapted, name) for name in ("tiny", "red", "blue")}
    assert len(set(alone.values())) == 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        names = ["red", "tiny", "blue"] * 4
        assert list(pool.map(lambda name: text_of(adapted, name), names)) == [
            alone[name] for name in names
        ]


def test_adapters_are_listed_with_their_parent(adapted):
    listed = {one["id"]: one["parent"] for one in adapted.client.get("/v1/models").json()["data"]}
    assert listed == {"tiny": None, "red": "tiny", "blue": "tiny"}
    unknown = adapted.client.post("/v1/completions", json=ANSWER | {"model": "rad"})
    assert unknown.status_code == 404 and "red" in unknown.json()["error"]["message"]


def test_streams_and_chats_go_to_the_adapter_too(adapted):
    streamed = ""
    with adapted.client.stream(
        "POST", "/v1/completions", json=ANSWER | {"model": "red", "stream": True}
    ) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                streamed += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert streamed == text_of(adapted, "red")


def test_embeddings_are_of_the_model_itself(adapted):
    assert (
        adapted.client.post("/v1/embeddings", json={"model": "tiny", "input": "abc"}).status_code
        == 200
    )
    refused = adapted.client.post("/v1/embeddings", json={"model": "red", "input": "abc"})
    assert refused.status_code == 400 and "call it tiny" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "given, words",
    [(["sql"], "NAME=FOLDER"), (["=x"], "NAME=FOLDER"), (["a=x", "a=y"], "two adapters")],
)
def test_the_option_says_what_it_wants(given, words):
    with pytest.raises(OptionError, match=words):
        adapters_of(given)
    assert adapters_of(["a=x=y", "b=z"]) == {"a": "x=y", "b": "z"}
