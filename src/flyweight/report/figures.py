"""Which pictures a report has: data in, `Figure`s out; plot.py and svg.py draw them.

The picture of quality, speed and size joins rows by checkpoint alone, all measured under one
condition: a speed of random weights or of another file of the same name never meets a quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from flyweight.report.blocks import Figure, Point, Series
from flyweight.report.records import Record
from flyweight.report.rows import Results, Row, number
from flyweight.report.units import plain

FRONT = (
    "Right and down is better; the area is the size in GB. Ringed points are on the Pareto front "
    "of all three; the dotted line is the front of quality and speed alone. Each point is one "
    "checkpoint, all of its figures measured on it."
)

# Kernels of bench/peers.py, whose own table needs torch. Ours on a CPU have names of torch, too.
PEERS = (
    "torch._weight_int4pack_mm",
    "torch._int_mm",
    "torch._scaled_mm",
    "cusparselt",
    "gemlite",
    "vllm.marlin",
    "vllm.machete",
    "vllm.cutlass",
)


def collect(
    records: Iterable[Record],
    name: Callable[[Record], str],
    point: Callable[[Record], Point],
    *,
    schemes: bool = False,
) -> tuple[Series, ...]:
    """A series for each name; `schemes`: each is of one scheme, which gives it its colour."""
    found: dict[str, list[Point]] = {}
    colors: dict[str, str] = {}
    for record in records:
        found.setdefault(name(record), []).append(point(record))
        colors[name(record)] = str(record.get("scheme"))
    return tuple(
        Series(key, tuple(points), scheme=colors[key] if schemes else None)
        for key, points in found.items()
    )


def by_model(records: Iterable[Record], *needs: str) -> dict[Any, list[Record]]:
    """Records that have these fields, apart by model and device."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        if all(number(record.get(name)) is not None for name in needs):
            found.setdefault((record["model"], record["device_name"]), []).append(record)
    return found


def variant(record: Record, *, gpus: bool = False) -> str:
    count = f", {record.get('gpus')} GPU" if gpus else ""
    return f"{record['scheme']} ({record['backend']}{count})"


def heat_maps(records: Sequence[Record]) -> list[Figure]:
    """Shape × codebook, or format and shape × rows: time over torch's, below 1 is faster. Not of
    several kernels for one weight (`chosen`), nor of others' kernels.
    """
    figures: list[Figure] = []
    for codebook in (True, False):
        shown = [
            one
            for one in records
            if one.get("ratio") is not None
            and one.get("in_features")
            and not of_a_peer(one)
            and one.get("chosen") is None
            and (one.get("main_centroids") is not None) == codebook
        ]
        for device in dict.fromkeys(one["device_name"] for one in shown):
            series = collect(
                (one for one in shown if one["device_name"] == device),
                lambda one: (
                    shape_name(one)
                    if one.get("main_centroids")
                    else f"{one['format']}, {shape_name(one)}"
                ),
                heat_point,
            )
            by, across = (
                ("codebook", "codebook (main + residual centroids)")
                if codebook
                else ("rows", "rows of x")
            )
            figures.append(
                Figure(
                    "heat",
                    f"Kernel time ÷ torch bf16 time by shape and {by} on {device}, below 1 is "
                    "faster",
                    across,
                    "in → out features",
                    series,
                    middle=1.0,
                    caption="Blue is faster than torch, red slower; the scale is logarithmic.",
                )
            )
    return figures


def of_a_peer(one: Record) -> bool:
    return one.get("kernel") in PEERS


def shape_name(one: Record) -> str:
    return f"{one['in_features']} → {one['out_features']}"


def heat_point(one: Record) -> Point:
    rows, name = one.get("rows") or 1, str(one.get("rows") or 1)
    if one.get("main_centroids"):
        name = f"{one['main_centroids']} + {one['residual_centroids'] or 0}" + (
            f", {rows} rows" if rows > 1 else ""
        )
    return Point(
        name,
        one["ratio"],
        tip=f"{one['format']}, {shape_name(one)}, {name}: ratio {one['ratio']:.2f}, "
        f"{plain(one['us'])} µs, torch {plain(one.get('torch_us'))} µs",
    )


def throughput_latency(records: Sequence[Record]) -> list[Figure]:
    figures: list[Figure] = []
    for x, y, how in (("latency_s", "overall_tok_s", ""), ("e2e_s", "output_tok_s", ", served")):
        for (model, device), part in by_model(records, x, y).items():
            series = collect(part, variant, partial(trade_off, x=x, y=y), schemes=True)
            if len(part) == 1:
                continue  # one point is no trade-off
            figures.append(
                Figure(
                    "scatter",
                    f"Throughput against latency{how}: {model} on {device}",
                    "latency (s)",
                    "input and output tok/s" if y == "overall_tok_s" else "output tok/s",
                    series,
                    x_log=True,
                    y_log=True,
                    caption="Up and to the left is better.",
                )
            )
    return figures


