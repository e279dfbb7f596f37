"""What a user meets when a GGUF file is imported: room, file modes, sampling, no false alarms."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf_files import tiny_model, write_gguf
from safetensors import SafetensorError

from flyweight.checkpoint import Checkpoint, gguf_import, writer
from flyweight.checkpoint.gguf_import import convert
from flyweight.errors import ResourceError

FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", tiny_model("llama"))


@pytest.fixture
def umask():
    """Set it for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_every_file_has_the_mode_that_the_umask_gives(file, tmp_path, umask, mask, mode):
    umask(mask)
    folder = convert(file, tmp_path / "out")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {mode}
    assert os.umask(mask) == mask


def test_a_disk_without_room_is_told_before_the_work(file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_import.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(ResourceError) as error:
        convert(file, tmp_path / "cache" / "out")
    assert "model.gguf takes 0 MB as a folder, but only 0 MB are free" in str(error.value)
    assert "make room" in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def fail_in_weights(monkeypatch):
    def save(*_, **__):
        raise SafetensorError(FULL)

    monkeypatch.setattr(writer, "save_file", save)


def fail_in_tokenizer(monkeypatch):
    original = Path.write_text

    def write(self, *arguments, **options):
        if self.name == "tokenizer.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write)


@pytest.mark.parametrize("fail", [fail_in_weights, fail_in_tokenizer])
def test_a_disk_that_fills_up_on_the_way_is_one_line_and_leaves_nothing(
    file, tmp_path, monkeypatch, fail
):
    fail(monkeypatch)
    with pytest.raises(ResourceError) as error:
        convert(file, tmp_path / "out")
    assert "No space left on device" in str(error.value) and "make room" in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_a_large_vocabulary_is_not_taken_for_an_old_mistral(file, tmp_path, monkeypatch, caplog):
    """transformers warns of a wrong pattern in large tokenizers whose config has no version."""
    import transformers

    folder = convert(file, tmp_path / "out")
    warned = []
    monkeypatch.setattr(
        transformers.tokenization_utils_tokenizers.logger,
        "warning",
        lambda text, *_: warned.append(text),
    )
    raw = Checkpoint(folder).tokenizer().backend_tokenizer
    raw.add_tokens([f"<extra {number}>" for number in range(100_001)])
    raw.save(str(folder / "tokenizer.json"))
    tokens = Checkpoint(folder).tokenizer().encode("hello world 123")
    assert warned == []
    assert tokens == raw.encode("hello world 123").ids


@pytest.mark.parametrize(
    ("family", "pre", "expected"),
    [
        ("llama", "smollm", {"temperature": 0.2, "top_p": 0.9}),
        ("llama", "llama-bpe", {"temperature": 0.6, "top_p": 0.9}),
        (
            "qwen2",
            "qwen2",
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        ("qwen3", "qwen2", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ("llama", "gpt-2", {"temperature": 0.7, "top_p": 0.95}),
    ],
)
def test_a_model_that_answers_gets_the_sampling_of_its_family(tmp_path, family, pre, expected):
    file = write_gguf(tmp_path / "model.gguf", tiny_model(family), pre=pre)
    found = Checkpoint(convert(file, tmp_path / "out", dtype=torch.float16)).generation_config
    assert found.items() >= (expected | {"do_sample": True}).items()
    assert found.keys() - expected.keys() <= {
        "do_sample",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


def test_quantizing_a_low_bit_file_says_that_it_was_rounded_before(tmp_path):
    from gguf import GGMLQuantizationType

    from flyweight.commands.quantize import rounded_before

    low = write_gguf(tmp_path / "low.gguf", tiny_model("llama"), quantize=GGMLQuantizationType.Q4_1)
    note = rounded_before(str(convert(low, tmp_path / "low")))
    assert "comes from low.gguf, which stores weights in 5.0 bits (mostly Q4_1)" in note
    full = write_gguf(tmp_path / "full.gguf", tiny_model("llama"))
    folder = convert(full, tmp_path / "full")
    assert rounded_before(str(folder)) is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    assert "is quantized already (awq)" in rounded_before(str(folder))
