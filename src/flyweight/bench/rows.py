"""Result rows: what every number carries with it, so that it can be compared with others and
believed.

Rows are appended to a result file a whole line at a time, so that a run that is cut off leaves its
finished rows behind and `finished` finds them again. A last line without its end is mended before
anything is written after it.
"""

from __future__ import annotations

import datetime
import json
import os
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyweight.errors import ResultError
from flyweight.report.rows import is_checked
from flyweight.saving import write_text, writing

if TYPE_CHECKING:
    import torch

SCHEMA = 1
BEGINNING = b'{"schema"'  # of every row
Row = dict[str, Any]


def make_row(
    bench: str, environment: str | None = None, *, status: str = "ok", **fields: Any
) -> Row:
    """One row; `environment` is the id of the environment row in the same file."""
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "schema": SCHEMA,
        "bench": bench,
        "run_id": uuid.uuid4().hex[:12],
        "time": stamp,
        "environment": environment,
        "status": status,
        **fields,
    }


def environment_row(device: torch.device | str = "cpu", *, measure_bandwidth: bool = True) -> Row:
    from flyweight.bench.environment import facts

    identity = uuid.uuid4().hex[:12]
    return make_row(
        "environment", identity, id=identity, **facts(device, measure_bandwidth=measure_bandwidth)
    )


def rounded(fields: Row, digits: int = 6) -> Row:
    """Floats with as many digits as mean something: files that people read."""
    return {
        name: float(f"{value:.{digits}g}") if isinstance(value, float) else value
        for name, value in fields.items()
    }


class ResultFile:
    """Rows appended to a JSONL file, and which measurements are in it already."""

    def __init__(self, path: Path):
        self.path = path
        if path.is_dir():
            raise ResultError(f"{path} is a folder; a file for result rows (JSONL) is wanted")
        with writing(path):  # what cannot be written shows before the work, not after it
            path.parent.mkdir(parents=True, exist_ok=True)
            mend(path)
        self.rows = self._read()

    def _read(self) -> list[Row]:
        from flyweight.report.read import read_one

        if not self.path.exists() or not self.path.read_text(encoding="utf-8").strip():
            return []
        return list(read_one(self.path).rows)

    def append(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        before = self.path.stat().st_size if self.path.is_file() else None
        with writing(self.path, len(lines)):
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(lines)
            except OSError:
                if before is not None:  # no half row is left for whoever goes on
                    os.truncate(self.path, before)
                raise
        self.rows += [row for row in rows if row["bench"] != "environment"]

    def add(self, environment: Row, row: Row) -> None:
        """One row, after that of its environment where it is the first of it."""
        known = any(other["environment"] == environment["id"] for other in self.rows)
        self.append([row] if known else [environment, row])

    def amend(self, rows: Iterable[Row]) -> None:
        """Replace rows of the same run_id: what can only be said once all repeats are there."""
        changed = {row["run_id"]: row for row in rows if row not in self.rows}
        if not changed:
            return
        self.rows = [changed.get(row["run_id"], row) for row in self.rows]
        lines = [
            json.loads(line)
            for line in self.path.read_text(encoding="utf-8").split("\n")
            if line.strip()
        ]
        write_text(
            self.path,
            "".join(
                json.dumps(changed.get(row["run_id"], row), ensure_ascii=False) + "\n"
                for row in lines
            ),
        )

    def finished(self, bench: str, **what: Any) -> list[Row]:
        """Rows of this measurement that need not be made again: what went well, or can never go."""
        return [
            row
            for row in self.rows
            if row["bench"] == bench
            and row["status"] in ("ok", "skipped")
            and all(row.get(name) == value for name, value in what.items())
        ]

    def went_well(self, **what: Any) -> list[Row]:
        return [
            row
            for row in self.rows
            if row["status"] == "ok" and all(row.get(name) == value for name, value in what.items())
        ]

    def unchecked(self, **case: Any) -> bool:
        """Whether this case has rows, and none of them says with what its greedy tokens were
        compared.
        """
        rows = self.went_well(**case)
        return bool(rows) and not any(map(is_checked, rows))


def mend(path: Path) -> None:
    """End the last line of the file: it gets its newline if it is a whole row, and goes if it was
    cut off.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        if not data or data.endswith(b"\n"):
            return
        last = data.rfind(b"\n") + 1
        if not data[last:].startswith(BEGINNING) and not BEGINNING.startswith(data[last:]):
            return  # no row of ours; whoever reads the file says what it is
        try:
            json.loads(data[last:])
        except ValueError:  # of JSON, or of half a character
            warnings.warn(
                f"{path}: the last row was cut off; it is removed, and measured again "
                f"if it is wanted"
            )
            file.truncate(last)
        else:
            file.write(b"\n")
