"""`flyweight models`, `rm` and `ps`: what is on this machine, what runs, and what goes when it is
told to.
"""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from flyweight.cli import main
from flyweight.server import registry


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """One model of ours and one of the hub's."""
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "ours"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False
    )
    ours = tmp_path / "ours" / "models" / "tiny-model"
    ours.mkdir(parents=True)
    (ours / "config.json").write_text("{}")
    (ours / "model.safetensors").write_bytes(bytes(1000))
    (ours.parent / ".unfinished").mkdir()
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--owner--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "b1").write_bytes(bytes(500))
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "model.safetensors").symlink_to(repo / "blobs" / "b1")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return tmp_path


def run(capsys, *arguments):
    with contextlib.suppress(SystemExit):
        main(list(arguments))
    captured = capsys.readouterr()
    return captured.out, captured.err


def listed(capsys):
    return json.loads(run(capsys, "list", "--json")[0])


def test_models_of_both_caches_are_listed(cache, capsys):
    out, _ = run(capsys, "models")
    assert [line.split()[0] for line in out.splitlines()] == ["model", "owner/name", "tiny-model"]
    assert {(model["name"], model["source"], model["bytes"]) for model in listed(capsys)} == {
        ("tiny-model", "flyweight", 1002),
        ("owner/name", "hub", 500),
    }


@pytest.mark.parametrize("verb", ["list", "ps"])
def test_a_list_does_not_wait_for_torch(cache, verb):
    code = (
        f"import sys\nfrom flyweight.cli import main\ntry: main([{verb!r}])\n"
        "except SystemExit: pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_an_empty_machine_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr("flyweight.checkpoint.cached.hub_models", list)
    assert "flyweight pull smollm2-135m" in run(capsys, "models")[0]


def test_rm_deletes_what_it_is_told_and_nothing_else(cache, capsys):
    out, _ = run(capsys, "rm", "tiny-model")
    assert out.startswith("tiny-model: deleted") and [
        model["name"] for model in listed(capsys)
    ] == ["owner/name"]
    assert (
        not (cache / "ours" / "models" / "tiny-model").exists()
        and (cache / "ours" / "models" / ".unfinished").exists()
    )
    run(capsys, "rm", "owner/name")
    assert listed(capsys) == [] and not (cache / "hub" / "models--owner--name").exists()


def test_rm_refuses_what_it_does_not_know_before_anything_is_gone(cache, capsys):
    _, err = run(capsys, "rm", "tiny-model", "tiny-modl")
    assert (
        "unknown cached model 'tiny-modl'; did you mean 'tiny-model'?" in err
        and len(listed(capsys)) == 2
    )
    outside = cache / "mine"
    outside.mkdir()
    _, err = run(capsys, "rm", str(outside))
    assert "unknown cached model" in err and outside.exists()


def test_ps_shows_a_server_while_it_lives_and_sweeps_up_after_a_dead_one(cache, capsys):
    facts = {
        "url": "http://127.0.0.1:9",
        "port": 9,
        "models": ["tiny"],
        "folders": [str(cache / "ours" / "models" / "tiny-model")],
    }
    dead = (
        "import os, json; from flyweight.server.registry import registered\n"
        f"with registered(json.loads({json.dumps(json.dumps(facts | {'port': 8}))})): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", dead], check=False)
    assert len(list(registry.servers_folder().glob("*.json"))) == 1, (
        "it was killed, and its file is still there"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", dead.replace("os._exit(9)", "print('on', flush=True), input()")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.stdout.readline()
    (server,) = json.loads(run(capsys, "ps", "--json")[0])
    assert (server["pid"], server["models"], server["state"]) == (
        child.pid,
        ["tiny"],
        "does not answer",
    )
    assert "does not answer" in run(capsys, "ps")[0]
    _, err = run(capsys, "rm", "tiny-model")
    assert "a server uses tiny-model; stop it first" in err
    child.communicate("\n")
    assert run(capsys, "ps")[0] == "No server runs.\n" and not list(
        registry.servers_folder().iterdir()
    )


def test_a_cache_that_cannot_be_written_keeps_nobody_from_serving(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "file"))
    with registry.registered({"port": 1}):
        assert os.getpid()
