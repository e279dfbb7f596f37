"""Latency in a report: a table of all schemes, their ranking, and the runs behind each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyweight.report import figures, layouts, performance
from flyweight.report.blocks import Block, Heading, Items, Paragraph, make_table
from flyweight.report.choice import inside_the_error
from flyweight.report.records import Record, add_speedups, tell_apart
from flyweight.report.rows import Results, Row
from flyweight.report.view import View, split

MEDALS = ("🥇", "🥈", "🥉")


def latency(view: View) -> list[Block]:
    blocks: list[Block] = []
    rankings: list[Block] = []
    records = view.records("latency")
    for record in records:
        record["label"] = (
            f"{record['scheme']}_{record['workload']}"
            if view.seed and record.get("workload")
            else record["scheme"]
        )
    tell_apart(records, "label")
    several = len({(one["model"], one["device_name"]) for one in records}) > 1
    shape = ("batch", "input", "output", "workload", "model", "device_name")
    for part in split(records, lambda one: tuple(one.get(name) for name in shape)).values():
        metric = "decode_tok_s" if view.seed else choose_metric(part)
        best = rank(part, metric)
        heading = configuration(view, part[0], several=several)
        blocks += [heading, *summary(view, best, metric=metric)]
        placed = rank(share_places(best, metric), metric) if view.seed else best
        rankings += [Heading(heading.text, level=3), ranking(placed, metric, named=not view.seed)]
    if not blocks:
        return []
    by = "by Output Throughput" if view.seed else "each workload by the metric it is about"
    return [
        Heading("Performance Benchmark Results", level=1, short="Performance"),
        *blocks,
        Heading(f"Performance Ranking ({by})", short="Ranking"),
        *rankings,
        *figures.throughput_latency(records),
        *figures.first_token_bars(records),
    ]


def configuration(view: View, one: Record, *, several: bool) -> Heading:
    sizes = f"batch_size={one['batch']}, input_len={one['input']}, output_len={one['output']}"
    workload = one.get("workload")
    place = f", {one['model']} on {one['device_name']}" if several else ""
    text = f"Configuration: {sizes}"
    if not view.seed:
        text += f" ({workload or 'unnamed'}{place})"
    return Heading(text, short=f"{workload or sizes}{place}")


def summary(view: View, best: Sequence[Record], *, metric: str) -> list[Block]:
    """The table of one workload, best first, and its runs."""
    if not view.seed:
        add_speedups(
            best,
            baseline=view.baseline,
            same=("model",),
            value=metric,
            more_is_better=layouts.METRICS[metric][2],
        )
    alone = len({record["backend"] for record in best}) == 1
    for record in best:
        record["place"] = record["label"] if alone else f"{record['label']} ({record['backend']})"
        record["about"] = layouts.METRICS[metric][0]
        record["code_label"] = f"`{record['label']}`"
    return [
        Paragraph(f"**Total models tested:** {len(best)}"),
        Heading("Summary Table", level=3),
        make_table("", layouts.LATENCY[view.layout], best),
        Heading("Detailed Results", level=3),
        *details(view, best),
    ]


def choose_metric(records: Sequence[Record]) -> str:
    one = records[0]
    wanted = layouts.about(
        one.get("workload"), batch=one["batch"], input=one["input"], output=one["output"]
    )
    return next(
        (name for name in wanted if all(record.get(name) is not None for record in records)),
        "latency_s",
    )


def rank(records: Sequence[Record], metric: str) -> list[Record]:
    return sorted(
        records, key=lambda one: one.get(metric) or 0.0, reverse=layouts.METRICS[metric][2]
    )


def share_places(records: Sequence[Record], metric: str) -> list[Record]:
    """Variants that are the same at run time as one, with the mean of their figures: random weights
    in one format and of one size differ by the name of the method that would have made them.
    """

    def same(record: Record) -> tuple[Any, ...]:
        weights = str(record.get("checkpoint") or "")
        if not weights.startswith("random:") or record.get(metric) is None:
            return (record["place"],)
        kind = performance.kind_of(record), weights, record["backend"]
        return *kind, record.get("bits_per_weight"), record.get("size_gb")

    placed = []
    for alike in split(records, same).values():
        mean = sum(one.get(metric) or 0.0 for one in alike) / len(alike)
        names = "** = **".join(sorted(one["place"] for one in alike))
        placed.append(alike[0] | {"place": names, metric: mean} if len(alike) > 1 else alike[0])
    return placed


def ranking(best: Sequence[Record], metric: str, *, named: bool) -> Items:
    name, unit, more = layouts.METRICS[metric]
    digits = 3 if unit == "s" else 2
    marks = (
        marks_inside_errors(best, metric)
        if named
        else [*MEDALS, *(f"{place}." for place in range(len(MEDALS) + 1, len(best) + 1))]
    )
    places = [
        (0, f"{mark} **{one['place']}**: {one[metric]:.{digits}f} {unit}")
        for mark, one in zip(marks, best, strict=False)
        if one.get(metric) is not None
    ]
    one = best[0]
    wanted = layouts.about(
        one.get("workload"), batch=one["batch"], input=one["input"], output=one["output"]
    )[0]
    instead = "" if wanted == metric else f" ({layouts.METRICS[wanted][0]} was not measured)"
    head = [(0, f"by {name}{instead}, {'more' if more else 'less'} is better")] if named else []
    if named and any(mark.startswith("=") for mark in marks):
        head = [(0, f"{head[0][1]}; = is equal within the deviations of the runs")]
    return Items((*head, *places), ranked=True)


def marks_inside_errors(best: Sequence[Record], metric: str) -> list[str]:
    """Places, shared by those whose difference is inside the deviations of the runs; medals only
    for places that are not.

    Without repeats no error is known, and nobody gets a medal.
    """
    firsts: list[int] = []  # for each, the first of those it is equal to
    for index, one in enumerate(best):
        equal = index > 0 and inside_the_error(one, best[firsts[-1]], metric)
        firsts.append(firsts[-1] if equal else index)
    marks = []
    for index, one in enumerate(best):
        place = firsts[index]
        shared = firsts.count(place) > 1
        known = one.get(f"{metric}±") is not None and len(best) > 1
        medal = MEDALS[place] if place < len(MEDALS) and known and not shared else ""
        marks.append(medal or f"{'=' if shared else ''}{place + 1}.")
    return marks


def details(view: View, records: Sequence[Record]) -> list[Block]:
    """The runs of each variant and their statistics, as the document of this layout has them."""
    figure_names = (
        ("Latency", "latency_s", "s"),
        ("Output Throughput", "decode_tok_s", " tok/s"),
        ("Overall Throughput", "overall_tok_s", " tok/s"),
        ("Input Throughput", "input_tok_s", " tok/s"),
    )
    blocks: list[Block] = []
    for record in sorted(records, key=lambda one: one["label"]):
        rows = runs_of(view.results, record)
        lines = [(0, f"**Total runs:** {len(rows)}"), (0, "**Individual runs:**")]
        for row in rows:
            flags = f" ({'; '.join(row['flags'])})" if row.get("flags") and not view.seed else ""
            lines.append((1, f"`{row.get('label') or row['run_id']}`:{flags}"))
            lines += [
                (2, f"{name}: {'N/A' if row.get(key) is None else f'{row[key]:.2f}{unit}'}")
                for name, key, unit in figure_names
            ]
        lines.append(
            (
                0,
                "**Statistics:**"
                if view.seed
                else "**Statistics** (mean ± sample deviation of the runs):",
            )
        )
        lines += [
            (1, f"{name}: {record[key]:.2f} ± {record[f'{key}±']:.2f}")
            for name, key, _ in figure_names
            if record.get(f"{key}±") is not None
        ]
        blocks.append(Items(tuple(lines), title=record["place"], detail=True))
    return blocks


def runs_of(results: Results, record: Record) -> list[Row]:
    keys = (
        "model",
        "checkpoint",
        "scheme",
        "kv_dtype",
        "backend",
        "workload",
        "batch",
        "input",
        "output",
    )
    return [
        row
        for row in results.of("latency")
        if all(row.get(key) == record.get(key) for key in keys)
        and results.device(row) == record["device_name"]
    ]
