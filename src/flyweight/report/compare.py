"""Two result files against each other: rows paired by what identifies them, judged from their raw
samples.

A metric got worse where B, made better by the tolerance, is still worse than A by a one-sided
Mann–Whitney test (exact up to 40 samples, which with three repeats a side can just reach p = 0.05;
the normal approximation with ties above). The change shown is of medians, with a bootstrap
interval. A pair with one sample on a side is shown and never judged. Each pair is its own test: of
a hundred pairs that did not change, up to five would pass p ≤ 0.05 at a tolerance of 0, which is
why the tolerance is not 0 by default.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyweight.report.rows import Group, Results, identity

ALPHA = 0.05
EXACT = 40
RESAMPLES = 1000
WATCHED = {  # bench → metric → whether more is better
    "kernel": {"us": False},
    "latency": {
        "latency_s": False,
        "ttft_ms": False,
        "ttft_ms_last": False,
        "tpot_ms": False,
        "decode_tok_s": True,
        "overall_tok_s": True,
    },
    "speed": {"output_tok_s": True, "decode_tok_s": True},
    "serve": {
        "ttft_ms": False,
        "tpot_ms": False,
        "e2e_s": False,
        "output_tok_s": True,
        "request_s": True,
        "goodput_s": True,
    },
    "throughput": {"total_tok_s": True, "output_tok_s": True, "qps": True},
    "quantize": {"seconds": False},
}
NOT_FACTS = {"schema", "bench", "run_id", "time", "environment", "status", "id", "command"}


@dataclass(frozen=True)
class Change:
    """One metric of one pair; `change` is of medians, above 0 is worse, whichever way the metric
    counts.
    """

    what: str
    metric: str
    before: float
    after: float
    samples: tuple[int, int]
    change: float
    interval: tuple[float, float] | None
    p_worse: float | None
    p_better: float | None
    verdict: str  # worse | better | same | one sample


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]
    environment: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "worse"]


def compare(before: Results, after: Results, *, tolerance: float) -> Comparison:
    old, new = index(before), index(after)
    changes: list[Change] = []
    notes: list[str] = []
    for key in old:
        if key not in new:
            continue
        a, b = old[key], new[key]
        for side, one in (("A", a), ("B", b)):
            if len(names := {row.get("checkpoint") for row in one.rows}) > 1:
                notes.append(f"{title(a)}: {len(names)} checkpoints are mixed in {side}")
        if (x := a.get("checkpoint")) != (y := b.get("checkpoint")):
            notes.append(
                f"{title(a)}: the checkpoint is {x} in A and {y} in B; the comparison is of two "
                "different weights"
            )
        changes += [
            judge(a, b, metric, more=more, tolerance=tolerance)
            for metric, more in WATCHED[key[0]].items()
            if a.values(metric) and b.values(metric)
        ]
    for side, here, there in (("A", old, new), ("B", new, old)):
        if alone := [title(one) for key, one in here.items() if key not in there]:
            notes.append(
                f"only in {side}: {len(alone)} measurements "
                f"({'; '.join(alone[:3])}{' …' if len(alone) > 3 else ''})"
            )
    return Comparison(
        tuple(changes),
        environment=tuple(environment_differences(before, after)),
        notes=tuple(notes),
    )


def index(results: Results) -> dict[tuple[Any, ...], Group]:
    """Groups by identity without the checkpoint's hash, which says how a file was made; a
    difference in it is noted.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in results.rows:
        if row["status"] == "ok" and row["bench"] in WATCHED:
            found.setdefault(identity(row, leave=("checkpoint",)), []).append(row)
    return {key: Group(tuple(rows)) for key, rows in found.items()}


def title(group: Group) -> str:
    row = group.rows[0]
    names = [
        name
        for name in (
            "model",
            "scheme",
            "format",
            "kernel",
            "backend",
            "workload",
            "chain",
            "setting",
        )
        if row.get(name)
    ]
    numbers = [
        name
        for name in (
            "batch",
            "rows",
            "in_features",
            "out_features",
            "main_centroids",
            "residual_centroids",
            "input",
            "output",
            "prompts",
            "rate",
            "concurrency",
            "gpus",
        )
        if row.get(name) is not None
    ]
    return " ".join(
        [
            row["bench"],
            *(str(row[name]) for name in names),
            *(f"{name}={row[name]}" for name in numbers),
        ]
    )


