"""Calibration samples: windows of a text, drawn by seed."""

import json

import pytest
import torch

from flyweight.errors import MissingPackageError, OptionError
from flyweight.quant.cache import ActivationCache, Budget
from flyweight.quant.calibration import BUILT_IN, draw_samples, read_text


def test_samples_are_windows_of_the_text_and_do_not_overlap():
    samples = draw_samples(list(range(100)), count=5, length=10, seed=1, source="here")
    starts = samples.tokens[:, 0].tolist()
    assert len(set(starts)) == 5 and all(start % 10 == 0 for start in starts)
    assert all(row.tolist() == list(range(row[0], row[0] + 10)) for row in samples.tokens)


def test_the_seed_decides_which():
    one, same, other = (
        draw_samples(list(range(1000)), count=5, length=10, seed=seed, source="x")
        for seed in (1, 1, 2)
    )
    assert one.digest == same.digest != other.digest


def test_a_beginning_token_is_part_of_the_length():
    samples = draw_samples(list(range(2, 100)), count=3, length=10, seed=0, source="x", bos=1)
    assert samples.tokens.shape == (3, 10) and (samples.tokens[:, 0] == 1).all()


def test_a_short_text_gives_what_it_has():
    assert draw_samples(list(range(35)), count=8, length=10, seed=0, source="x").tokens.shape == (
        3,
        10,
    )
    with pytest.raises(OptionError, match="9 tokens are too few for one sample of 10"):
        draw_samples(list(range(9)), count=8, length=10, seed=0, source="x")


def test_the_built_in_text_is_long_and_varied():
    text = read_text(BUILT_IN)
    assert 40_000 < len(text) < 110_000
    assert all(part in text for part in ("Alice", "def ", "Assistant:", "SELECT"))


def test_json_lines_may_be_texts_or_chats(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"text": "first"},
        {
            "messages": [
                {"role": "user", "content": "second"},
                {"role": "assistant", "content": "third"},
            ]
        },
        {"turns": ["fourth", "fifth"]},
        "sixth",
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_text(str(path)) == "first\n\nsecond\nthird\n\nfourth\nfifth\n\nsixth"
    path.write_text('{"text": "fine"}\n{"title": "no text"}')
    with pytest.raises(OptionError, match="line 2 has none of text"):
        read_text(str(path))
    path.write_text("{broken")
    with pytest.raises(OptionError, match="line 1 is not JSON"):
        read_text(str(path))


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="no such file"):
        read_text(str(tmp_path / "nowhere.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(OptionError, match="UTF-8"):
        read_text(str(tmp_path / "binary.txt"))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install datasets"):
        read_text("owner/dataset")


def test_the_cache_gives_back_what_was_put_in_wherever_it_lies(tmp_path):
    cache = ActivationCache(
        torch.device("cpu"), Budget(host_bytes=2 * 3 * 4 * 5 * 2), tmp_path, "x"
    )
    batches = [torch.randn(3, 4, 5).to(torch.bfloat16) for _ in range(4)]
    for batch in batches:
        cache.append(batch)
    assert cache.on_disk == 2 and len(list(tmp_path.iterdir())) == 2
    assert all(torch.equal(a, b) for a, b in zip(cache, batches, strict=True))
    cache[3] = batches[0]
    assert torch.equal(cache[3], batches[0])
    cache.close()
    assert not list(tmp_path.iterdir())
