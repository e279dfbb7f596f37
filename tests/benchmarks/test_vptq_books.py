"""What codebooks in bytes cost: a tiny model quantized by VPTQ, measured against itself and its
original.
"""

import json
import sys
from pathlib import Path

import pytest

import flyweight

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks/quality", "tests/quant")]

import serving  # noqa: E402
import vptq_books  # noqa: E402
from tiny_model import TEXT, make_tiny_model  # noqa: E402

RECIPE = """
solver = "vptq"
vector_length = 8
centroids = 64
residual_centroids = 4
refits = 1
"""
ONE_OF_TWO = """
[[layers]]
match = "model.layers.*[13579].*"
solver = "keep"
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("books")
    original = make_tiny_model(place / "model")
    recipe = place / "recipe.toml"
    assert (ROOT / "benchmarks/quality/vptq-v8.toml").read_text().endswith(ONE_OF_TWO)
    recipe.write_text(RECIPE + ONE_OF_TWO)
    flyweight.quantize(
        str(original),
        recipe=recipe,
        output=str(place / "small"),
        samples=2,
        length=32,
        device="cpu",
    )
    (place / "text.txt").write_text(TEXT)
    return place


def test_a_row_tells_what_bytes_cost_and_how_far_they_move_the_model_from_its_original(folders):
    out = folders / "vptq-books.jsonl"
    vptq_books.main(
        [
            str(out),
            "--text",
            str(folders / "text.txt"),
            "--model",
            str(folders / "small"),
            "--original",
            str(folders / "model"),
            "--tokens",
            "128",
            "--window",
            "32",
            "--device",
            "cpu",
        ]
    )
    _, row = (json.loads(line) for line in out.read_text().splitlines())
    assert row["vptq_books"] == "int8" and row["original"] == "model"
    assert 0 < row["kl"] < row["kl_original_stored"], "less than what VPTQ itself costs"
    assert row["kl_growth"] == pytest.approx(row["kl_original"] / row["kl_original_stored"] - 1)
    assert f"{100 * row['kl_growth']:+.2f} %" in serving.books([folders])
