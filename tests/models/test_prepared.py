"""Packed weights of a CPU are kept between starts: the same numbers come back, and only while all
that they were made of is the same.
"""

import os

import pytest
import torch

from flyweight.checkpoint import prepared
from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import OptionError
from flyweight.kernels.native import kept, library
from flyweight.models import native
from flyweight.models.narrow_head import narrow_head
from flyweight.models.presets import PresetWeights
from flyweight.models.random_folder import write_preset

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")

IS_WANTED = prepared.is_wanted
TINY = dict(
    model_type="qwen2",  # with biases
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=64,
    dtype="float32",
    tie_word_embeddings=False,
)


class Filed(PresetWeights):
    """Random weights that say which files they come from."""

    folder = "some/folder"
    fingerprint = "some files"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "folder", lambda: tmp_path / "prepared")
    monkeypatch.setattr(prepared, "LEAST_BYTES", 0)
    monkeypatch.setattr(prepared, "SPARE_BYTES", 0)
    monkeypatch.setattr(prepared, "is_wanted", lambda path: True)


@pytest.fixture
def packings(monkeypatch):
    """Counts how often weights are packed."""
    counted = []
    original = native.read_parts

    def count(*arguments, **options):
        counted.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(native, "read_parts", count)
    return counted


def tensors_of(parts):
    found = []
    value = kept.describe(parts, found)
    return value, found


def assert_same(parts, others):
    value, tensors = tensors_of(parts)
    other_value, other_tensors = tensors_of(others)
    assert value == other_value
    assert all(map(torch.equal, tensors, other_tensors))


def get(weights, **options):
    return native.prepared_parts(weights, exact=False, head_bits=None, **options)


@pytest.mark.parametrize("scheme", ["int4", "w8a8", "fp16", "fp8", "vptq"])
def test_what_is_kept_comes_back_as_it_was(scheme, packings):
    first = get(Filed(TINY, scheme))
    second = get(Filed(TINY, scheme))
    assert len(packings) == 1
    assert_same(first, second)
    for weight in [*second.layers[1].weights, second.head]:
        assert weight.matrix.data == weight.tensors["data"].data_ptr() != 0
        assert weight.matrix.data % 64 == 0, "kernels read whole vectors"


def test_only_what_is_loaded_again_is_kept(monkeypatch):
    monkeypatch.setattr(prepared, "is_wanted", IS_WANTED)
    path = prepared.file_of("model", ["key"])
    tensor = torch.zeros(1000)
    assert not prepared.write(path, {}, [tensor]) and prepared.files() == []
    assert prepared.write(path, {}, [tensor]) and prepared.files() == [path]
    prepared.remove("model")
    assert not prepared.write(path, {}, [tensor]), "forgotten with the model"


def test_weights_that_are_no_files_are_not_kept(packings):
    get(PresetWeights(TINY, "int4"))
    assert prepared.files() == [] and len(packings) == 1


def test_other_files_other_bits_of_the_head_and_exact_are_packed_anew(packings):
    get(Filed(TINY, "int4"))
    changed = Filed(TINY, "int4")
    changed.fingerprint = "the same files, later"
    get(changed)
    get(narrow_head(Filed(TINY, "int4"), "int8"))
    native.prepared_parts(Filed(TINY, "int4"), exact=True, head_bits=None)
    assert len(packings) == len(prepared.files()) == 4
    prepared.remove("some/folder")
    assert prepared.files() == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:20], lambda _: b""])
def test_a_file_that_was_cut_is_made_again(damage, packings):
    get(Filed(TINY, "int4"))
    (path,) = prepared.files()
    size = path.stat().st_size
    path.write_bytes(damage(path.read_bytes()))
    assert_same(get(Filed(TINY, "int4")), get(Filed(TINY, "int4")))
    assert len(packings) == 2 and path.stat().st_size == size


def test_the_longest_unused_goes_when_room_is_needed(monkeypatch):
    paths = [prepared.file_of(f"model-{i}", ["key"]) for i in range(3)]
    tensor = torch.zeros(1 << 18, dtype=torch.uint8)
    monkeypatch.setenv(prepared.LIMIT, str(2.5 * (1 << 18) / 1e9))
    for age, path in zip((100, 200), paths, strict=False):
        assert prepared.write(path, {}, [tensor])
        os.utime(path, (age, age))
    assert prepared.read(paths[0]) is not None, "used: now the younger one"
    assert prepared.write(paths[2], {}, [tensor])
    assert prepared.files() == sorted([paths[0], paths[2]])
    assert not prepared.write(paths[1], {}, [tensor, tensor]), "more than its share"


def test_the_limit_is_a_number_and_none_turns_it_off(monkeypatch, packings):
    monkeypatch.setenv(prepared.LIMIT, "0")
    get(Filed(TINY, "int4"))
    assert prepared.files() == []
    monkeypatch.setenv(prepared.LIMIT, "some")
    with pytest.raises(OptionError, match="FLYWEIGHT_PREPARED_GB is 'some'"):
        get(Filed(TINY, "int4"))


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "prepared").write_text("a file is in the way")
    get(Filed(TINY, "int4"))


def test_a_folder_changes_its_fingerprint_with_its_files(tmp_path, monkeypatch):
    from flyweight.models import presets

    monkeypatch.setitem(presets.PRESETS, "tiny", TINY)
    folder = write_preset("preset:tiny:int4", tmp_path / "model")
    before = Checkpoint(folder).fingerprint
    assert Checkpoint(folder).fingerprint == before
    file = Checkpoint(folder).files[0]
    os.utime(file, (1, 1))
    assert Checkpoint(folder).fingerprint != before
