"""From rows to the blocks of a report: one function a bench, each giving its tables in the chosen
layout and its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyweight.report import figures, layouts, performance
from flyweight.report.answer import answer
from flyweight.report.blocks import Block, Heading, Items, Table, make_table, with_colors
from flyweight.report.latency import latency
from flyweight.report.records import Record, add_speedups, make_record
from flyweight.report.rows import Row, group
from flyweight.report.units import bytes_text, plain, time_text
from flyweight.report.view import View, split

# the dtype of torch's own linear beside a kernel, unless bf16
TORCH_NAMES = {"float16": "fp16", "float32": "fp32"}
NAME_WIDTH = 55  # of an operator


def kernel(view: View) -> list[Block]:
    blocks: list[Block] = []
    for record in (records := view.records("kernel")):
        record["torch_name"] = TORCH_NAMES.get(str(record.get("torch_dtype")), "bf16")
        record["ms"], record["torch_ms"] = (
            record["us"] / 1e3,
            record["torch_us"] / 1e3 if record.get("torch_us") else None,
        )
        record["speedup"] = record["torch_us"] / record["us"] if record.get("torch_us") else None
        if record.get("ratio") is None and record.get("torch_us"):
            record["ratio"] = record["us"] / record["torch_us"]
    for (name, codebook, device), part in split(
        records,
        lambda one: (one["format"], one.get("main_centroids") is not None, one["device_name"]),
    ).items():
        if (
            view.seed
            and len({(one.get("main_centroids"), one.get("residual_centroids")) for one in part})
            == 1
        ):
            for one in part:  # as in the document with one codebook
                one["main_centroids"] = one["residual_centroids"] = None
        title = (
            f"{name} kernel{' by codebook' if codebook else ''} on {device or 'an unnamed device'}"
        )
        blocks.append(make_table(title, layouts.KERNEL[view.layout], part))
    return [Heading("Kernels"), *blocks, *figures.heat_maps(records)] if blocks else []


def speed(view: View) -> list[Block]:
    blocks: list[Block] = []
    records = view.records("speed")
    add_speedups(
        records,
        baseline=view.baseline,
        same=("model", "input", "output", "gpus"),
        value="output_tok_s",
        more_is_better=True,
    )
    for (model, backend, device), part in split(
        records, lambda one: (one["model"], one["backend"], one["device_name"])
    ).items():
        blocks.append(
            make_table(
                f"{model} ({backend}) on {device}", layouts.SPEED[view.layout], part, merge=2
            )
        )
    return (
        [
            Heading("Speed Benchmark"),
            *blocks,
            *figures.speed_lines(records),
            *figures.memory_bars(records),
        ]
        if blocks
        else []
    )


def throughput(view: View) -> list[Block]:
    records = view.records("throughput")
    add_speedups(
        records,
        baseline=view.baseline,
        same=("model", "prompts", "input", "output"),
        value="total_tok_s",
        more_is_better=True,
    )
    table = (
        [make_table("Prompts, QPS and tokens/s", layouts.THROUGHPUT[view.layout], records)]
        if records
        else []
    )
    return [Heading("Throughput"), *table] if table else []


def serve(view: View) -> list[Block]:
    blocks: list[Block] = []
    records = view.records("serve")
    add_speedups(
        records,
        baseline=view.baseline,
        same=("model", "rate", "concurrency"),
        value="tpot_ms",
        more_is_better=False,
    )
    for device, part in split(records, lambda one: one["device_name"]).items():
        brief = [one | {"backend": named_briefly(one["backend"])} for one in part]
        columns = layouts.SERVE[view.layout]
        table = make_table(f"Backends on {device}", columns, brief if view.seed else part)
        blocks.append(transpose(table, strong=view.seed))
        options = [
            one["backend"] for one in part if one["backend"] != named_briefly(one["backend"])
        ]
        if view.seed and options:
            blocks.append(Items(tuple((0, one) for one in options), title="In full"))
    pictures = [*figures.throughput_latency(records), *figures.first_token_bars(records)]
    return [Heading("Serving"), *blocks, *pictures] if blocks else []


def named_briefly(backend: str) -> str:
    """Without options: `vllm (awq, max_model_len=4096)` is "vllm (awq)"."""
    name, _, options = backend.partition(" (")
    kind = options.rstrip(")").split(", ")[0]
    return f"{name} ({kind})" if kind and "=" not in kind else name


def transpose(table: Table, *, strong: bool) -> Table:
    lines = list(zip(table.headers, *table.rows, strict=True))
    mark = "**" if strong else ""
    first, *rest = [(f"{mark}{line[0]}{mark}", *line[1:]) for line in lines]
    return Table(table.title, first, tuple(rest), notes=table.notes)


def profile(view: View) -> list[Block]:
    blocks: list[Block] = []
    found = [
        {**row, "device_name": view.results.device(row)}
        for row in view.results.of("profile")
        if row.get("level") != "part"
    ]
    operators = [row for row in found if row.get("level") != "layer"]
    for (device, phase), rows in split(
        operators, lambda one: (one["device_name"], one.get("phase"))
    ).items():
        records = [
            operator_record(part) for part in split(rows, lambda one: one["operator"]).values()
        ]
        by = "device" if any(one["device_self_us"] for one in records) else "host"
        if not view.seed:
            records.sort(key=lambda one: -one.get(f"{by}_self_us", 0.0))
        title = f"Operators{f' of {phase}' if phase else ''} on {device}, by {by} time"
        blocks.append(make_table(title, layouts.PROFILE[view.layout], records[: view.most]))
    return [Heading("Profiling"), *blocks, *figures.layer_times(found)] if blocks else []


def operator_text(name: str) -> str:
    """As torch's own tables have it: a kernel's templates can be 700 characters; rows keep them."""
    name = name.removeprefix("void ")
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."


def operator_record(rows: Sequence[Row]) -> Record:
    """The host row and the device row of one operator, side by side."""
    record: Record = {
        "operator": operator_text(rows[0]["operator"]),
        "phase": rows[0].get("phase"),
        "calls": max(row["calls"] for row in rows),
        "device_self_us": 0.0,
        "flags": [flag for row in rows for flag in row.get("flags") or ()],
    }
    for row in rows:
        kind, total = row["kind"], row.get("total_us", row["self_us"])
        times = {"self": row["self_us"], "total": total, "mean": total / max(row["calls"], 1)}
        record |= {f"{kind}_{name}": time_text(value) for name, value in times.items()}
        record |= {
            f"{kind}_{name}": f"{row[name]:.2%}"
            for name in ("share", "total_share")
            if row.get(name) is not None
        }
        record |= {
            f"{kind}_{name}": bytes_text(row[f"{name}_bytes"])
            for name in ("memory", "self_memory")
            if row.get(f"{name}_bytes") is not None
        }
        record[f"{kind}_self_us"] = row["self_us"]
    return record


def quality(view: View) -> list[Block]:
    records = [record for record in view.records("quality") if not record.get("check")]
    blocks: list[Block] = [make_table("Quality", layouts.QUALITY, records)] if records else []
    picture = figures.pareto(view.results)
    return [Heading("Quality"), *blocks, *picture] if blocks else []


def checks(view: View) -> list[Block]:
    """Whether an engine computes what it should: one table for each check, every row of it."""
    found = [
        make_record(group(view.results, [row])[0])
        for row in view.results.of("quality")
        if row.get("check")
    ]
    tables = [
        make_table(f"{name} on {device}", layouts.CHECKS, part)
        for (name, device), part in split(
            found, lambda one: (one["check"], one["device_name"])
        ).items()
    ]
    return [Heading("Checks on real weights"), *tables] if tables else []


def quantize(view: View) -> list[Block]:
    records = view.records("quantize")
    return (
        [Heading("Quantization"), make_table("Cost of quantization", layouts.QUANTIZE, records)]
        if records
        else []
    )


def sanitize(view: View) -> list[Block]:
    records = view.records("sanitize")
    return (
        [Heading("Memory and races"), make_table("compute-sanitizer", layouts.SANITIZE, records)]
        if records
        else []
    )


def limits(view: View) -> list[Block]:
    return [] if view.seed else performance.limits(view.results)


def steps(view: View) -> list[Block]:
    return [] if view.seed else performance.step_table(view.results)


def failures(view: View) -> list[Block]:
    records = [dict(row) for row in view.results.rows if row["status"] != "ok"]
    return (
        [Heading("Not measured"), make_table("Rows without a result", layouts.FAILURES, records)]
        if records
        else []
    )


def environments(view: View) -> list[Block]:
    used = {row.get("environment") for row in view.results.rows}
    lines: list[tuple[int, str]] = []
    for name, facts in view.results.environments.items():
        if name in used:
            lines.append((0, f"**{facts.get('device') or 'unnamed device'}** ({name})"))
            lines += [
                (1, f"{key}: {fact_text(value)}")
                for key, value in facts.items()
                if key not in ("schema", "bench", "run_id", "status", "environment", "id", "device")
                and value
            ]
    return [Heading("Environment"), Items(tuple(lines), detail=True)] if lines else []


def fact_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(part)}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else plain(value)


SECTIONS = {
    section.__name__: section
    for section in (
        quality,
        limits,
        latency,
        serve,
        speed,
        throughput,
        kernel,
        steps,
        profile,
        quantize,
        checks,
        sanitize,
        failures,
        environments,
    )
}


def build(view: View) -> list[Block]:
    """The whole report: the answer, what a reader must know, then everything that was measured."""
    notes = [Items(tuple((0, note) for note in view.results.notes))] if view.results.notes else []
    names = view.sections or [
        name for name in SECTIONS if not (view.seed and name == "environments")
    ]
    sections = [block for name in names for block in SECTIONS[name](view)]
    if view.sections:
        return with_colors(sections)
    if view.seed:  # a document's own layout begins with its own table
        return [*sections, *notes]
    return with_colors([*answer(view.results, view.baseline), *notes, *sections])
