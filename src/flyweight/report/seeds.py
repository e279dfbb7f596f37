"""Readers of the five benchmark documents whose layouts this package reproduces: text in, result
rows out.

What is wrong in a document is kept and named: a row that is repeated, a label used twice, a figure
that is always zero carries `flags`, and the report prints them under its table. Figures are taken
as printed, with two exceptions that undo rounding: a latency is taken from the throughput printed
beside it (0.51 s ↔ 377.82 tok/s of 192 tokens), and an operator's total from its mean and calls,
each only where the result rounds to what was printed.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flyweight.errors import ResultError
from flyweight.report.rows import SCHEMA, Results, Row, join
from flyweight.report.units import time_text

WORKLOADS = (
    "interactive",
    "decode_bound",
    "prefill_bound",
    "long_context",
    "medium_batch",
    "high_concurrency",
    "base",
)
UNIT_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
UNIT_BYTES = {"b": 1, "Kb": 1 << 10, "Mb": 1 << 20, "Gb": 1 << 30}
# a first-token time is doubted where the decode rate is this share away from the median of its
# repeats
FAR = 0.3
# of every model in these documents: which weights and which cache they do not say
UNSAID: Row = {"checkpoint": None, "weights": "trained", "kv_dtype": None}


def repair(text: str) -> str:
    """Undo UTF-8 that was read as Windows-1252, line by line; lines that are sound stay as they
    are.
    """
    return "\n".join(_repair_line(line) for line in text.split("\n"))


def _repair_line(line: str) -> str:
    try:
        raw = b"".join(
            character.encode("cp1252") if ord(character) > 0x9F else character.encode("latin-1")
            for character in line
        )
        return raw.decode("utf-8")
    except UnicodeError:
        return line


class Writer:
    """Rows of one document under one or more environments, with ids from the text only."""

    def __init__(self, path: Path, text: str):
        self.name, self.digest = path.name, hashlib.sha256(text.encode()).hexdigest()[:8]
        self.rows: list[Row] = []
        self.environments: dict[str, Row] = {}
        self.notes: list[str] = []

    def environment(self, device: str | None, **facts: Any) -> str:
        identity = f"{self.digest}-e{len(self.environments)}"
        self.environments[identity] = self._row(
            "environment", identity, id=identity, device=device, document=self.name, **facts
        )
        return identity

    def add(self, bench: str, environment: str, **fields: Any) -> None:
        self.rows.append(self._row(bench, environment, **fields))

    def _row(self, bench: str, environment: str, **fields: Any) -> Row:
        return {
            "schema": SCHEMA,
            "bench": bench,
            "run_id": f"{self.digest}-{bench}-{len(self.rows)}",
            "time": None,
            "environment": environment,
            "status": "ok",
            **fields,
        }

    def results(self) -> Results:
        return join([Results(tuple(self.rows), self.environments, notes=tuple(self.notes))])


def pipe_rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_kernel(text: str, out: Writer) -> None:
    """000 and 001: `| batch_size | in_features | … | vptq (ms) | torch (ms) | ratio |`."""
    table = list(pipe_rows(text))
    names = table[0]
    milliseconds = next(
        name for name in names if name.endswith("(ms)") and not name.startswith("torch")
    )
    environment = out.environment("A100")
    for cells in table[2:]:
        row = dict(zip(names, cells, strict=True))
        codebooks = {
            name: int(row[name]) for name in ("main_centroids", "residual_centroids") if name in row
        }
        out.add(
            "kernel",
            environment,
            format=milliseconds.removesuffix(" (ms)"),
            kernel="gemv",
            rows=int(row["batch_size"]),
            in_features=int(row["in_features"]),
            out_features=int(row["out_features"]),
            **codebooks,
            us=round(1e3 * float(row[milliseconds]), 4),
            torch_us=round(1e3 * float(row["torch (ms)"]), 4),
            ratio=float(row["ratio"]),
        )
    out.notes.append(
        f"{out.name}: the ratio's direction is not stated in the document; it is kernel ÷ torch, "
        "below 1 is faster"
    )


def read_latency(text: str, out: Writer) -> None:
    """002: a block per workload with a summary, the runs of each variant, statistics; then
    rankings.
    """
    environment = out.environment("A100", engine="sglang 0.5.3")
    pattern = re.compile(
        r"- `(?P<label>[^`]+)`:\s+- Latency: (?P<latency>[\d.]+)s"
        r"\s+- Output Throughput: (?P<decode>[\d.]+) tok/s"
        r"\s+- Overall Throughput: (?P<overall>[\d.]+) tok/s"
    )
    for block in re.split(r"\n## Configuration: ", text)[1:]:
        shape = re.match(r"batch_size=(\d+), input_len=(\d+), output_len=(\d+)", block)
        if shape is None:
            raise ResultError(
                f"{out.name}: a configuration without batch_size, input_len and output_len"
            )
        batch, length, output = map(int, shape.groups())
        runs = list(pattern.finditer(block))
        labels = Counter(run["label"] for run in runs)
        for run in runs:
            name, repeat = run["label"].rsplit("_run", 1)
            workload = next(work for work in WORKLOADS if name.endswith(f"_{work}"))
            exact = batch * (length + output) / float(run["overall"])
            flags = ["run label used twice"] if labels[run["label"]] > 1 else []
            out.add(
                "latency",
                environment,
                model="Qwen3-4B",
                **UNSAID,
                scheme=name.removesuffix(f"_{workload}"),
                backend="sglang",
                workload=workload,
                batch=batch,
                input=length,
                output=output,
                repeat=int(repeat),
                label=run["label"],
                latency_s=exact if f"{exact:.2f}" == run["latency"] else float(run["latency"]),
                decode_tok_s=float(run["decode"]),
                overall_tok_s=float(run["overall"]),
                input_tok_s=None,
                flags=flags,
            )
    doubt_first_tokens(out.rows)
    if re.search(r"\| 0\.00 \|", text):
        out.notes.append(
            f"{out.name}: Input Throughput is 0.00 in every summary and N/A in every run: it was "
            "not measured"
        )


def doubt_first_tokens(rows: list[Row]) -> None:
    """At normal latency a decode rate far from its repeats means that the first token was not seen
    when it came.
    """
    for row in rows:
        rates = sorted(
            other["decode_tok_s"]
            for other in rows
            if (other["scheme"], other["workload"]) == (row["scheme"], row["workload"])
        )
        median = rates[len(rates) // 2]
        if abs(row["decode_tok_s"] - median) > FAR * median:
            row["flags"].append(
                "decode rate far from its repeats at normal latency: first token mis-detected"
            )
            row["outlier"] = True


def read_serve(text: str, out: Writer) -> None:
    """003: a table with one column per backend, the versions, then a profiler's operator table."""
    table = {cells[0].strip("*"): cells[1:] for cells in pipe_rows(text)}
    device = re.search(r"- Device: (.+)", text)
    environment = out.environment(
        device[1].strip() if device else None, versions=re.findall(r"^  - (.+)$", text, re.M)
    )
    for index, backend in enumerate(table["Backend"]):
        times = {
            f"{name.lower()}_ms": {"p50": float(table[name][index].removesuffix("ms"))}
            for name in ("TTFT", "TPOT")
        }
        out.add(
            "serve",
            environment,
            model=table["Model"][index],
            **UNSAID,
            scheme="awq-int4",
            backend=backend,
            **times,
            flags=["one unrepeated run"],
        )
    read_profile(text, out)


