"""What a report was asked for, and the records that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flyweight.report.records import Record, add_agreement, make_record, tell_apart
from flyweight.report.rows import Results, group


@dataclass(frozen=True)
class View:
    """What a report was asked for."""

    results: Results
    layout: str = "full"
    baseline: str | None = None
    most: int | None = None  # operators of a profile; None: all
    sections: tuple[str, ...] = ()  # of SECTIONS; none: all

    @property
    def seed(self) -> bool:
        return self.layout == "seed"

    def records(self, bench: str) -> list[Record]:
        """One a group of repeats; the seeds' layout shows every row, as its documents do."""
        rows = self.results.of(bench)
        groups = (
            [one for row in rows for one in group(self.results, [row])]
            if self.seed and bench != "latency"
            else group(self.results, rows)
        )
        records = [make_record(one) for one in groups]
        if not self.seed:
            tell_apart(records, "label_model")
            add_agreement(records, self.results)
        return records


def split(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found
