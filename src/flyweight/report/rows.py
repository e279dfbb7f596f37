"""Result rows: read, checked, joined with their environment, grouped by what identifies them.

A row that a table could misread is an error that names its file and line, not a warning: a wrong
number in a report is worse than no report. Which fields a bench has, of which type, and which of
them say *what* was measured, are two tables here; docs/results.md is their prose. A checkpoint of
None is unknown and is never joined with anything.
"""

from __future__ import annotations

import functools
import json
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyweight.errors import ResultError, unknown

Row = dict[str, Any]
SCHEMA = 1
STATUSES = ("ok", "oom", "failed", "skipped")
EVERY_ROW = ("schema", "bench", "run_id", "time", "environment", "status")
MODEL = ("model", "checkpoint", "scheme")
FAILED_CHECK = "failed: "  # begins `agreement_with` where there was no comparison, and why

REQUIRED = {  # bench → fields that a row with status ok must have
    "environment": ("id", "device"),
    "kernel": ("format", "us"),
    "latency": (*MODEL, "backend", "batch", "input", "output", "latency_s"),
    "speed": (*MODEL, "backend", "input", "output", "output_tok_s"),
    "serve": (*MODEL, "backend", "ttft_ms", "tpot_ms"),
    "throughput": (*MODEL, "backend", "prompts", "total_tok_s"),
    "profile": ("operator", "kind", "self_us", "calls"),
    "quality": MODEL,
    "quantize": ("scheme", "seconds"),
    "sanitize": ("kernel", "check", "found"),
    "prefill": ("model", "case", "passes"),
    "agreement": (*MODEL, "backend", "agreement_with"),
    "ablation": ("model", "scheme", "rows", "us", "ratio"),
    "adapters": ("model", "scheme", "rows", "rank", "variant", "us", "ratio"),
    "sampling": ("model", "batch", "sampling", "step_us", "of_greedy"),
}
IDENTITY = {  # bench → what was measured; rows that agree in it are repeats of one another
    "kernel": (
        "format",
        "kernel",
        "rows",
        "in_features",
        "out_features",
        "chain",
        "context",
        "group_size",
        "zero_points",
        "dtype",
        "vector_length",
        "main_centroids",
        "residual_centroids",
    ),
    "latency": (*MODEL, "kv_dtype", "backend", "workload", "batch", "input", "output", "sampling"),
    "speed": (*MODEL, "kv_dtype", "backend", "input", "output", "gpus", "setting", "sampling"),
    "serve": (
        *MODEL,
        "kv_dtype",
        "backend",
        "rate",
        "concurrency",
        "arrivals",
        "dataset",
        "requests",
        "sampling",
    ),
    "throughput": (*MODEL, "kv_dtype", "backend", "prompts", "input", "output", "sampling"),
    "profile": (*MODEL, "backend", "phase", "operator", "kind"),
    "quality": (*MODEL, "kv_dtype", "tool", "text", "window", "stride", "tokens", "exact"),
    "quantize": (*MODEL, "device", "calibration_tokens"),
    "sanitize": ("kernel", "check"),
    "prefill": ("model", "case", "passes"),
    "agreement": (*MODEL, "backend", "gpus"),
    "ablation": ("model", "scheme", "rows", "without"),
    "adapters": ("model", "scheme", "rows", "rank", "variant"),
    "sampling": ("model", "batch", "sampling"),
}
# a number or {p50, …, mean}
PERCENTILES = {"serve": ("ttft_ms", "ttft_sent_ms", "tpot_ms", "gap_ms", "e2e_s")}
TEXT = {
    "bench",
    "run_id",
    "time",
    "status",
    "reason",
    "model",
    "scheme",
    "backend",
    "workload",
    "format",
    "kernel",
    "operator",
    "kind",
    "phase",
    "weights",
    "kv_dtype",
    "tool",
    "text",
    "device",
    "dtype",
    "arrivals",
    "dataset",
    "setting",
    "agreement_with",
    "check_with",
}
COUNTS = {
    "rows",
    "batch",
    "input",
    "output",
    "in_features",
    "out_features",
    "main_centroids",
    "residual_centroids",
    "gpus",
    "prompts",
    "calls",
}  # what was asked for, not measured: never averaged
NUMBERS = COUNTS | {
    "us",
    "us_p10",
    "us_p90",
    "us_hot",
    "us_alone",
    "host_us",
    "torch_us",
    "ratio",
    "gb_s",
    "share_of_bandwidth",
    "relative_error",
    "latency_s",
    "ttft_ms_last",
    "tpot_ms",
    "decode_tok_s",
    "overall_tok_s",
    "input_tok_s",
    "share_of_limit",
    "output_tok_s",
    "total_tok_s",
    "qps",
    "request_s",
    "goodput_s",
    "weights_gb",
    "kv_gb",
    "allocated_gb",
    "reserved_gb",
    "device_gb",
    "read_gb",
    "file_bits_per_weight",
    "energy_j",
    "agreement",
    "kl_error",
    "log_ratio",
    "log_ratio_error",
    "agreement_clear",
    "agreement_free",
    "limit_tok_s",
    "check_loss",
    "check_loss_worst",
    "check_bound",
    "error_bound",
    "acceptance_length",
    "acceptance_rate",
    "speculated_steps",
    "tokens_per_step",
    "draft_ms",
    "self_us",
    "total_us",
    "share",
    "perplexity",
    "perplexity_original",
    "perplexity_error",
    "kl",
    "top1_agreement",
    "seconds",
    "size_gb",
    "bits_per_weight",
    "duration_s",
}


