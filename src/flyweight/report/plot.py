"""Figures as PNG or SVG files, by matplotlib."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path
from typing import Any

from flyweight.errors import MissingPackageError
from flyweight.report.blocks import Figure
from flyweight.saving import replacing, writing

COLORS = ("#2a6fdb", "#e07b00", "#2c9a4b", "#c23b6b", "#7a52c7", "#0f9aa8", "#9a7b00", "#6b7280")
# characters of a name, since what a backend was started with may be long; and of a line below a bar
LONGEST, WIDEST = 44, 22
MOST_INSIDE = 5  # series whose legend has room among them


def draw(figure: Figure, folder: Path, *, kind: str = "png", name: str | None = None) -> Path:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise MissingPackageError(
            "figures need matplotlib: pip install 'flyweight[report]'"
        ) from None
    # lines of the legend
    below = math.ceil(len(figure.series) / 3) if len(figure.series) > MOST_INSIDE else 0
    tall = (
        max(3.6, 0.22 * len(figure.series) + 1.4) if figure.kind == "heat" else 4.2 + 0.16 * below
    )
    canvas = Canvas(figsize=(7.5, tall), layout="constrained")
    axes = canvas.subplots()
    {"line": lines, "scatter": scatter, "bars": bars, "heat": heat}[figure.kind](figure, axes)
    axes.set_title(figure.title, fontsize=10)
    axes.set_xlabel(figure.x)
    axes.set_ylabel(figure.y)
    if figure.kind != "heat":
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        if len(figure.series) > MOST_INSIDE and not figure.front:
            canvas.legend(fontsize=7, ncols=3, loc="outside lower center")
        elif not figure.front:  # whose points have their names beside them
            axes.legend(fontsize=7)
        axes.set_xscale("log") if figure.x_log else None
        axes.set_yscale("log") if figure.y_log else axes.set_ylim(
            bottom=0 if figure.kind in ("bars", "line") else None
        )
    path = folder / f"{name or file_name(figure)}.{kind}"
    about = {"Date": None} if kind == "svg" else {"Software": None}
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as half:
            canvas.savefig(half, dpi=120, metadata=about)
    return path


def file_name(figure: Figure) -> str:
    return re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")


def short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def lines(figure: Figure, axes: Any) -> None:
    for index, series in enumerate(figure.series):
        color, again = figure.look(index)
        axes.plot(
            [point.x for point in series.points],
            [point.y for point in series.points],
            marker="o",
            markersize=4,
            color=COLORS[color],
            linestyle="--" if again else "-",
            label=short(series.name),
        )


def scatter(figure: Figure, axes: Any) -> None:
    largest = (
        max((point.size or 0 for series in figure.series for point in series.points), default=0)
        or 1
    )
    for index, series in enumerate(figure.series):
        number, again = figure.look(index)
        color = COLORS[number]
        axes.scatter(
            [point.x for point in series.points],
            [point.y for point in series.points],
            color=color,
            alpha=0.8,
            label=short(series.name),
            marker="s" if again else "o",
            s=[
                30 if point.size is None else 30 + 600 * point.size / largest
                for point in series.points
            ],
            edgecolors=["black" if point.marked else color for point in series.points],
            linewidths=1.6,
        )
        for point in series.points if figure.front else ():
            axes.annotate(
                short(series.name),
                (point.x, point.y),
                xytext=(0, 12),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    if figure.front:
        axes.plot(
            *zip(*figure.front, strict=True), color="black", linewidth=0.8, linestyle=":", zorder=0
        )
        axes.margins(0.12)


def bars(figure: Figure, axes: Any) -> None:
    places = {name: index for index, name in enumerate(figure.categories)}
    width = 0.8 / max(len(figure.series), 1)
    for index, series in enumerate(figure.series):
        color, again = figure.look(index)
        axes.bar(
            [places[str(point.x)] + (index + 0.5) * width - 0.4 for point in series.points],
            [point.y for point in series.points],
            width=width,
            color=COLORS[color],
            label=short(series.name),
            hatch="////" if again else "",
            edgecolor="white",
            linewidth=0,
        )
    longest = max(map(len, places))
    names = ["\n".join(textwrap.wrap(short(name), WIDEST)) for name in places]
    axes.set_xticks(range(len(places)), names, rotation=20 if 9 < longest <= WIDEST else 0)


def heat(figure: Figure, axes: Any) -> None:
    names = figure.categories
    values = [
        [
            next((point.y for point in series.points if str(point.x) == name), math.nan)
            for name in names
        ]
        for series in figure.series
    ]
    logs = [[math.log(value / (figure.middle or 1.0)) for value in line] for line in values]
    bound = max(abs(value) for line in logs for value in line if not math.isnan(value)) or 1.0
    axes.imshow(logs, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(values)), [series.name for series in figure.series], fontsize=7)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isnan(value):
                axes.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if abs(logs[row][column]) > 0.6 * bound else "black",
                )