def trade_off(one: Record, *, x: str, y: str) -> Point:
    return Point(
        one[x],
        one[y],
        tip=f"{variant(one)}, {condition(one)}: {plain(one[y])} tok/s at {plain(one[x])} s",
    )


def condition(one: Record) -> str:
    if one.get("rate") is not None:
        return f"{one['rate']} requests/s"
    return str(
        one.get("workload")
        or (f"concurrency {one['concurrency']}" if one.get("concurrency") else "one run")
    )


def first_token_bars(records: Sequence[Record]) -> list[Figure]:
    """TTFT and TPOT: side by side for backends that serve, one picture each for workloads (a start
    is none).
    """
    figures: list[Figure] = []
    names = {"ttft_ms_last": "TTFT", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
    for (model, device), part in by_model(records, "ttft_ms", "tpot_ms").items():
        if part[0]["bench"] == "serve":
            labels = [backend_label(one, part) for one in part]
            series = tuple(
                Series(
                    names[name],
                    tuple(
                        Point(label, one[name], tip=f"{label}: {names[name]} {one[name]:.2f} ms")
                        for label, one in zip(labels, part, strict=True)
                    ),
                )
                for name in ("ttft_ms", "tpot_ms")
            )
            figures.append(
                Figure(
                    "bars",
                    f"TTFT and TPOT: {model} on {device}",
                    "backend",
                    "ms",
                    series,
                    caption="Lower is better.",
                )
            )
    for name in ("ttft_ms_last", "tpot_ms"):
        shown = (
            one for one in records if one["bench"] == "latency" and one.get("workload") != "startup"
        )
        for (model, device), part in by_model(shown, name).items():
            series = collect(
                part, variant, partial(workload_point, metric=name, label=names[name]), schemes=True
            )
            figures.append(
                Figure(
                    "bars",
                    f"{names[name]}: {model} on {device}",
                    "workload",
                    "ms",
                    series,
                    caption="Lower is better.",
                )
            )
    return figures


def workload_point(one: Record, *, metric: str, label: str) -> Point:
    return Point(
        condition(one),
        one[metric],
        tip=f"{variant(one)}, {condition(one)}: {label} {one[metric]:.2f} ms",
    )


def backend_label(one: Record, records: Sequence[Record]) -> str:
    same = sum(other["backend"] == one["backend"] for other in records)
    return one["backend"] if same == 1 else f"{one['backend']} {one['scheme']} {condition(one)}"


def speed_lines(records: Sequence[Record]) -> list[Figure]:
    figures: list[Figure] = []
    for (model, device), part in by_model(records, "output_tok_s").items():
        several = len({one.get("gpus") for one in part}) > 1
        series = collect(
            sorted(part, key=lambda one: one["input"]),
            partial(variant, gpus=several),
            lambda one: Point(
                one["input"],
                one["output_tok_s"],
                tip=f"{variant(one)}, {one['input']} input tokens, "
                f"{one.get('gpus') or 1} GPU: {one['output_tok_s']:.2f} tokens/s",
            ),
            schemes=True,
        )
        figures.append(
            Figure(
                "line",
                f"Speed by input length: {model} on {device}",
                "input tokens",
                "tokens/s, prefill included",
                series,
            )
        )
    return figures


def memory_bars(records: Sequence[Record]) -> list[Figure]:
    figures: list[Figure] = []
    for (model, device), part in by_model(records, "allocated_gb").items():
        series = collect(
            part,
            variant,
            lambda one: Point(
                str(one["input"]),
                one["allocated_gb"],
                tip=f"{variant(one)}, {one['input']} input tokens: {one['allocated_gb']:.2f} GB",
            ),
            schemes=True,
        )
        figures.append(
            Figure(
                "bars",
                f"Peak memory by input length: {model} on {device}",
                "input tokens",
                "GB",
                series,
            )
        )
    return figures


def pareto(results: Results) -> list[Figure]:
    """One picture a model: quality against speed, area is size, front marked; only equal, real
    checkpoints are joined.
    """
    figures: list[Figure] = []
    for metric, label in (("perplexity", "perplexity"), ("kl", "KL from the original")):
        for model in dict.fromkeys(row.get("model") for row in results.of("quality")):
            quality = best_condition(
                [row for row in results.of("quality") if row.get("model") == model],
                results,
                metric=metric,
                fields=("tool", "text", "window", "stride", "tokens", "kv_dtype"),
                joinable=None,
            )
            speed = best_condition(
                [
                    row
                    for row in (*results.of("latency"), *results.of("speed"))
                    if row.get("model") == model
                ],
                results,
                metric="decode_tok_s",
                joinable=set(quality),
                fields=("bench", "backend", "workload", "batch", "input", "output"),
            )
            shared = [name for name in quality if name in speed]
            if len(shared) > 1:
                pairs = [(quality[name], speed[name]) for name in shared]
                figures.append(draw_front(pairs, model=model, metric=metric, label=label))
    return figures


def best_condition(
    rows: Sequence[Row],
    results: Results,
    *,
    metric: str,
    fields: Sequence[str],
    joinable: set[str] | None,
) -> dict[str, Row]:
    """By checkpoint, the rows of the one condition that covers most checkpoints: figures of two
    conditions do not compare.
    """
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        name = row.get("checkpoint")
        real = name and not str(name).startswith("random") and row.get("weights") != "random"
        if real and number(row.get(metric)) is not None and (joinable is None or name in joinable):
            key = (
                *(row.get(part) for part in fields),
                results.device(row) if joinable is not None else None,
            )
            found.setdefault(key, {}).setdefault(str(name), row)
    # more checkpoints first, then the workload that is about decoding
    order = sorted(found, key=lambda key: (-len(found[key]), "decode_bound" not in key))
    return found[order[0]] if order else {}


def draw_front(pairs: Sequence[tuple[Row, Row]], *, model: Any, metric: str, label: str) -> Figure:
    marks = [
        (quality[metric], -speed["decode_tok_s"], size_of(quality, speed))
        for quality, speed in pairs
    ]
    series = []
    for (quality, speed), mark in zip(pairs, marks, strict=True):
        beaten = is_beaten(mark, marks)
        tip = (
            f"{quality['scheme']}: {label} {plain(quality[metric])}, "
            f"{plain(speed['decode_tok_s'])} tok/s, {plain(mark[2])} GB"
            f"{'' if beaten else ', on the Pareto front'}; checkpoint "
            f"{str(quality['checkpoint'])[:12]}"
        )
        series.append(
            Series(
                quality["scheme"],
                (
                    Point(
                        speed["decode_tok_s"],
                        quality[metric],
                        tip=tip,
                        size=mark[2],
                        marked=not beaten,
                    ),
                ),
                scheme=str(quality["scheme"]),
            )
        )
    first = pairs[0][1]
    sizes = f"batch {first.get('batch', 1)}, {first['input']} in, {first['output']} out"
    where = f"{sizes}, {first['backend']}"
    flat = [mark[:2] for mark in marks]
    line = sorted(
        (-minus_speed, bad) for bad, minus_speed in flat if not is_beaten((bad, minus_speed), flat)
    )
    return Figure(
        "scatter",
        f"Quality ({metric}) against speed against size: {model}",
        f"decode tok/s ({where})",
        f"{label} (lower is better)",
        tuple(series),
        caption=FRONT,
        front=tuple(line),
    )


def is_beaten(mark: Sequence[float], marks: Sequence[Sequence[float]]) -> bool:
    """Whether another is nowhere worse (less is better) and not the same."""
    return any(
        all(a <= b for a, b in zip(other, mark, strict=True)) and other != mark for other in marks
    )


def size_of(quality: Row, speed: Row) -> float:
    return float(quality.get("size_gb") or speed.get("size_gb") or 0.0)


def layer_times(rows: Sequence[Row]) -> list[Figure]:
    """Milliseconds of each layer in one call, phase by phase: on the device where it has one, else
    on the host.
    """
    layers = [row for row in rows if row.get("level") == "layer"]
    figures: list[Figure] = []
    for model in dict.fromkeys(
        (row.get("model"), row.get("scheme"), row["device_name"]) for row in layers
    ):
        mine = [
            row
            for row in layers
            if (row.get("model"), row.get("scheme"), row["device_name"]) == model
        ]
        kind = "device" if any(row["kind"] == "device" for row in mine) else "host"
        mine = sorted(
            (row for row in mine if row["kind"] == kind),
            key=lambda row: int(row["operator"].split()[-1]),
        )
        series = collect(mine, lambda row: str(row.get("phase")), layer_point)
        title = f"Time of each layer, {model[0]} {model[1]} on {model[2]}"
        figures.append(
            Figure("bars", title, "layer", f"milliseconds on the {kind}, one step", series)
        )
    return figures


def layer_point(row: Row) -> Point:
    milliseconds = row["total_us"] / max(row["calls"], 1) / 1e3
    return Point(
        row["operator"].split()[-1], milliseconds, tip=f"{row['operator']}: {row['calls']} calls"
    )
