"""What a run may go on with: its own blocks, whole, made from files that nobody has touched
since."""

import hashlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint.writer import previous_of
from flyweight.errors import OptionError
from flyweight.quant.identity import weights_digest
from flyweight.quant.quantize import quantize


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def begun(model, text, tmp_path):
    """Two of three blocks are made."""
    make(model, text, tmp_path / "out", blocks=2)
    return tmp_path / ".out.work"


def make(model, text, output, **options):
    seen = []
    quantize(
        model,
        "gptq-int4",
        output,
        calibration=str(text),
        samples=4,
        length=48,
        device="cpu",
        listen=lambda event: seen.append((event.kind, event.block)),
        **options,
    )
    return [item for item in seen if item[0] in ("resumed", "finished")]


def digest(folder):
    return hashlib.sha256(
        b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.iterdir()))
    ).hexdigest()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_weights_that_changed_in_the_middle_are_not_continued(model, text, tmp_path, begun):
    weights = next(model.glob("*.safetensors"))
    flip(weights, weights.stat().st_size // 2)
    with pytest.raises(OptionError, match="unfinished work of another run"):
        make(model, text, tmp_path / "out", resume=True)


def test_files_that_were_written_again_are_not_continued(model, text, tmp_path, begun):
    """A digest of slices may miss a change; the time of the file does not."""
    weights = next(model.glob("*.safetensors"))
    facts = weights.stat()
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    with pytest.raises(
        OptionError, match=r"another weight files\); repeat that command, or run without --resume"
    ):
        make(model, text, tmp_path / "out", resume=True)


def test_a_damaged_block_is_made_again_to_the_same_bytes(model, text, tmp_path, begun):
    make(model, text, tmp_path / "whole")
    block = begun / "block-0001.safetensors"
    flip(block, block.stat().st_size - 5)
    with pytest.warns(
        UserWarning,
        match=r"block-0001\.safetensors: damaged since it was written; it is made again",
    ):
        events = make(model, text, tmp_path / "out", resume=True)
    assert events == [("resumed", 0), ("finished", 1), ("finished", 2)]
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_a_torn_note_is_one_clear_line(model, text, tmp_path, begun):
    note = begun / "run.json"
    note.write_text(note.read_text()[:20])
    with pytest.raises(
        OptionError,
        match=r"run\.json: damaged \(.*\), so what is beside it cannot be continued; run without",
    ):
        make(model, text, tmp_path / "out", resume=True)
    assert make(model, text, tmp_path / "out") == [
        ("finished", 0),
        ("finished", 1),
        ("finished", 2),
    ]


def test_a_finished_model_of_older_weights_is_not_taken_for_done(model, text, tmp_path):
    make(model, text, tmp_path / "out")
    assert make(model, text, tmp_path / "out", resume=True) == []
    weights = next(model.glob("*.safetensors"))
    later = (tmp_path / "out" / "flyweight.json").stat().st_mtime_ns + 10**9
    os.utime(weights, ns=(later, later))
    with pytest.raises(OptionError, match="exists already; pass --overwrite"):
        make(model, text, tmp_path / "out", resume=True)


def test_the_digest_sees_every_part_of_a_large_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(8) + bytes(6 << 20))
    source = type("Source", (), {"config": {}, "files": [file]})
    before = weights_digest(source)
    with file.open("rb+") as stream:
        stream.seek(3 << 20)
        stream.write(b"x" * (256 << 10))
    assert weights_digest(source) != before


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_an_interrupted_overwrite_left_is_dealt_with_before_the_work(
    model, text, tmp_path, overwrite
):
    """Cut off between its renames: the old model is back, and is not overwritten unasked after
    hours of work."""
    output = tmp_path / "out"
    old = previous_of(output)
    for folder in (old, tmp_path / ".out.partial"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    if overwrite:
        assert len(make(model, text, output, overwrite=True)) == 3
        assert (output / "flyweight.json").exists() and not old.exists()
    else:
        with pytest.raises(OptionError, match="exists already; pass --overwrite"):
            make(model, text, output)
        assert (output / "config.json").read_text() == "{}" and not old.exists()