def read_profile(text: str, out: Writer) -> None:
    lines = text.splitlines()
    head = next((index for index, line in enumerate(lines) if "Self CPU %" in line), None)
    if head is None:
        return
    devices = re.findall(r"- Device: (.+)", text)
    totals = {
        kind: microseconds(value)
        for kind, value in re.findall(r"Self (CPU|CUDA) time total: (\S+)", text)
    }
    environment = out.environment(devices[-1].strip() if devices else None, self_total_us=totals)
    names = re.split(r"\s{2,}", lines[head].strip())
    for line in lines[head + 1 :]:
        if line.startswith("---"):
            break
        cells = dict(zip(names, re.split(r"\s{2,}", line.strip()), strict=True))
        calls = int(cells["# of Calls"])
        for kind, unit in (("host", "CPU"), ("device", "CUDA")):
            share = float(cells[f"Self {unit} %"].rstrip("%")) / 100
            total_share = (
                {"total_share": float(cells["CPU total %"].rstrip("%")) / 100}
                if kind == "host"
                else {}
            )
            out.add(
                "profile",
                environment,
                model=None,
                checkpoint=None,
                scheme=None,
                phase=None,
                operator=cells["Name"],
                kind=kind,
                self_us=microseconds(cells[f"Self {unit}"]),
                **total_share,
                total_us=unrounded(cells[f"{unit} total"], cells[f"{unit} time avg"], calls),
                calls=calls,
                share=share,
                memory_bytes=memory(cells[f"{unit} Mem"]),
                self_memory_bytes=memory(cells[f"Self {unit} Mem"]),
                flags=["share above 100 %: compilation inside the profile"] if share > 1 else [],
            )


