"""Several models behind one address: found by name, loaded when asked for, unloaded for one
another."""

import asyncio
import contextlib
import json
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from tiny_server import DEADLINE, ScriptedEngine, make_model, serving, wait_for

from flyweight.commands.serve import open_tokenizer
from flyweight.server.engine_client import EngineClient
from flyweight.server.memory_shares import MemoryShares, weights_in_memory
from flyweight.server.messages import CannotStart
from flyweight.server.settings import Settings


class Counted(ScriptedEngine):
    """Counts its starts, and cannot start beside `crowd` others or more."""

    running: ClassVar = set()
    crowd: ClassVar = 99
    most_at_once: ClassVar = 0

    def start(self):
        if len(self.running) >= self.crowd:
            self._spoil("out of memory")
            return
        self.running.add(self.model)
        type(self).most_at_once = max(type(self).most_at_once, len(self.running))
        super().start()
        self.starts = getattr(self, "starts", 0) + 1

    def _spoil(self, message):
        self.connection = self
        self.inbox = deque([CannotStart(message)])
        asyncio.get_running_loop().call_soon(self._read)

    async def unload(self):
        self.running.discard(self.model)
        await super().unload()


def engines(**settings):
    return type(
        "Engines",
        (Counted,),
        {"running": set(), "submitted": [], "answers": {"hello": "hi"}, **settings},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("fleet")
    return [make_model(root / name) for name in ("one", "two", "three")]


def others(folders, **options):
    made = []
    for folder in folders:
        root, tokenizer = open_tokenizer(str(folder))
        made.append(
            (
                Settings(model=root, names=(folder.name,), engine={"device": "cpu"}, **options),
                tokenizer,
            )
        )
    return made


@contextlib.contextmanager
def fleet(folders, engine_class, **options):
    with serving(
        folders[0],
        names=(folders[0].name,),
        engine_class=engine_class,
        others=others(folders[1:]),
        wait=False,
        **options,
    ) as running:
        wait_for(lambda: running.server.started or running.server.fatal, "the server")
        yield running


def states(running):
    return [engine.state for engine in running.server.engines]


def ask(running, model, **options):
    return running.post("/v1/completions", model=model, prompt="hello", max_tokens=3, **options)


def test_all_are_loaded_at_the_start_and_found_by_name(folders):
    with fleet(folders, engines()) as running:
        wait_for(lambda: states(running) == ["ready"] * 3, "three engines")
        assert [model["id"] for model in running.client.get("/v1/models").json()["data"]] == [
            "one",
            "two",
            "three",
        ]
        for name in ("three", "one", "two"):
            assert ask(running, name).json()["model"] == name
        assert ask(running, None).json()["model"] == "one", "the first, where no name is given"
        missing = ask(running, "four")
        assert (
            missing.status_code == 404
            and "unknown model 'four'" in missing.json()["error"]["message"]
        )
        assert running.client.get("/v1/models/two").json()["root"].endswith("two")
        assert (
            running.client.get("/ready").status_code == 200
            and running.metric("samples_in_flight") == 0
        )


def test_lazy_ones_are_loaded_when_they_are_first_asked_for(folders):
    with fleet(folders, engines(), lazy=True) as running:
        assert states(running) == ["unloaded"] * 3
        assert ask(running, "two").status_code == 200 and states(running) == [
            "unloaded",
            "ready",
            "unloaded",
        ]
        tokens = running.post("/tokenize", model="three", prompt="ab").json()["tokens"]
        assert len(tokens) == 2 and states(running)[2] == "unloaded", "tokenizing needs no engine"


def test_the_one_used_longest_ago_makes_room(folders):
    with fleet(folders, engines(), lazy=True, max_loaded=2) as running:
        for name in ("one", "two", "one", "three"):
            assert ask(running, name).status_code == 200
        assert states(running) == ["ready", "unloaded", "ready"]
        assert ask(running, "two").status_code == 200
        assert states(running) == ["unloaded", "ready", "ready"]
        assert running.server.engines[1].starts == 2


def test_a_load_that_fails_is_tried_again_with_one_model_fewer(folders):
    kind = engines(crowd=2)
    with fleet(folders, kind, lazy=True) as running:
        for name in ("one", "two", "three", "one"):
            assert ask(running, name).status_code == 200, name
        assert kind.most_at_once == 2 and states(running) == ["ready", "unloaded", "ready"]


def test_a_model_that_cannot_be_loaded_at_all_says_why(folders):
    class Hopeless(engines()):
        def start(self):
            if self.model.endswith("two"):
                self._spoil("no such tensor")
            else:
                super().start()

    with fleet(folders, Hopeless, lazy=True) as running:
        assert ask(running, "one").status_code == 200
        failed = ask(running, "two")
        assert (
            failed.status_code == 503
            and "the model cannot be loaded: no such tensor" in failed.json()["error"]["message"]
        )
        assert ask(running, "one").status_code == 200 and running.server.fatal is None, (
            "the others serve on"
        )


def test_a_model_that_cannot_be_loaded_at_the_start_ends_the_server(folders):
    class Hopeless(engines()):
        def start(self):
            self._spoil("no such device")

    with fleet(folders, Hopeless) as running:
        wait_for(lambda: running.server.fatal, "the end")
        assert "no such device" in str(running.server.fatal)


def test_a_model_is_never_unloaded_while_it_answers(folders):
    """The newcomer waits until the endless answer is cancelled."""
    with (
        fleet(folders, engines(), lazy=True, max_loaded=1) as running,
        ThreadPoolExecutor() as pool,
    ):
        begun = threading.Event()
        leave = threading.Event()

        def listen():
            with running.client.stream(
                "POST",
                "/v1/completions",
                json={"model": "one", "prompt": "never ends", "stream": True},
            ) as answer:
                for _ in answer.iter_lines():
                    begun.set()
                    if leave.wait(0.001):
                        return

        reader = pool.submit(listen)
        assert begun.wait(DEADLINE)
        waiting = pool.submit(ask, running, "two")
        wait_for(lambda: running.service.by_name["two"].holds == 1, "the newcomer")
        assert states(running) == ["ready", "unloaded", "unloaded"] and not waiting.done()
        leave.set()
        reader.result(DEADLINE)
        assert waiting.result(DEADLINE).status_code == 200
        assert states(running) == ["unloaded", "ready", "unloaded"]


def test_every_api_knows_all_models(folders):
    with fleet(folders, engines(), lazy=True) as running:
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        assert running.post("/v1/chat/completions", model="two", **chat).json()["model"] == "two"
        assert (
            running.post("/v1/messages", model="three", max_tokens=5, **chat).json()["model"]
            == "three"
        )
        assert running.post("/v1/responses", model="one", input="hello").json()["model"] == "one"
        assert running.post("/api/chat", model="two", stream=False, **chat).json()["model"] == "two"
        assert [model["name"] for model in running.client.get("/api/tags").json()["models"]] == [
            "one",
            "two",
            "three",
        ]


def test_a_real_engine_ends_when_another_needs_its_place(folders):
    with fleet(
        folders[:2], EngineClient, lazy=True, max_loaded=1, engine={"max_num_seqs": 2}
    ) as running:
        texts = [
            ask(running, name, temperature=0).json()["choices"][0]["text"]
            for name in ("one", "two")
        ]
        assert texts[0] == texts[1] and states(running) == ["unloaded", "ready"], (
            "the weights are the same"
        )
        first, second = (engine.process for engine in running.server.engines)
        assert not first.is_alive() and second.is_alive()


# -- the shares ------------------------------------------------------------------------------------


def gpu(fraction=None):
    return Settings(model=f"m{fraction}", engine={"memory_fraction": fraction} if fraction else {})


def test_models_on_a_gpu_get_equal_parts_one_above_the_other():
    shares = MemoryShares(3, "cuda:0")
    first, second = Settings(model="a"), Settings(model="b")
    assert shares.grant(first, [])["memory_fraction"] == pytest.approx(0.3)
    assert shares.fits(second, [first])
    assert shares.grant(second, [first])["memory_fraction"] == pytest.approx(0.6), (
        "the device may be so full after it"
    )
    assert shares.grant(first, [], whole=True)["memory_fraction"] == pytest.approx(0.9)
    assert not shares.fits(second, [first]), "one that was given everything leaves nothing"


def test_a_fraction_that_was_asked_for_is_each_models_own():
    shares = MemoryShares(2, "cuda")
    first, second = gpu(0.6), Settings(model="b", engine={"memory_fraction": 0.6})
    shares.grant(first, [])
    assert not shares.fits(second, [first])


def test_on_a_cpu_weights_must_fit_into_what_is_free(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    settings = Settings(model=str(tmp_path))
    assert weights_in_memory(settings) == 2000, "16 bits become 32"
    assert MemoryShares(2, "cpu", available=2300).fits(settings, [])
    assert not MemoryShares(2, "cpu", available=2100).fits(settings, [])
    (tmp_path / "config.json").write_text(
        json.dumps({"dtype": "bfloat16", "quantization_config": {}})
    )
    assert weights_in_memory(settings) == 1000
