"""Our engine beside the newest vLLM, in turns on one GPU: rows of ../vllm_plugin.py in
../h200/vllm-0.33.

A figure of ours is only ever set beside one of vLLM's from the same run: same GPU, same minutes.
Where a scheme was measured in several runs, the last one with every workload counts; a workload
that it has not comes from the fullest other run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from flyweight.bench.workloads import LATENCY
from flyweight.report.blocks import Block, Paragraph, Table
from flyweight.report.read import read
from flyweight.report.rows import Results, Row

FOLDER = Path("benchmarks/h200/vllm-0.33")
METRICS = ("decode_tok_s", "ttft_ms_last", "overall_tok_s")
HEADLINE = (  # workload, metric, what it is called, digits
    ("decode_bound", "decode_tok_s", "decode, batch 1 (256 in, 512 out), tok/s", 0),
    ("prefill_bound", "ttft_ms_last", "first token after 2,048 tokens, ms", 1),
    ("long_context", "ttft_ms_last", "first token after 16,384 tokens, ms", 0),
    ("medium_batch", "overall_tok_s", "batch 8 (256 in, 128 out), tok/s in and out", 0),
    ("base", "overall_tok_s", "batch 32 (256 in, 32 out)", 0),
    ("high_concurrency", "overall_tok_s", "batch 64 (256 in, 128 out)", 0),
)
Key = tuple[str, str, str]  # model, scheme, sampling


def rows_of(folder: Path = FOLDER) -> Results:
    return read(sorted(folder.glob("*.jsonl")))


def runs(results: Results) -> dict[Key, list[Row]]:
    """The rows that count, of each model, scheme and way of sampling: of a workload, one run's."""
    found: dict[Key, dict[str, list[Row]]] = {}
    for row in results.of("latency"):
        if row["status"] == "ok" and row.get("workload") and row["backend"] in ("native", "vllm"):
            key = (row["model"], row["scheme"], row.get("sampling") or "")
            found.setdefault(key, {}).setdefault(row["environment"], []).append(row)
    chosen = {}
    for key, by_run in found.items():
        counting: list[Row] = []
        fullest_first = sorted(by_run.values(), key=lambda rows: str(rows[0]["time"]), reverse=True)
        for rows in sorted(fullest_first, key=lambda rows: -len(shared(rows))):
            new = set(shared(rows)) - set(shared(counting))
            counting += [row for row in rows if row["workload"] in new]
        if counting:
            chosen[key] = counting
    return chosen


def shared(rows: Sequence[Row]) -> list[str]:
    """Workloads that both sides have done."""
    done = [
        {row["workload"] for row in rows if row["backend"] == one} for one in ("native", "vllm")
    ]
    return [one for one in LATENCY if all(one in side for side in done)]


def figure(rows: Sequence[Row], backend: str, workload: str, metric: str) -> float:
    """The median over repeats."""
    return median(
        row[metric] for row in rows if row["backend"] == backend and row["workload"] == workload
    )


def headline(results: Results) -> list[Block]:
    """Greedy answers of every model and scheme that was measured beside vLLM."""
    found = {key[:2]: rows for key, rows in sorted(runs(results).items()) if not key[2]}
    lines = []
    for workload, metric, text, digits in HEADLINE:
        line = [text]
        for rows in found.values():
            sides = [
                f"{figure(rows, side, workload, metric):.{digits}f}"
                for side in ("native", "vllm")
                if workload in shared(rows)
            ]
            line.append(f"{sides[0]} (vLLM {sides[1]})" if sides else "–")
        lines.append(tuple(line))
    names = [f"{model.upper().replace('QWEN', 'Qwen')} {scheme}" for model, scheme in found]
    return [Table("", ("beside vLLM 0.33.0", *names), tuple(lines))] if found else []


def tables(results: Results) -> list[Block]:
    """Every workload that both sides have done, a table for each model and scheme."""
    blocks: list[Block] = []
    for (model, scheme, sampling), rows in sorted(runs(results).items()):
        lines = []
        for workload in shared(rows):
            one = next(row for row in rows if row["workload"] == workload)
            ours, theirs = (
                [figure(rows, side, workload, metric) for metric in METRICS]
                for side in ("native", "vllm")
            )
            lines.append(
                (
                    workload,
                    f"{one['batch']}, {one['input']:,} + {one['output']}",
                    *(f"{ours[0]:,.0f}", f"{theirs[0]:,.0f}", f"{ours[0] / theirs[0]:.2f}"),
                    *(f"{ours[1]:.1f}", f"{theirs[1]:.1f}", f"{ours[1] / theirs[1]:.2f}"),
                    *(f"{ours[2]:,.0f}", f"{theirs[2]:,.0f}", f"{ours[2] / theirs[2]:.2f}"),
                )
            )
        columns = (
            *("workload", "batch, in + out", "decode, tok/s", "vLLM", "×"),
            *("first token, last, ms", "vLLM", "÷", "all tokens/s", "vLLM", "×"),
        )
        title = f"{model} {scheme}, {sampling or 'greedy'}"
        repeats = max(row.get("repeat") or 1 for row in rows)
        mode = {row.get("vllm_mode") for row in rows if row["backend"] == "vllm"} - {None}
        count = len({row["environment"] for row in rows})
        days = sorted({str(row["time"])[:10] for row in rows})
        told = f"**{title}**, median of {repeats}, {' and '.join(days)}"
        told += f", {count} runs" if count > 1 else ""
        blocks += [
            Paragraph(told + (f"; vLLM: {', '.join(sorted(mode))}" if mode else "")),
            Table("", columns, tuple(lines)),
        ]
    return blocks
