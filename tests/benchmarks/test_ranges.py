"""Medians of earlier runs are kept, and shown as ranges."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "workshop"))

import ranges

from flyweight.report.blocks import Table

ROW = {
    "bench": "latency",
    "status": "ok",
    "backend": "native",
    "kv_dtype": "bfloat16",
    "workload": "decode_bound",
    "model": "a",
    "scheme": "int4",
    "ttft_ms_last": 5.0,
    "overall_tok_s": 1000.0,
}


def rows_of(run, day, rates):
    environment = {
        "bench": "environment",
        "id": run,
        "commit": "c",
        "device": "a GPU",
        "copy_gb_s": 4000.0 + day,
    }
    time = f"2026-01-{day:02}T00:00:00"
    rows = [
        ROW | {"environment": run, "time": time, "repeat": i, "decode_tok_s": rate}
        for i, rate in enumerate(rates)
    ]
    return "".join(json.dumps(row) + "\n" for row in (environment, *rows))


def test_runs_that_are_only_in_the_history_are_kept(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
            capture_output=True,
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranges, "FILES", (Path("rows.jsonl"),))
    monkeypatch.setattr(ranges, "KEPT", Path("kept.jsonl"))
    git("init", "-q")
    for run, day, rates in (("one", 1, (100.0, 300.0, 110.0)), ("two", 2, (120.0,))):
        Path("rows.jsonl").write_text(rows_of(run, day, rates))
        git("add", ".")
        git("commit", "-qm", run)
    Path("rows.jsonl").write_text(rows_of("three", 3, (90.0,)))
    ranges.main()
    ranges.main()
    kept = ranges.read()
    assert [(one["run"], one["decode_tok_s"], one["repeats"]) for one in kept] == [
        ("one", 110.0, 3),
        ("two", 120.0, 1),
        ("three", 90.0, 1),
    ]
    *_, table = ranges.spread(kept)
    assert isinstance(table, Table) and table.rows == (
        (
            "a",
            "int4",
            "decode_bound",
            "90",
            "90 – 120",
            "5.0",
            "5.0 – 5.0",
            "1,000",
            "1,000 – 1,000",
            "3",
            "3",
        ),
    )


def test_other_engines_sampled_runs_and_single_runs_make_no_range():
    text = rows_of("one", 1, (1.0,))
    for change in (
        dict(backend="vllm"),
        dict(sampling="top_k=5"),
        dict(kv_dtype="fp8"),
        dict(workload="own"),
        dict(status="failed"),
    ):
        rows = [json.loads(line) for line in text.splitlines()]
        assert (
            ranges.lines_of(
                "".join(
                    json.dumps(row | change if row["bench"] == "latency" else row) + "\n"
                    for row in rows
                )
            )
            == []
        )
    assert ranges.spread(ranges.lines_of(text)) == []