@dataclass(frozen=True)
class Results:
    """All rows of a report, in the order of the files; environments by id; what a reader should
    know, a line each.
    """

    rows: tuple[Row, ...]
    environments: dict[str, Row]
    notes: tuple[str, ...] = ()

    def of(self, bench: str, *, every_status: bool = False) -> list[Row]:
        return [
            row
            for row in self.rows
            if row["bench"] == bench and (every_status or row["status"] == "ok")
        ]

    def device(self, row: Row) -> str | None:
        return self.environments.get(row.get("environment") or "", {}).get("device")


@dataclass(frozen=True)
class Group:
    """Repeats of one measurement."""

    rows: tuple[Row, ...]
    device: str | None = None
    key: tuple[Any, ...] = field(default=(), repr=False)

    def get(self, name: str) -> Any:
        return self.rows[0].get(name)

    def values(self, name: str) -> list[float]:
        """Raw samples where the rows kept them (`NAME_samples`), else one figure a row."""
        values: list[float] = []
        for row in self.rows:
            samples = row.get(f"{name}_samples") or raw_samples(row.get("samples"), name)
            value = number(row.get(name))
            values += samples if samples else [value] if value is not None else []
        return values

    def mean(self, name: str) -> float | None:
        values = [value for row in self.rows if (value := number(row.get(name))) is not None]
        return statistics.fmean(values) if values else None

    def deviation(self, name: str) -> float | None:
        values = [value for row in self.rows if (value := number(row.get(name))) is not None]
        return statistics.stdev(values) if len(values) > 1 else None


@functools.cache
def read_samples(path: str) -> tuple[Row, ...]:
    """The raw rows of a serve run, one a request, with the fields' own names."""
    try:
        return tuple(
            json.loads(line)
            for line in Path(path).read_text(encoding="utf-8").splitlines()
            if line.strip()
        )
    except FileNotFoundError:
        return ()  # they are large and often left behind; the row then counts as one sample
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: raw samples cannot be read ({error})") from None


def raw_samples(path: str | None, name: str) -> list[float]:
    return (
        [row[name] for row in read_samples(path) if number(row.get(name)) is not None]
        if path
        else []
    )


def number(value: Any) -> float | None:
    """Of a percentile block the median, else the mean."""
    if isinstance(value, dict):
        value = value.get("p50", value.get("mean"))
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def is_checked(row: Row) -> bool:
    """Whether it says with what its greedy tokens were compared."""
    return bool(row.get("agreement_with")) and not row["agreement_with"].startswith(FAILED_CHECK)


def identity(row: Row, *, leave: Sequence[str] = ()) -> tuple[Any, ...]:
    return (row["bench"], *(row.get(name) for name in IDENTITY[row["bench"]] if name not in leave))


