"""The benchmarks of 8-bit caches, prompts, heads and ranges, with models of a few weights: rows,
scoring.
"""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "benchmarks/quality", "tests/quant")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import grid_ranges  # noqa: E402
import kv_cache  # noqa: E402
import needle  # noqa: E402
import prompt_dtype  # noqa: E402
import served_head  # noqa: E402
import serving  # noqa: E402
from tiny_model import TEXT, make_tiny_model  # noqa: E402

import flyweight  # noqa: E402
from flyweight.checkpoint.reader import Checkpoint  # noqa: E402
from flyweight.engine.tokenizer import tokenizer_of  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("needle") / "model", max_position_embeddings=2048
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rows_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["bench"] != "environment"]


def test_a_needle_stands_between_lines_at_its_depth(model):
    haystack = needle.Haystack.of(tokenizer_of(Checkpoint(model)), TEXT)
    for depth in (0.0, 0.3, 1.0):
        prompt = haystack.prompt(12345, depth, 1500)
        assert 1440 <= len(prompt) <= 1500
        written = haystack.tokenizer.decode(prompt)
        before, after = written.split(needle.NEEDLE.format(number=12345))
        body = len(written) - len(needle.BEFORE) - len(needle.PLAIN)
        assert abs((len(before) - len(needle.BEFORE)) / body - depth) < 0.05
        assert before.endswith("\n") and after.endswith(needle.PLAIN)
        assert all(line in TEXT for line in before.splitlines()[2:])


def test_a_text_that_is_too_short_is_said_so(model):
    haystack = needle.Haystack.of(tokenizer_of(Checkpoint(model)), TEXT[:400])
    with pytest.raises(AssertionError, match="fewer than 1500 tokens"):
        haystack.prompt(12345, 0.5, 1500)


def test_needles_are_asked_for_with_every_cache(model, text, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    numbers = dict(needle.needles(3, 0))
    assert list(numbers) == [1.0, 0.5, 0.0]
    generate = needle.LLM.generate
    asked = []

    def told(self, prompts, **options):
        """The model's own work, and of the first needle alone an answer that is right."""
        (output,) = generate(self, prompts, **options)
        asked.append((self.kv_dtype, output.completions[0].cached_tokens))
        right = len(asked) % 3 == 1
        object.__setattr__(
            output.completions[0], "text", f"It is {numbers[1.0]}." if right else "no"
        )
        return [output]

    monkeypatch.setattr(needle.LLM, "generate", told)
    words = [str(out), "--model", str(model), "--text", str(text), "--length", "600"]
    needle.main([*words, "--depths", "3", "--device", "cpu"])
    rows = rows_of(out)
    assert [row["kv_dtype"] for row in rows] == ["float32", "fp8", "int8"]
    assert [row["found"] for row in rows] == [[True, False, False]] * 3
    assert rows[0]["share"] == pytest.approx(1 / 3) and rows[0]["window"] == 600
    assert [kv for kv, _ in asked] == ["float32"] * 3 + ["fp8"] * 3 + ["int8"] * 3
    assert all(cached > 200 for _, cached in asked[1::3]), "half the text is the first prompt's"


def test_decoding_is_measured_with_each_cache(model, tmp_path):
    out = tmp_path / "rows.jsonl"
    kv_cache.main([str(out), "--model", str(model), "--case", "2x40", "--kv", "model", "fp8"])
    rows = rows_of(out)
    assert [(row["kv_dtype"], row["batch"], row["input"]) for row in rows] == [
        ("float32", 2, 40),
        ("fp8", 2, 40),
    ]
    assert all(row["decode_tok_s"] > 0 for row in rows)
    assert rows[1]["kv_gb"] / rows[1]["kv_tokens"] < 0.3 * rows[0]["kv_gb"] / rows[0]["kv_tokens"]


def test_first_tokens_are_measured_with_each_type_of_prompt(tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["--model", "preset:tiny:int4", "--kinds", "int8", "--input", "280", "--repeats", "1"]
    prompt_dtype.main([str(out), *words])
    assert [row["scheme"] for row in rows_of(out)] == ["int4", "int4, prompts int8"]
    assert all(row["ttft_ms_last"] > 0 for row in rows_of(out))


def test_an_8_bit_head_is_measured_beside_the_stored_one(model, text, tmp_path):
    out = tmp_path / "rows.jsonl"
    quantized = tmp_path / "rtn"
    flyweight.quantize(model, "rtn-int4", quantized)
    words = [str(out), "--text", str(text), "--original", str(model), "--model", str(quantized)]
    served_head.main(
        [*words, "--head", "int8", "int4", "--tokens", "192", "--window", "64", "--device", "cpu"]
    )
    stored, eight, four = rows_of(out)
    assert [row["head"] for row in (stored, eight, four)] == ["stored", "int8", "int4"]
    assert stored["kl"] > 0 and stored["kl_growth"] == 0
    assert eight["kl_growth"] == pytest.approx(eight["kl"] / stored["kl"] - 1, abs=1e-3)
    assert abs(eight["kl_growth"]) < 0.05 and eight["kl"] < four["kl"], "four bits are coarser"


def test_ranges_are_compared_on_the_same_windows(model, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT * 20)
    out = tmp_path / "grid-ranges.jsonl"
    grid_ranges.main(
        [
            str(out),
            "--model",
            str(model),
            "--text",
            str(tmp_path / "text.txt"),
            "--windows",
            "2",
            "--bits",
            "4",
            "3",
            "--group-size",
            "32",
            "--device",
            "cpu",
        ]
    )
    rows = [
        row for row in map(json.loads, out.read_text().splitlines()) if row["bench"] == "quality"
    ]
    assert [(row["bits"], row["ranges"]) for row in rows] == [
        (bits, ranges) for bits in (4, 3) for ranges in ("minmax", "squares", "fourth")
    ]
    assert {row["tokens"] for row in rows} <= {2 * 511, 2 * 512}  # without and with a BOS token
    for whole, squares, fourth in (rows[:3], rows[3:]):
        assert squares["weight_error"] < fourth["weight_error"] < whole["weight_error"]
        assert whole["kl_change"] == 0 and fourth["kl"] > 0
    assert serving.grid_ranges([tmp_path]).count("\n") == 1 + len(rows)
