"""What stands before the tables of documents 000 to 004."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "workshop"))

import documents

from flyweight.report.blocks import Paragraph, Table
from flyweight.report.document import named_briefly
from flyweight.report.rows import Results

ENVIRONMENTS = {"e": {"id": "e", "commit": "abcdef0123456789"}, "f": {"id": "f"}}


def row(number, bench, environment="e", **fields):
    found = {
        "schema": 1,
        "bench": bench,
        "run_id": str(number),
        "time": "2026-01-02T03:04:05",
        "environment": environment,
    }
    return found | {"status": "ok"} | fields


def text_of(blocks):
    return "\n".join(block.text for block in blocks if isinstance(block, Paragraph))


def test_kernels_say_which_way_the_ratio_goes_and_what_overlapping_is_worth():
    rows = [
        row(0, "kernel", us=1.0, torch_us=2.0, ratio=0.5, us_alone=3.0),
        row(1, "kernel", "f", us=3.0, torch_us=2.0, ratio=1.5),
    ]
    text = text_of(documents.opening("000", Results(tuple(rows), ENVIRONMENTS)))
    assert "measure.sh 000`, of commit abcdef012345 (2026-01-02), unknown (2026-01-02)" in text
    assert "below 1 is faster" in text and "mean ratio 1.00, worst 1.50, 1 of 2 below 1" in text
    assert text.endswith("one before: mean ratio 1.50, worst 1.50, 0 of 1 below 1.")
    plain = text_of(
        documents.opening(
            "001", Results((row(0, "kernel", us=1.0, torch_us=2.0, ratio=0.5),), ENVIRONMENTS)
        )
    )
    assert "after the end of" not in plain, "rows that were not timed so say nothing of it"


def test_variants_stand_beside_what_their_scheme_costs_on_real_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "quality.jsonl"
    monkeypatch.setattr(documents, "QUALITY", path)
    common = dict(
        tool="flyweight",
        model="a model",
        text="a.txt",
        tokens=5000,
        perplexity_original=10.0,
        weights="trained",
        checkpoint="c",
        bits_per_weight=8.0,
    )
    quality = [
        row(f"q{i}", "quality", None, scheme="w8a8-smooth", perplexity=value, kl=0.01, **common)
        for i, value in enumerate((10.1, 10.3))
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in quality))
    latency = [
        row(
            i,
            "latency",
            scheme=scheme,
            workload=work,
            size_gb=4.4,
            decode_tok_s=700.0,
            overall_tok_s=9000.0,
        )
        for i, (scheme, work) in enumerate(
            (s, w)
            for s in ("original", "w8a8_smooth_ptq", "other")
            for w in ("decode_bound", "high_concurrency")
        )
    ]
    blocks = documents.opening("002", Results(tuple(latency), ENVIRONMENTS))
    (table,) = (block for block in blocks if isinstance(block, Table))
    assert table.rows[0] == ("original", "4.40", "700", "9,000", "the original", "0")
    assert table.rows[1] == ("w8a8_smooth_ptq", "4.40", "700", "9,000", "+2.00 ± 1.41 %", "0.0100")
    assert table.rows[2][-2:] == ("–", "–")
    assert "a model, 5,000 tokens of a.txt" in text_of(blocks)


def test_a_backend_is_named_without_its_options():
    assert (
        named_briefly("vllm (awq, compilation_config={'mode': 0, 'sizes': [1, 8]})") == "vllm (awq)"
    )
    assert named_briefly("native (dtype=float16)") == named_briefly("native") == "native"