def microseconds(text: str) -> float:
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return round(float(value) * UNIT_US[unit], 3)


def memory(text: str) -> float:
    value, unit = text.split()
    return float(value) * UNIT_BYTES[unit]


def unrounded(total: str, mean: str, calls: int) -> float:
    candidates = (microseconds(total), round(microseconds(mean) * calls, 3))
    return next(
        (
            value
            for value in candidates
            if time_text(value) == total and time_text(value / calls) == mean
        ),
        candidates[0],
    )


def grid_tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """(the last line of text before it, its cells with the merged ones filled in) of each rst grid
    table.
    """
    title = ""
    table: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            table.append([cell or table[-1][index] for index, cell in enumerate(cells)])
        elif not line.startswith("+"):
            if table:
                yield title, table
            title, table = line.strip() or ("" if table else title), []


def read_speed(text: str, out: Writer) -> None:
    """004: grid tables of speed and memory by input length, and one of throughput."""
    blocks = re.findall(
        r"environment of the evaluation with (\S+ ?\S*) is:\n\n((?:-  .+\n)+)", text
    )
    places = {
        name.split()[-1].lower(): out.environment(
            "NVIDIA A100 80GB", versions=re.findall(r"-  (.+)", facts)
        )
        for name, facts in blocks
    }
    for title, table in grid_tables(text):
        head, *body = table
        backend = "transformers" if "(Transformer)" in title else "vllm"
        environment = places.get(backend) or out.environment("NVIDIA A100 80GB")
        add: Callable[..., None] = add_throughput if "QPS" in head else add_speed
        seen: Counter[tuple[str, ...]] = Counter()
        for cells in body:
            seen[tuple(cells)] += 1
            repeated = seen[tuple(cells)] > 1
            add(
                out,
                environment,
                dict(zip(head, cells, strict=True)),
                backend=backend,
                flags=["the document repeats this block"] if repeated else [],
            )


def add_speed(
    out: Writer, environment: str, cells: dict[str, str], *, backend: str, flags: list[str]
) -> None:
    extra = {"allocated_gb": float(cells["GPU Memory(GB)"])} if "GPU Memory(GB)" in cells else {}
    setting = {"setting": cells["Setting"]} if "Setting" in cells else {}
    out.add(
        "speed",
        environment,
        model=cells["Model"],
        **UNSAID,
        scheme=cells["Quantization"],
        backend=backend,
        input=int(cells["Input Length"]),
        output=2048,
        gpus=int(cells["GPU Num"]),
        output_tok_s=float(cells["Speed(tokens/s)"]),
        **extra,
        **setting,
        flags=flags,
    )


def add_throughput(
    out: Writer, environment: str, cells: dict[str, str], *, backend: str, flags: list[str]
) -> None:
    out.add(
        "throughput",
        environment,
        model=cells["Model"],
        **UNSAID,
        scheme=cells["Quantization"],
        backend=backend,
        prompts=int(cells["# Prompts"]),
        input=1000,
        output=100,
        qps=float(cells["QPS"]),
        total_tok_s=float(cells["Tokens/s"]),
        flags=flags,
    )


READERS = {  # what a document of this kind holds → its reader
    "| batch_size": read_kernel,
    "## Configuration: batch_size=": read_latency,
    "| **Backend**": read_serve,
    "Speed(tokens/s)": read_speed,
}


def read_seed(path: Path) -> Results:
    raw = path.read_text(encoding="utf-8")
    text = repair(raw)
    reader = next((reader for mark, reader in READERS.items() if mark in text), None)
    if reader is None:
        raise ResultError(
            f"{path}: neither result rows nor a benchmark document that is known here"
        )
    out = Writer(path, text)
    if text != raw:
        out.notes.append(f"{path.name}: the text was saved with a broken encoding; repaired")
    try:
        reader(text, out)
    except (AttributeError, KeyError, ValueError, StopIteration, IndexError) as error:
        raise ResultError(
            f"{path}: its tables cannot be read ({type(error).__name__}: {error})"
        ) from error
    return out.results()
