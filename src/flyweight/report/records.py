"""A record per group of repeats: means and deviations under the fields' own names, labels, and
speed-ups over the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyweight.report.layouts import BASELINES
from flyweight.report.rows import (
    COUNTS,
    NUMBERS,
    PERCENTILES,
    Group,
    Results,
    is_checked,
    name_of,
    number,
)

Record = dict[str, Any]
CASE = ("model", "scheme", "checkpoint", "backend", "gpus")


def make_record(group: Group) -> Record:
    record: Record = {"runs": len(group.rows), "device_name": group.device}
    for name, value in group.rows[0].items():
        if name in NUMBERS - COUNTS or name in PERCENTILES["serve"]:
            record[name], record[f"{name}±"] = group.mean(name), group.deviation(name)
            for part, figure in value.items() if isinstance(value, dict) else ():
                record[f"{name}_{part}"] = number(figure)
        else:
            record[name] = value
    record["flags"] = [flag for row in group.rows for flag in row.get("flags") or ()]
    record["label_model"] = record.get("model")
    return record


def add_agreement(records: Sequence[Record], results: Results) -> None:
    """What a record's own rows do not tell is taken from the last other row about the same case on
    the same device.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for row in sorted(filter(is_checked, results.rows), key=lambda one: str(one["time"])):
        found[(*(row.get(name) for name in CASE), results.device(row))] = row
    for record in records:
        other = found.get((*(record.get(name) for name in CASE), record["device_name"]))
        if other and record.get("checkpoint") and not is_checked(record):
            record |= {name: value for name, value in other.items() if name.startswith("agreement")}
            record["agreement_with"] += ", checked apart"


def tell_apart(records: Sequence[Record], name: str) -> None:
    """Where one name stands for several checkpoints, the name gets the beginning of the
    checkpoint's hash.
    """
    seen: dict[tuple[Any, ...], set[Any]] = {}
    for record in records:
        seen.setdefault(name_of(record), set()).add(record.get("checkpoint"))
    for record in records:
        if len(seen[name_of(record)]) > 1:
            record[name] = f"{record[name]} [{str(record.get('checkpoint'))[:14]}]"


def find_baseline(records: Sequence[Record], asked: str | None) -> str | None:
    """Of the schemes and backends that are here: the one asked for, else the usual one."""
    here = {
        str(record[name]).lower(): str(record[name])
        for record in records
        for name in ("scheme", "backend")
        if record.get(name)
    }
    return next(
        (here[name.lower()] for name in ([asked] if asked else BASELINES) if name.lower() in here),
        None,
    )


def add_speedups(
    records: Sequence[Record],
    *,
    baseline: str | None,
    same: Sequence[str],
    value: str,
    more_is_better: bool,
) -> None:
    """Each record against the baseline that agrees with it in `same` (and in backend or scheme,
    whichever is not compared).
    """
    name = find_baseline(records, baseline)
    if name is None:
        return
    compared = "scheme" if any(record.get("scheme") == name for record in records) else "backend"
    kept = (*same, "backend" if compared == "scheme" else "scheme", "device_name")
    bases: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.get(compared) == name:
            bases.setdefault(tuple(record.get(part) for part in kept), []).append(record)
    for record in records:
        here = bases.get(tuple(record.get(part) for part in kept), [])
        # which one would be a silent choice
        several = len({one.get("checkpoint") for one in here}) > 1
        base, own = here[0].get(value) if here and not several else None, record.get(value)
        if base and own:
            record["speedup"] = own / base if more_is_better else base / own
        record["baseline"] = name
