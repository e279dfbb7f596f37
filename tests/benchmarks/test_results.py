"""`make results`: figures go where the documents mark their places, and nowhere else."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "results.py"
pytest.importorskip("matplotlib", reason="figures need matplotlib")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The script as a module, in a repository of two rows."""
    monkeypatch.chdir(tmp_path)
    rows = [{"bench": "environment", "id": "e", "device": "a GPU"}]
    for scheme, rate in (("bf16", 276.4), ("int4", 579.8)):
        rows.append({"bench": "latency", "model": "qwen3-8b", "scheme": scheme, "checkpoint": "random:0", "backend": "native",
                     "kv_dtype": "bfloat16", "workload": "decode_bound", "batch": 1, "input": 256, "output": 512,
                     "latency_s": 512 / rate, "decode_tok_s": rate, "share_of_limit": 0.681})
    common = [{"schema": 1, "run_id": str(i), "time": None, "environment": "e", "status": "ok"} for i in range(len(rows))]
    Path("benchmarks/h200").mkdir(parents=True)
    lines = [json.dumps(one | row) + "\n" for one, row in zip(common, rows, strict=True)]
    Path("benchmarks/h200/latency.jsonl").write_text("".join(lines))
    Path("docs").mkdir()
    Path("README.md").write_text("# By hand\n\n<!-- rows: headline -->\nold\n<!-- end -->\n\nby hand\n")
    Path("docs/quantize.md").write_text("<!-- rows: quantizing -->\n<!-- end -->\n<!-- rows: quality -->\n<!-- end -->\n")
    Path("docs/performance.md").write_text("<!-- rows: limits -->\n<!-- end -->\n\n<!-- rows: steps -->\n<!-- end -->\n")
    specification = importlib.util.spec_from_file_location("results_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_documents_get_their_figures_from_the_rows_and_keep_their_prose(results):
    results.main()
    text = Path("README.md").read_text()
    assert text.startswith("# By hand") and text.endswith("by hand\n") and "old" not in text
    assert "| 276" in text and "580" in text and "68%" in text
    performance = Path("docs/performance.md").read_text()
    assert "qwen3-8b on a GPU, by workload" in performance and "Not measured yet." in performance
    assert Path("docs/results/h200.html").exists() and Path("docs/results/decode-speed-at-batch-1.png").exists()
    before = {path: path.read_bytes() for path in Path(".").rglob("*.md")}
    results.main()
    assert {path: path.read_bytes() for path in Path(".").rglob("*.md")} == before


def test_a_file_that_was_cut_off_before_its_first_row_is_passed_over(results):
    first = Path("benchmarks/h200/latency.jsonl").read_text().splitlines()[0]
    Path("benchmarks/h200/002-qwen3-4b.jsonl").write_text(first.replace('"e"', '"f"') + "\n")
    Path("benchmarks/h200/001-vptq.jsonl").write_text("")
    results.main()
    assert not Path("docs/results/002.md").exists()


def test_times_of_quantizing_say_whether_they_are_of_a_whole_model(results):
    row = {"schema": 1, "bench": "quantize", "time": None, "environment": "e", "status": "ok", "scheme": "gptq-int4",
           "model": "qwen3-8b", "peak_gpu_gb": 7.31, "peak_host_gb": 2.53, "blocks": 4}
    rows = [row | {"run_id": "a", "seconds": 57.5, "extrapolated": True},
            row | {"run_id": "b", "seconds": 63.9, "extrapolated": False},
            row | {"run_id": "c", "seconds": 900.0}]  # of the quality benchmark
    lines = [Path("benchmarks/h200/latency.jsonl").read_text().splitlines()[0], *map(json.dumps, rows)]
    Path("benchmarks/h200/quantize_speed.jsonl").write_text("\n".join(lines) + "\n")
    results.main()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in Path("docs/quantize.md").read_text().splitlines()
             if line.startswith("| gptq-int4")]
    assert cells == [["gptq-int4", "58", "from 4 blocks", "7.3", "2.5"],
                     ["gptq-int4", "64", "whole, from disk to disk", "7.3", "2.5"]]


def test_prompts_through_zeros_stand_beside_random_weights_and_the_peer(results):
    first = {"schema": 1, "bench": "prefill", "time": None, "environment": "e", "status": "ok", "model": "preset:qwen3-8b:int4",
             "case": "16384"}
    for i, (passes, time) in enumerate((("captured", 484.2), ("captured, weights of zeros", 404.7), ("one by one", 500.0))):
        with Path("benchmarks/h200/latency.jsonl").open("a") as file:
            file.write(json.dumps(first | {"run_id": f"p{i}", "passes": passes, "step_ms": time}) + "\n")
    several = first | {"run_id": "q", "case": "8192x32", "passes": "captured, weights of zeros", "step_ms": 9.0}
    with Path("benchmarks/h200/latency.jsonl").open("a") as file:
        file.write(json.dumps(several) + "\n")
    (table,) = results.zeros(results.latest(results.read(results.files("*.jsonl"))))
    assert table.rows == (("qwen3-8b", "int4", "16,384", "484.2", "404.7", "–"),)
