"""How far figures of the same work lie apart on other GPUs and other days.

    python benchmarks/workshop/ranges.py       adds what ../h200/earlier/medians.jsonl lacks

Runs of different days are of different cards. Files of rows hold the newest run only, so this keeps
a line of medians for each run and cell: of the files as they are, and of all their versions in the
repository's history. `make results` shows the spread of the last RUNS.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from flyweight.bench.workloads import LATENCY
from flyweight.report.blocks import Block, Heading, Paragraph, Table

Line = dict[str, Any]
ROWS = Path("benchmarks/h200")
FILES = (
    ROWS / "latency-qwen3-8b.jsonl",
    ROWS / "002-qwen3-4b.jsonl",
    *(ROWS / "vllm-0.33" / f"{name}.jsonl" for name in ("models", "compiled", "workloads")),
)
KEPT = ROWS / "earlier" / "medians.jsonl"
RUNS = 6  # the last ones: older ones are of code that was slower
CELL = ("model", "scheme", "workload")
METRICS = {  # name → heading, digits
    "decode_tok_s": ("decode, tok/s", 0),
    "ttft_ms_last": ("first token, ms", 1),
    "overall_tok_s": ("all tokens/s", 0),
}


def versions(path: Path) -> Iterator[str]:
    """The file, and what it was at every commit that changed it."""
    if path.exists():
        yield path.read_text(encoding="utf-8")
    listed = ["git", "log", "--format=%H", "--", str(path)]
    commits = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    for commit in commits:
        shown = ["git", "show", f"{commit}:{path}"]
        yield subprocess.run(shown, capture_output=True, text=True).stdout


def lines_of(text: str) -> list[Line]:
    """One for each run and cell: medians over its repeats."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    environments = {row["id"]: row for row in rows if row["bench"] == "environment"}
    found: dict[tuple[Any, ...], list[Line]] = {}
    for row in filter(counts, rows):
        key = (row["environment"], *(row[name] for name in CELL))
        found.setdefault(key, []).append(row)
    return [line(environments[key[0]], key, some) for key, some in found.items()]


def counts(row: Line) -> bool:
    """Greedy runs of our engine in its own type, on the GPU that is there."""
    return (
        row["bench"] == "latency"
        and row.get("status") == "ok"
        and row.get("backend") == "native"
        and row.get("kv_dtype") == "bfloat16"
        and row.get("workload") in LATENCY
        and not row.get("sampling")
    )


def line(environment: Line, key: tuple[Any, ...], rows: list[Line]) -> Line:
    told = {name: environment.get(name) for name in ("commit", "device", "copy_gb_s")}
    figures = {name: median(row[name] for row in rows if row.get(name)) for name in METRICS}
    return {
        "run": key[0],
        "time": str(rows[0]["time"]),
        **told,
        **dict(zip(CELL, key[1:], strict=True)),
        "repeats": len(rows),
        **{name: round(value, 4) for name, value in figures.items()},
    }


def collect() -> list[Line]:
    """What is kept, and everything that is new in the files and in their history."""
    found = {identity(one): one for one in read()}
    for path in FILES:
        for text in versions(path):
            for one in lines_of(text):
                found[identity(one)] = one
    return sorted(found.values(), key=lambda one: (one["time"], *identity(one)))


def identity(one: Line) -> tuple[str, ...]:
    return (one["run"], *(one[name] for name in CELL))


def read() -> list[Line]:
    if not KEPT.exists():
        return []
    return [json.loads(text) for text in KEPT.read_text(encoding="utf-8").splitlines()]


def spread(lines: Iterable[Line]) -> list[Block]:
    """Newest figure, and the least and the most of the last runs, for each cell."""
    cells: dict[tuple[str, ...], list[Line]] = {}
    for one in sorted(lines, key=lambda one: one["time"]):
        cells.setdefault(tuple(one[name] for name in CELL), []).append(one)
    shown = {cell: runs[-RUNS:] for cell, runs in cells.items() if len(runs) > 1}
    if not shown:
        return []
    copies = [one["copy_gb_s"] for runs in shown.values() for one in runs if one.get("copy_gb_s")]
    text = (
        f"Newest figure, then the least and the most of the last runs (at most {RUNS}), each on a "
        "GPU of its own and in part of older code. "
        f"Copies by these GPUs: {min(copies):,.0f} to {max(copies):,.0f} GB/s."
    )
    headers = [word for heading, _ in METRICS.values() for word in (heading, "least – most")]
    order = list(LATENCY)
    rows = sorted(shown.items(), key=lambda one: (one[0][0], order.index(one[0][2])))
    table = Table(
        "",
        ("model", "scheme", "workload", *headers, "runs", "days"),
        tuple((*cell, *figures(runs), str(len(runs)), str(days(runs))) for cell, runs in rows),
    )
    return [Heading("Over GPUs and days"), Paragraph(text), table]


def figures(runs: list[Line]) -> Iterator[str]:
    for name, (_, digits) in METRICS.items():
        values = [one[name] for one in runs]
        yield f"{values[-1]:,.{digits}f}"
        yield f"{min(values):,.{digits}f} – {max(values):,.{digits}f}"


def days(runs: list[Line]) -> int:
    return len({one["time"][:10] for one in runs})


def main() -> None:
    lines = collect()
    KEPT.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    print(f"{len(lines)} lines of {len({one['run'] for one in lines})} runs in {KEPT}")


if __name__ == "__main__":
    main()
