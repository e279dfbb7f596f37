"""What a new folder may replace: an earlier model, and nothing that could be somebody's work."""

import pytest
import torch
from tiny_configs import LLAMA

from flyweight.checkpoint.convert import convert
from flyweight.checkpoint.target import check_target, place_of
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.errors import OptionError, ResourceError
from flyweight.models.random_folder import write_preset
from flyweight.quant.quantize import quantize


def write(target, value, **options):
    with CheckpointWriter(target, overwrite=True, **options) as writer:
        writer.add("model.norm.weight", torch.full((3,), float(value)))
        writer.finish(LLAMA)


@pytest.mark.parametrize("name", ["thesis.txt", "rows.jsonl", "src/main.py", ".env", "notes/a.md"])
@pytest.mark.parametrize("is_model", [False, True])
def test_a_folder_with_other_things_is_not_replaced(name, is_model, tmp_path):
    folder = tmp_path / "mine"
    if is_model:
        write(folder, 1)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("years of work")
    with pytest.raises(OptionError, match=rf"mine holds {name.split('/')[0]}.* would be lost"):
        write(folder, 2)
    assert (folder / name).read_text() == "years of work"


def test_json_alone_is_no_model(tmp_path):
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(OptionError, match=r"holds no config\.json"):
        check_target(tmp_path, overwrite=True)


@pytest.mark.parametrize("target", ["", ".", "..", "/", "../../here/inside"])
def test_the_folder_where_one_stands_is_not_replaced(target, tmp_path, monkeypatch):
    here = tmp_path / "here" / "inside"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(OptionError, match="in which this command runs"):
        write(target, 1)
    assert here.is_dir() and list((tmp_path / "here").iterdir()) == [here]


def test_a_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    here = tmp_path / "gone"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(ResourceError, match="is gone; change to another"):
        place_of("out")


def test_the_model_that_is_read_is_not_replaced(tmp_path, monkeypatch):
    folder = write_preset("preset:tiny:int4", tmp_path / "models" / "one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder)
    for target in (folder, tmp_path / "link", folder.parent):
        with pytest.raises(OptionError, match="holds the model that is read"):
            convert(folder, target, format="gptq", overwrite=True)
        with pytest.raises(OptionError, match="holds the model that is read"):
            quantize(folder, scheme="rtn-int8", output=target, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_link_stays_and_what_is_behind_it_is_replaced(tmp_path):
    write(tmp_path / "model", 1)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "new").symlink_to(tmp_path / "to come")
    write(tmp_path / "link", 2)
    write(tmp_path / "new", 3)
    assert (tmp_path / "link").readlink() == tmp_path / "model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "new", "to come"]


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("a letter")
    with pytest.raises(OptionError, match="out is a file"):
        write(tmp_path / "out", 1)
    assert (tmp_path / "out").read_text() == "a letter"
