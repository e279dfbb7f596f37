"""The comparison: mean over seeds, and paired differences with their standard errors.

A difference d[seed, window] of mean losses has two sources of noise, the text and the calibration draw:
error² = var(mean over seeds by window) / windows + var(mean over windows by seed) / seeds. "Better" and "worse" mean by
more than two errors, at no more stored bits per weight.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import peers

Results = dict[tuple[str, str], list[dict[str, Any]]]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def collect(path: Path) -> Results:
    """(tool, scheme) → the last good row of each seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in read(path):
        if row["bench"] == "quality" and row["status"] == "ok":
            found[row["tool"], row["scheme"]][row["seed"]] = row
    return {key: [rows[seed] for seed in sorted(rows)] for key, rows in found.items()}


def error_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean log-ratio of the perplexities, its standard error): below zero where ours is better. Seeds are paired in turn."""
    count = max(len(ours), len(theirs))
    pairs = [(ours[i % len(ours)]["window_losses"], theirs[i % len(theirs)]["window_losses"]) for i in range(count)]
    gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]  # [seeds][windows]
    by_window = [statistics.fmean(column) for column in zip(*gaps, strict=True)]
    by_seed = [statistics.fmean(row) for row in gaps]
    return statistics.fmean(by_seed), math.hypot(error_of(by_window), error_of(by_seed))


def verdict(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    gap, error = difference(ours, theirs)
    more_bits = ours[0]["bits_per_weight"] > theirs[0]["bits_per_weight"] + 0.005
    word = "equal" if abs(gap) <= 2 * error else "better" if gap < 0 else "worse"
    return f"{word} {100 * math.expm1(gap):+.2f} ± {100 * error:.2f} %" + (" with more bits" if more_bits else "")


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def show(path: Path) -> None:
    """Markdown: one line per tool and scheme, then every comparison that is asked for."""
    results = collect(path)
    seconds = {row["job"]: row["seconds"] for row in read(path) if row["bench"] == "quantize" and row["status"] == "ok"}
    print("| tool | scheme | bits | perplexity | change | KL | top-1 | seeds | seconds |\n|---|---|---|---|---|---|---|---|---|")
    for (tool, scheme), rows in sorted(results.items(), key=lambda item: mean(item[1], "perplexity")):
        compared = ["", "", ""]
        if "kl" in rows[0]:
            ratio = mean(rows, "log_ratio")
            error = math.hypot(mean(rows, "log_ratio_error"), error_of([row["log_ratio"] for row in rows]))
            compared = [f"{100 * math.expm1(ratio):+.2f} ± {100 * error:.2f} %", f"{mean(rows, 'kl'):.5f}",
                        f"{100 * mean(rows, 'top1_agreement'):.2f} %"]
        took = [seconds[row["job"]] for row in rows if row["job"] in seconds]
        print(f"| {tool} | {scheme} | {rows[0]['bits_per_weight']:.3f} | {mean(rows, 'perplexity'):.4f} | {' | '.join(compared)} "
              f"| {len(rows)} | {statistics.fmean(took) if took else 0:.1f} |")
    print("\n| ours | against | ours is |\n|---|---|---|")
    for scheme, others in peers.RIVALS.items():
        for other in others:
            if ("flyweight", scheme) in results and other in results:
                print(f"| {scheme} | {' '.join(other)} | {verdict(results['flyweight', scheme], results[other])} |")
    for job, reason in sorted({(row["job"], row["reason"]) for row in read(path) if row["status"] == "failed"}):
        print(f"\nfailed: {job}: {reason}")
