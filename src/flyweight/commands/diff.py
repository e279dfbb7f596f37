"""`flyweight diff`: two result files against each other."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyweight.errors import OptionError, ResultError

if TYPE_CHECKING:
    from flyweight.report.compare import Change, Comparison


def diff(
    before: Annotated[Path, typer.Argument(help="Result rows of before, A.")],
    after: Annotated[Path, typer.Argument(help="Result rows of after, B.")],
    tolerance: Annotated[
        float, typer.Option(help="How much slower is still fine: 0.03 is 3 %.")
    ] = 0.03,
    every: Annotated[bool, typer.Option("--all", help="Show what did not change too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two result files from their raw samples; the exit code is 1 if something got
    significantly slower.

    Significantly slower than the tolerance: by a one-sided Mann–Whitney test at p ≤ 0.05 with the
    tolerance given to B. The interval beside a change of medians is a 95 % bootstrap. One sample a
    side is shown, and never judged.

    Examples:

        flyweight diff main.jsonl branch.jsonl

        flyweight diff main.jsonl branch.jsonl --tolerance 0.05 --all --json
    """
    from flyweight.report.compare import compare
    from flyweight.report.read import read

    if tolerance < 0:
        raise OptionError(f"--tolerance {tolerance}: must be 0 or more")
    comparison = compare(read([before]), read([after]), tolerance=tolerance)
    if not comparison.changes:
        raise ResultError(f"{before} and {after} have no measurement in common; nothing to compare")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(comparison), ensure_ascii=False))
    else:
        show(comparison, tolerance=tolerance, every=every)
    raise typer.Exit(1 if comparison.worse else 0)


def show(comparison: Comparison, *, tolerance: float, every: bool) -> None:
    from flyweight.report.blocks import Table
    from flyweight.report.render import pipe_table

    for name, texts in (("Environment", comparison.environment), ("Note", comparison.notes)):
        for text in texts:
            typer.echo(f"{name}: {text}")
    shown = [
        change for change in comparison.changes if every or change.verdict in ("worse", "better")
    ]
    headers = (
        "measurement",
        "metric",
        "A",
        "B",
        "change (> 0 is slower)",
        "95 % interval",
        "samples",
        "verdict",
    )
    if shown:
        typer.echo(
            "\n" + pipe_table(Table("", headers, tuple(line(change) for change in shown))) + "\n"
        )
    counts = Counter(change.verdict for change in comparison.changes)
    alone = (
        (f", {counts['one sample']} with one sample a side, not judged")
        if counts["one sample"]
        else ""
    )
    typer.echo(
        f"{counts['worse']} worse, {counts['better']} better, {counts['same']} the same within "
        f"{tolerance:.1%}{alone} (medians, one-sided Mann–Whitney, p ≤ 0.05)"
    )


def line(change: Change) -> tuple[str, ...]:
    from flyweight.report.units import plain

    interval = (
        "–"
        if change.interval is None
        else (f"{change.interval[0]:+.1%} … {change.interval[1]:+.1%}")
    )
    return (
        change.what,
        change.metric,
        plain(change.before),
        plain(change.after),
        f"{change.change:+.1%}",
        interval,
        f"{change.samples[0]} / {change.samples[1]}",
        change.verdict,
    )
