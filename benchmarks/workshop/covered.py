"""What the rows of benchmarks/h200/ cover: which are missing, of which commit each file is, and
whether its code is still this.

A row says in its environment which commit it ran. Where one thing was measured under two commits,
only the rows of the later one count (`latest`); where files that a row ran (`ran.py`) changed
between its commit and this one, it is marked: it may be measured again, and nobody has to remember.
What ought to be there is EXPECTED, one line for each piece of measure.sh.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ran import code_of

from flyweight.bench.workloads import LATENCY
from flyweight.report.blocks import Block, Heading, Paragraph, Table
from flyweight.report.figures import of_a_peer
from flyweight.report.rows import Results, Row, identity

CELL = (
    "bench",
    "model",
    "scheme",
    "backend",
    "tool",
    "workload",
    "batch",
    "input",
    "output",
    "prompts",
    "seed",
    "check",
    "setting",
    "format",
    "kernel",
    "rows",
    "in_features",
    "out_features",
    "chain",
    "context",
    "main_centroids",
    "residual_centroids",
    "case",
    "passes",
)
# that tell measurements apart
MORE = ("check", "setting", "level", "batch", "input", "seed", "tool", "arrivals", "shape")


@dataclass(frozen=True)
class Piece:
    """Rows that one piece of measure.sh makes: `where` is field → the values it may have; "vllm (*"
    are all that begin so.
    """

    name: str
    what: str
    count: int
    bench: str
    where: dict[str, Any]

    def found(self, rows: Iterable[Row]) -> int:
        return sum(
            row["bench"] == self.bench
            and row["status"] in ("ok", "skipped")
            and all(
                any(
                    alike(row.get(name), one)
                    for one in (value if isinstance(value, tuple) else (value,))
                )
                for name, value in self.where.items()
            )
            for row in rows
        )


def alike(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str) and wanted.endswith("*"):
        return value.startswith(wanted[:-1])
    return value == wanted


def sweep(
    name: str, what: str, count: int, bench: str, model: Any, backend: str = "native", **where: Any
) -> Piece:
    return Piece(name, what, count, bench, {"model": model, "backend": backend} | where)


EXPECTED = (
    Piece("000", "VPTQ 8192 + 256 on 30 shapes", 30, "kernel", {"shape": "seed-000"}),
    Piece("001", "four codebooks on 30 shapes", 120, "kernel", {"shape": "seed-001"}),
    sweep(
        "002",
        "Qwen3-4B: 7 variants × 7 workloads × 3 runs",
        147,
        "latency",
        "qwen3-4b",
        scheme=(
            "original",
            "w8a16_awq",
            "w8a16_smooth_awq",
            "w8a16_sparse_awq",
            "w8a8_smooth_ptq",
            "w8a8_smooth_gptq",
            "w8a8_sparse_smooth_gptq",
        ),
    ),
    sweep(
        "8b",
        "Qwen3-8B: 4 variants × 7 workloads × 3 runs",
        84,
        "latency",
        "qwen3-8b",
        workload=tuple(LATENCY),
    ),
    sweep("8b-fp16", "int4 in float16", 3, "latency", "qwen3-8b", "native (dtype=float16)"),
    sweep(
        "startup",
        "Qwen3-8B int4 from a folder to its first token",
        2,
        "latency",
        "qwen3-8b",
        workload="startup",
    ),
    sweep("003", "Qwen3-8B-AWQ on the native engine", 1, "serve", "Qwen3-8B-AWQ"),
    sweep(
        "003-transformers",
        "the same on transformers, and in bf16",
        2,
        "serve",
        ("Qwen3-8B-AWQ", "Qwen3-8B"),
        "transformers",
    ),
    sweep(
        "003-vllm", "the same on vLLM, awq and awq_marlin", 2, "serve", "Qwen3-8B-AWQ", "vllm (*"
    ),
    sweep(
        "vllm-prefill",
        "vLLM's first tokens with random codes: 3 variants × 2 workloads × 3 runs",
        18,
        "latency",
        "qwen3-8b",
        "vllm (*",
        workload=("prefill_bound", "long_context"),
    ),
    *(
        sweep(f"004 ({model})", "4 schemes × 4 input lengths", 16, "speed", model, output=2048)
        for model in ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")
    ),
    *(
        sweep(
            f"004-transformers ({model})",
            "4 schemes × 4 input lengths",
            16,
            "speed",
            model,
            "transformers",
        )
        for model in ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")
    ),
    *(
        sweep(f"004-vllm ({model})", "the same on vLLM", 16, "speed", model, "vllm (*")
        for model in ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")
    ),
    sweep("004-long", "63,488 and 129,024 tokens", 8, "speed", "qwen2-7b", input=(63488, 129024)),
    sweep("57b", "BF16 and Int4 × 4 input lengths", 8, "speed", "qwen2-57b-a14b"),
    sweep(
        "72b",
        "AWQ, Int8 and Int4 × 4 input lengths",
        12,
        "speed",
        "qwen2-72b",
        input=(1, 6144, 14336, 30720),
    ),
    sweep(
        "72b-long",
        "Int8 and Int4, 63,488 and 129,024 tokens",
        4,
        "speed",
        "qwen2-72b",
        input=(63488, 129024),
    ),
    sweep("throughput (57b)", "100 and 1,000 prompts", 2, "throughput", "qwen2-57b-a14b"),
    sweep("throughput (32b)", "100 and 1,000 prompts", 2, "throughput", "qwen1.5-32b"),
    Piece(
        "profile",
        "operators and kernels of both phases",
        1,
        "profile",
        {"level": "kernel", "phase": "decode"},
    ),
    Piece(
        "steps",
        "a decode step's parts: 6 variants × 2 batches",
        12,
        "profile",
        {"operator": "step"},
    ),
    Piece(
        "chain",
        "a block's linears as a chain, 4 formats, 2 of them in float16 too",
        6,
        "kernel",
        {"chain": "qwen3-8b"},
    ),
    Piece("attention", "4 contexts × 2 batches", 8, "kernel", {"format": "attention"}),
    Piece("vptq-large", "65536 + 256 on 30 shapes", 30, "kernel", {"main_centroids": 65536}),
    Piece(
        "rows",
        "4 formats × 4 shapes × 9 numbers of rows, and peers",
        144,
        "kernel",
        {
            "format": ("w4a16", "w8a16", "w8a8", "fp8"),
            "chain": None,
            "chosen": None,
            "rows": (1, 8, 16, 32, 64, 256, 2048, 4096, 16384),
        },
    ),
    Piece("prefill", "Qwen3-8B: 3 variants × 8 prompts × captured or not", 48, "prefill", {}),
    Piece("real-model", "logits of 11 formats", 11, "quality", {"check": "logits"}),
    Piece("real-model", "12 ways of serving", 12, "quality", {"check": "served"}),
    Piece("real-model", "a storm of 1,000 requests", 1, "quality", {"check": "storm"}),
    Piece("vllm_agreement.py", "six folders through vLLM", 6, "quality", {"tool": "vllm"}),
    Piece("serve_load.py", "256 clients for two minutes", 1, "serve", {"concurrency": 256}),
)


def missing(results: Results) -> list[Block]:
    """The pieces of which rows are not there."""
    lines = [
        (piece.name, piece.what, str(found), str(piece.count))
        for piece in EXPECTED
        if (found := piece.found(results.rows)) < piece.count
    ]
    return (
        [Heading("Rows that are missing"), Table("", ("Piece", "What", "here", "of"), tuple(lines))]
        if lines
        else []
    )


def commit_of(results: Results, row: Row) -> str | None:
    return results.environments.get(row.get("environment") or "", {}).get("commit")


def latest(results: Results) -> Results:
    """Of what was measured under several commits the rows of the last one, and no failure of what
    went well later.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    went_well: dict[tuple[Any, ...], str] = {}  # cell → when last

    def key(row: Row) -> tuple[Any, ...]:
        return (*identity(row), results.device(row), *(str(row.get(name)) for name in MORE))

    def cell(row: Row) -> tuple[Any, ...]:
        return tuple(str(row.get(name)) for name in CELL)

    for row in (row for row in results.rows if row["status"] == "ok"):
        went_well[cell(row)] = max(went_well.get(cell(row), ""), str(row["time"]))
        if str(row["time"]) >= str(newest.get(key(row), {}).get("time", "")):
            newest[key(row)] = row

    def counts(row: Row) -> bool:
        if row["status"] == "ok":
            return commit_of(results, row) == commit_of(results, newest[key(row)])
        return str(row["time"]) > went_well.get(cell(row), "")

    kept = tuple(filter(counts, results.rows))
    left = len(results.rows) - len(kept)
    note = (
        [
            f"{left} rows were measured again by later code, or failed and went well later: they "
            f"are left out"
        ]
        if left
        else []
    )
    return replace(results, rows=kept, notes=(*results.notes, *note))