def judge(a: Group, b: Group, metric: str, *, more: bool, tolerance: float) -> Change:
    before, after = a.values(metric), b.values(metric)
    # as costs, so that one test serves: the inverse of a rate
    x, y = (
        [1 / value for value in side if value] if more else list(side) for side in (before, after)
    )
    change = (
        statistics.median(y) / statistics.median(x) - 1
        if x and y and statistics.median(x)
        else math.nan
    )
    p_worse = p_better = interval = None
    verdict = "one sample"
    if min(len(x), len(y)) > 1:
        p_worse = mann_whitney(x, [value / (1 + tolerance) for value in y])
        p_better = mann_whitney([value / (1 + tolerance) for value in x], y, less=True)
        interval = bootstrap(x, y)
        verdict = (
            "worse"
            if p_worse <= ALPHA and change > tolerance
            else "better"
            if p_better <= ALPHA and change < -tolerance / (1 + tolerance)
            else "same"
        )
    return Change(
        title(a),
        metric,
        statistics.median(before),
        statistics.median(after),
        (len(before), len(after)),
        change,
        interval,
        p_worse,
        p_better,
        verdict,
    )


def mann_whitney(x: Sequence[float], y: Sequence[float], *, less: bool = False) -> float:
    """The chance of ranks of y this high (or low) if x and y were drawn from one distribution."""
    if less:
        return mann_whitney(y, x)
    ranks = doubled_ranks([*x, *y])
    total, count = sum(ranks[len(x) :]), len(y)
    if len(ranks) <= EXACT:
        return exact_tail(ranks, count, total)
    size = len(ranks)
    mean = count * (size + 1)  # of twice the rank sum
    ties = sum(tied**3 - tied for tied in (ranks.count(rank) for rank in set(ranks)))
    variance = count * len(x) / 3 * (size + 1 - ties / (size * (size - 1)))  # of twice the rank sum
    return 0.5 * math.erfc((total - mean - 1) / math.sqrt(2 * variance)) if variance > 0 else 1.0


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the mean rank, so that ties stay whole numbers."""
    order = sorted(values)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for place, value in enumerate(order, start=1):
        first.setdefault(value, place)
        last[value] = place
    return [first[value] + last[value] for value in values]


def exact_tail(ranks: Sequence[int], count: int, total: int) -> float:
    """The share of all choices of `count` ranks whose sum is at least `total`, by counting sums."""
    sums: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(count)]
    for rank in ranks:
        for size in range(count, 0, -1):
            for value, ways in sums[size - 1].items():
                sums[size][value + rank] = sums[size].get(value + rank, 0) + ways
    return sum(ways for value, ways in sums[count].items() if value >= total) / math.comb(
        len(ranks), count
    )


def bootstrap(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the change of medians; the same seed, so that the same files give the same
    text.
    """
    draw = random.Random(0)
    found = sorted(
        statistics.median(draw.choices(y, k=len(y))) / statistics.median(draw.choices(x, k=len(x)))
        - 1
        for _ in range(RESAMPLES)
    )
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1]


def environment_differences(before: Results, after: Results) -> list[str]:
    """Facts that the environments of the two files do not share, a line each."""

    def facts(results: Results) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in results.environments.values():
            flat = {
                name: value
                for name, value in row.items()
                if name not in NOT_FACTS and not isinstance(value, dict)
            }
            parts = {
                f"{name} {part}": value
                for name, block in row.items()
                if isinstance(block, dict)
                for part, value in block.items()
            }
            for name, value in {**flat, **parts}.items():
                found.setdefault(name, set()).add(
                    value if isinstance(value, str) else json.dumps(value)
                )
        return found

    old, new = facts(before), facts(after)
    return [
        f"{name}: {' / '.join(sorted(old.get(name, {'not told'})))} → "
        f"{' / '.join(sorted(new.get(name, {'not told'})))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
