"""What stands before the tables of documents 000 to 004: what a reader must know to read them.

The tables themselves are in the layout of the document of that number (`--layout seed`); here is
what that layout has no place for: which way a ratio goes, what launches overlap, what the variants
cost in quality, and of which code, day and GPU the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

import beside

from flyweight.report.blocks import Block, Heading, Paragraph, Table
from flyweight.report.read import read
from flyweight.report.rows import Results, Row

QUALITY = Path("benchmarks/h200/quality.jsonl")
RECIPES = {
    "w8a8_smooth_ptq": "w8a8-smooth"
}  # a variant of 002 → its scheme, where it is not the same word
PIECES = {"003": "document-003", "004": "document-004"}  # of measure.sh
WHAT = {
    "002": "Qwen3-4B, random weights at its shapes; variants that are the same kernels at run time "
    "share a place in the ranking.",
    "003": "Qwen3-8B-AWQ: one request after the other, 128 tokens in, 64 out; the profile is of a "
    "prompt of 1,024 tokens and the 64 tokens after it.",
    "004": "Speed is output ÷ whole time, prefill included; memory is the peak of that input "
    "length alone.",
}


def opening(number: str, results: Results) -> list[Block]:
    own = OPENINGS.get(number, lambda _: [])(results)
    return [Paragraph(" ".join(filter(None, (WHAT.get(number), made_by(number, results))))), *own]


def made_by(number: str, results: Results) -> str:
    """The command, and the commits and days of the rows."""
    days: dict[str, set[str]] = {}
    for row in results.rows:
        environment = results.environments.get(row.get("environment") or "", {})
        commit = str(environment.get("commit") or "unknown")[:12]
        days.setdefault(commit, set()).add(str(row["time"])[:10])
    told = [f"{commit} ({', '.join(sorted(days[commit]))})" for commit in days]
    piece = PIECES.get(number, number)
    return f"Rows by `benchmarks/h200/measure.sh {piece}`, of commit {', '.join(told)}."


# -- 000 and 001 -----------------------------------------------------------------------------------


def kernels(results: Results) -> list[Block]:
    rows = [row for row in results.of("kernel") if row["status"] == "ok" and row.get("ratio")]
    if not rows:
        return []
    text = (
        "`ratio` is vptq ÷ torch: below 1 is faster than torch's bf16. Weights are read from "
        "memory: launches walk over copies that together are three times the last cache, in one "
        "CUDA graph. Ours overlap there, as they do in a decode step: a kernel fetches its first "
        "weights while the one before it ends (programmatic dependent launch); torch's do not. "
        f"So: {spread([row['ratio'] for row in rows])}."
    )
    alone = [row["us_alone"] / row["torch_us"] for row in rows if row.get("us_alone")]
    if alone:
        text += f" With each launch after the end of the one before: {spread(alone)}."
    return [Paragraph(text)]


def spread(ratios: Sequence[float]) -> str:
    below = sum(ratio < 1 for ratio in ratios)
    return (
        f"mean ratio {mean(ratios):.2f}, worst {max(ratios):.2f}, {below} of {len(ratios)} below 1"
    )


# -- 002 -------------------------------------------------------------------------------------------


def quality(results: Results) -> list[Block]:
    """Speed and size of each variant beside what its scheme costs on real weights."""
    variants = list(dict.fromkeys(row["scheme"] for row in results.of("latency")))
    losses = losses_of(read([QUALITY])) if QUALITY.exists() else {}
    if not variants or not losses:
        return []
    lines = [(variant, *speed_of(results, variant), *cost(losses, variant)) for variant in variants]
    model, text, tokens = next(iter(losses.values()))[0].of
    note = (
        f"Speed and size: random weights at Qwen3-4B's shapes. Quality: the same scheme on real "
        f"weights, {model}, {tokens:,} tokens of {text}, change of perplexity over the original's "
        f"and KL divergence, mean ± deviation over calibration seeds (docs/quantize.md)."
    )
    columns = ("Variant", "GB", "batch 1, tok/s", "batch 64, tok/s in and out", "perplexity", "KL")
    return [Heading("Quality beside speed"), Table("", columns, tuple(lines)), Paragraph(note)]


class Loss:
    """What one quantized copy of a real model costs."""

    def __init__(self, row: Row):
        self.of = (row["model"], row["text"], row["tokens"])
        self.perplexity = row["perplexity"] / row["perplexity_original"] - 1
        self.kl = row["kl"]


def losses_of(results: Results) -> dict[str, list[Loss]]:
    found: dict[str, list[Loss]] = {}
    for row in results.of("quality"):
        if row["status"] == "ok" and row.get("tool") == "flyweight" and row.get("kl") is not None:
            found.setdefault(row["scheme"], []).append(Loss(row))
    return found


def cost(losses: dict[str, list[Loss]], variant: str) -> tuple[str, str]:
    scheme = RECIPES.get(variant, variant.replace("_", "-"))
    if variant == "original":
        return "the original", "0"
    if scheme not in losses:
        return "–", "–"
    changes = [100 * loss.perplexity for loss in losses[scheme]]
    error = f" ± {stdev(changes):.2f}" if len(changes) > 1 else ""
    return f"{mean(changes):+.2f}{error} %", f"{mean(loss.kl for loss in losses[scheme]):.4f}"


def speed_of(results: Results, variant: str) -> tuple[str, str, str]:
    rows = [row for row in results.of("latency") if row["scheme"] == variant]
    rows = [row for row in rows if row["status"] == "ok"]

    def of(workload: str, metric: str) -> str:
        values = [row[metric] for row in rows if row["workload"] == workload]
        return f"{mean(values):,.0f}" if values else "–"

    size = f"{rows[0]['size_gb']:.2f}" if rows else "–"
    return size, of("decode_bound", "decode_tok_s"), of("high_concurrency", "overall_tok_s")


# -- 003 -------------------------------------------------------------------------------------------


def newest_vllm(results: Results) -> list[Block]:
    """The same work, back to back, beside the newest vLLM in turns."""
    chosen = beside.runs(beside.rows_of()) if beside.FOLDER.exists() else {}
    rows = chosen.get(("qwen3-8b", "int4", ""), [])
    if "interactive" not in beside.shared(rows):
        return []
    classes = {one for row in rows for one in row.get("linear_kernels") or {}}
    kernels = "".join(f", by {one.removesuffix('LinearKernel')}" for one in sorted(classes))
    lines = []
    for side, name in (("native", "Flyweight"), ("vllm", f"vLLM 0.33.0 (awq{kernels})")):
        first, each = (
            beside.figure(rows, side, "interactive", metric) for metric in ("ttft_ms", "tpot_ms")
        )
        lines.append((name, f"{first:.2f}ms", f"{each:.2f}ms"))
    modes = {row.get("vllm_mode") for row in rows if row["backend"] == "vllm"}
    mode = "its compiler on" if modes == {"compiled"} else "its compiler off, steps captured"
    day = str(rows[0]["time"])[:10]
    title = f"In turns on one GPU, {day}, random codes, vLLM with {mode}"
    return [Table(title, ("Backend", "TTFT", "TPOT"), tuple(lines))]


OPENINGS: dict[str, Callable[[Results], list[Block]]] = {
    "000": kernels,
    "001": kernels,
    "002": quality,
    "003": newest_vllm,
}
