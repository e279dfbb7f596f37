"""Wherever a disk gets full while a model is quantized: one line, no half folder, and it goes on
from there once there is room.
"""

import re

import pytest
from full_disk import MESSAGE, full_after
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint import writer
from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import ResourceError
from flyweight.quant import store
from flyweight.quant.quantize import quantize

MOST = 1 << 40


def make(model, text, output, **options):
    chosen = {"calibration": str(text), "samples": 2, "length": 16, "device": "cpu"} | options
    return quantize(model, "gptq-int4", output, **chosen)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(TEXT)
    return make_tiny_model(folder / "tiny")


def files(folder):
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "flyweight.json"
    }


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.45, 0.6, 0.75, 0.9, 0.99])
def test_a_disk_that_gets_full_loses_nothing(model, tmp_path, monkeypatch, share):
    text = model.parent / "text.txt"
    modules = (store, writer)
    with monkeypatch.context() as patch:
        disk = full_after(patch, tmp_path, MOST, *modules)
        make(model, text, tmp_path / "whole")
        written = MOST - disk.room
    with monkeypatch.context() as patch:
        disk = full_after(patch, tmp_path, int(share * written), *modules)
        with pytest.raises(ResourceError) as error:
            make(model, text, tmp_path / "out")
        assert MESSAGE in str(error.value) and "\n" not in str(error.value), error.value
        assert disk.refused and not (tmp_path / "out").exists()
        assert list(tmp_path.rglob("*.half*")) == []
        disk.room = MOST
        make(model, text, tmp_path / "out", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_the_folder_of_before_stays_until_the_new_one_is_whole(model, tmp_path, monkeypatch):
    text = model.parent / "text.txt"
    make(model, text, tmp_path / "out")
    before = files(tmp_path / "out")
    full_after(monkeypatch, tmp_path, 1000, store, writer)
    with pytest.raises(ResourceError, match=re.escape(MESSAGE)):
        make(model, text, tmp_path / "out", overwrite=True, seed=3)
    assert files(tmp_path / "out") == before
    Checkpoint(tmp_path / "out")
