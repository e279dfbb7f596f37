"""What a report is made of: headings, paragraphs, lists, tables and figures. Renderers know these
and nothing of benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flyweight.report.units import plain

PALETTE = 8  # colours, as many as page.css and plot.py name


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2
    short: str = ""  # for a list of contents


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Items:
    """A list, or with `ranked` a numbered one; each item is (depth, text)."""

    items: tuple[tuple[int, str], ...]
    ranked: bool = False
    title: str = ""
    detail: bool = False  # left out on the terminal, folded in HTML


@dataclass(frozen=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    merge: int = 0  # so many leading columns are merged where they repeat, in grid tables
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Highlights:
    """The few figures that matter most: (what, the figure, against what)."""

    items: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Point:
    x: float | str
    y: float
    tip: str = ""
    size: float | None = None  # area of a bubble
    marked: bool = False  # on the Pareto front


@dataclass(frozen=True)
class Series:
    """`scheme` is what decides the colour, the same in every figure; None where the series are no
    schemes.
    """

    name: str
    points: tuple[Point, ...]
    scheme: str | None = None
    color: int | None = None  # its number in the palette; None: its place in the figure


@dataclass(frozen=True)
class Figure:
    """kind: `line`, `scatter`, `bars` (x is a category) or `heat` (a series is a line of cells)."""

    kind: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False
    caption: str = ""
    middle: float | None = None  # of a heat map: the value where good turns to bad
    front: tuple[tuple[float, float], ...] = ()  # a dotted line through the best trade-offs

    def look(self, index: int) -> tuple[int, bool]:
        """(the number of a series' colour, whether one before it in this figure looks the same)"""
        numbers = [
            place if series.color is None else series.color
            for place, series in enumerate(self.series)
        ]
        wrapped = [number % PALETTE for number in numbers]
        return wrapped[index], wrapped[index] in wrapped[:index]

    @property
    def categories(self) -> list[str]:
        return list(
            dict.fromkeys(str(point.x) for series in self.series for point in series.points)
        )


Block = Heading | Paragraph | Items | Highlights | Table | Figure


def with_colors(blocks: Sequence[Block]) -> list[Block]:
    """Every scheme gets one colour for the whole report, in the order in which they appear."""
    numbers: dict[str, int] = {}
    colored: list[Block] = []
    for block in blocks:
        if isinstance(block, Figure):
            series = tuple(
                replace(
                    one,
                    color=None
                    if one.scheme is None
                    else numbers.setdefault(one.scheme, len(numbers)),
                )
                for one in block.series
            )
            block = replace(block, series=series)
        colored.append(block)
    return colored


@dataclass(frozen=True)
class Column:
    """A field of a record and how it is written: `form` is a format spec, `±` before it adds the
    deviation.
    """

    header: str
    name: str
    form: str = ""
    optional: bool = False  # left out where no record has it
    absent: str = "–"
    unit: str = ""

    def cell(self, record: dict) -> str:
        value = record.get(self.name)
        if value is None or value == "":
            return self.absent
        form = self.form.lstrip("±")
        text = (
            format(value, form) if form and isinstance(value, (int, float)) else plain(value)
        ) + self.unit
        deviation = record.get(f"{self.name}±") if self.form.startswith("±") else None
        return (
            text
            if deviation is None
            else f"{text} ± {format(deviation, form) if form else plain(deviation)}"
        )


def make_table(
    title: str, columns: Sequence[Column], records: Sequence[dict], *, merge: int = 0
) -> Table:
    shown = [
        column
        for column in columns
        if not column.optional or any(record.get(column.name) is not None for record in records)
    ]
    headers = tuple(
        column.header.format_map(records[0]) if "{" in column.header else column.header
        for column in shown
    )
    return Table(
        title,
        headers,
        tuple(tuple(column.cell(record) for column in shown) for record in records),
        merge=merge,
        notes=flag_notes(records),
    )


def flag_notes(records: Sequence[dict]) -> tuple[str, ...]:
    """What the rows say against themselves, each once, with how many rows say it."""
    counts: dict[str, int] = {}
    for record in records:
        for flag in record.get("flags") or ():
            counts[flag] = counts.get(flag, 0) + 1
    return tuple(f"{count} × {flag}" for flag, count in counts.items())
