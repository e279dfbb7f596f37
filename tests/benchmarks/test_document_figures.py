"""Tables of the documents that are typed by hand and name a file of rows: their figures are in
it.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"[\d,]*\d(?:\.\d+)?")
FILE = re.compile(r"`([\w./-]+\.jsonl)`")
CLOSE = 0.006  # of a quotient: that of two figures of the line is of rounded ones


def lines_with_rows(text: str) -> list[tuple[str, list[str]]]:
    """(file, cells) of every table line that names a file, or says `the same` after one that
    does.
    """
    found, file = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            file = None
            continue
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if names := FILE.findall(line):
            file = names[0]
        elif cells[-1] != "the same":
            file = None
        if file:
            found.append((file, cells))
    return found


def figures(cells: list[str]) -> list[str]:
    """Of cells that are nothing else: `467`, `5,756 / 1,472 / 240`."""
    parts = [cell.split(" / ") for cell in cells]
    return [part for one in parts for part in one if all(map(FIGURE.fullmatch, one))]


def numbers(value):
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def plain(printed: str) -> float:
    return float(printed.replace(",", ""))


def says(printed: str, value: float) -> bool:
    """At the digits that are printed."""
    digits = len(printed.partition(".")[2])
    return abs(plain(printed) - value) <= 0.501 * 10**-digits


def rows_of(name: str) -> list[float]:
    paths = [
        path for path in (ROOT / "benchmarks").rglob("*.jsonl") if f"/{path}".endswith(f"/{name}")
    ]
    assert paths, f"no file {name}"
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [number for line in lines for number in numbers(json.loads(line))]


def missing(text: str) -> list[tuple[str, str]]:
    """Figures that are neither in the file nor the quotient of two others of their line."""
    found = []
    for file, cells in lines_with_rows(text):
        values, printed = rows_of(file), figures(cells)
        for one in printed:
            others = [plain(other) for other in printed if other != one]
            quotients = (a / b for a, b in itertools.permutations(others, 2) if b)
            is_quotient = any(
                abs(plain(one) / quotient - 1) <= CLOSE for quotient in quotients if quotient
            )
            if not is_quotient and not any(says(one, value) for value in values):
                found.append((file, one))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_of_a_line_that_names_its_rows_are_in_them(path):
    assert missing(path.read_text(encoding="utf-8")) == []


def test_there_are_such_lines_and_a_changed_figure_is_seen():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (file, cells), *_ = lines_with_rows(text)
    assert file == "plugin.jsonl" and figures(cells)
    printed = figures(cells)[0]
    changed = text.replace(f"| {printed} |", f"| {plain(printed) + 7:.0f} |", 1)
    assert (file, f"{plain(printed) + 7:.0f}") in missing(changed)
    assert len(lines_with_rows((ROOT / "docs" / "serve.md").read_text(encoding="utf-8"))) > 8