def group(results: Results, rows: Iterable[Row]) -> list[Group]:
    """Repeats together, in order of first appearance; never across checkpoints or devices."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*identity(row), results.device(row)), []).append(row)
    return [Group(tuple(members), device=key[-1], key=key) for key, members in found.items()]


def join(parts: Iterable[Results]) -> Results:
    """Several files as one; the same row twice counts once, two rows that claim one run_id are an
    error.
    """
    rows: dict[str, Row] = {}
    environments: dict[str, Row] = {}
    notes: list[str] = []
    twice = 0
    for part in parts:
        environments |= part.environments
        notes += part.notes
        for row in part.rows:
            if row["run_id"] in rows and rows[row["run_id"]] != row:
                raise ResultError(
                    f"two different rows have the run_id {row['run_id']!r}; one of the files was "
                    "edited"
                )
            twice += row["run_id"] in rows
            rows[row["run_id"]] = row
    if twice:
        notes.append(f"{twice} rows are in more than one of the files; each is counted once")
    return Results(
        tuple(rows.values()),
        environments,
        notes=tuple(dict.fromkeys([*notes, *apart(rows.values())])),
    )


def name_of(row: Row) -> tuple[Any, ...]:
    """What a checkpoint goes by: model and scheme, and who made it of which draw, where that is
    told.
    """
    maker = (row.get("tool"), row.get("seed")) if row.get("job") else ()
    return (
        row.get("model"),
        row.get("scheme"),
        *maker,
        *((row.get("backend"),) if row.get("weights") == "random" else ()),
    )


def apart(rows: Iterable[Row]) -> list[str]:
    """A line for each name that is there with several checkpoints: their rows stay apart."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        if row.get("checkpoint"):
            found.setdefault(name_of(row), set()).add(str(row["checkpoint"]))
    return [
        f"{name[0]} {name[1]} is here with {len(hashes)} checkpoints "
        f"({', '.join(sorted(hashes))}); their rows stay apart"
        for name, hashes in found.items()
        if len(hashes) > 1
    ]


def read_jsonl(path: Path) -> Results:
    # and at nothing else that Unicode calls the end of a line
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    places: list[str] = []
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{index}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if index == len(lines):  # without its newline: whoever wrote it was cut off
                warnings.warn(f"{place}: the last row is cut off; it is left out")
                continue
            raise ResultError(f"{place}: not a JSON object ({error.msg})") from None
        check(row, place)
        if isinstance(row.get("samples"), str):
            row["samples"] = str(path.parent / row["samples"])
        rows.append(row)
        places.append(place)
    environments = {row["id"]: row for row in rows if row["bench"] == "environment"}
    for row, place in zip(rows, places, strict=True):
        if row["environment"] is not None and row["environment"] not in environments:
            raise ResultError(
                f"{place}: environment {row['environment']!r} is not in this file; add its row"
            )
    return join(
        [Results(tuple(row for row in rows if row["bench"] != "environment"), environments)]
    )


def check(row: Any, place: str) -> None:
    """One line that names the place and what is wrong with the row, or nothing."""
    if not isinstance(row, dict):
        raise ResultError(f"{place}: a result row is a JSON object, not {type(row).__name__}")
    if missing := [name for name in EVERY_ROW if name not in row]:
        raise ResultError(f"{place}: the row has no {', '.join(missing)}; see docs/results.md")
    if row["schema"] != SCHEMA:
        raise ResultError(
            f"{place}: schema {row['schema']!r} is not the one this version reads ({SCHEMA})"
        )
    if row["bench"] not in REQUIRED:
        raise ResultError(f"{place}: {unknown('bench', str(row['bench']), REQUIRED)}")
    if row["status"] not in STATUSES:
        raise ResultError(f"{place}: {unknown('status', str(row['status']), STATUSES)}")
    if row["status"] == "ok" and (
        missing := [name for name in REQUIRED[row["bench"]] if name not in row]
    ):
        raise ResultError(f"{place}: a {row['bench']} row needs {', '.join(missing)}")
    blocks = PERCENTILES.get(row["bench"], ())
    for name, value in row.items():
        if (
            value is None
            or (name in blocks and isinstance(value, dict))
            or row["bench"] == "environment"
        ):
            continue
        if name in NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ResultError(f"{place}: {name} must be a number, not {value!r}")
        if name in TEXT and not isinstance(value, str):
            raise ResultError(f"{place}: {name} must be text, not {value!r}")