def changed(commit: str | None, paths: Iterable[str]) -> str:
    """Which folders of these pathspecs are not what they were at that commit."""
    paths = list(paths)
    if not paths:
        return "none of ours"  # and git would compare everything
    if commit is None:
        return "unknown: these rows name no commit"
    name = commit.removesuffix("-dirty")
    done = subprocess.run(
        ["git", "diff", "--name-only", name, "HEAD", "--", *paths], capture_output=True, text=True
    )
    if done.returncode:
        return "unknown: no such commit here"
    folders = sorted({Path(line).parts[2] for line in done.stdout.split()})
    return f"changed: {', '.join(folders)}" if folders else "the same"


LEDGER = ("Bench", "Model", "Engine or tool", "Rows", "last measured", "Commit")


def maker_of(row: Row) -> str:
    """The engine, tool or foreign kernel that a row is of."""
    kernel = row.get("kernel") if of_a_peer(row) else None
    tool = row.get("tool") if row["bench"] in ("quality", "quantize") else None
    return str(row.get("backend") or tool or kernel or "native").partition(" ")[0]


def provenance(results: Results) -> list[Block]:
    """One line for each bench, model, engine and commit: how old its rows are, and whether their
    code has changed since.
    """
    found: dict[tuple[str, str, str, str | None, tuple[str, ...]], list[Row]] = {}
    for row in results.rows:
        names = (row["bench"], str(row.get("model") or "–"), maker_of(row))
        key = (*names, commit_of(results, row), code_of(row, results.device(row)))
        found.setdefault(key, []).append(row)
    lines = [
        (
            bench,
            model,
            maker,
            str(len(rows)),
            str(max(str(row["time"]) for row in rows))[:16].replace("T", " "),
            commit or "–",
            changed(commit, code),
        )
        for (bench, model, maker, commit, code), rows in found.items()
    ]
    return [
        Heading("Of which code these rows are"),
        Paragraph(
            "The last column: whether files that the rows ran have changed since their commit. "
            "Other engines' rows are of those engines, and of the file of ours that drives them. "
            "A commit that ends in -dirty had changes of its own."
        ),
        Table("", (*LEDGER, "Its code now"), tuple(lines)),
    ]
