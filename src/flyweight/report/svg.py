"""Figures as SVG for the HTML page: colours are CSS variables, so that light and dark need no
second drawing.

Every mark carries `data-tip`, which the page shows on hover, and stands in a group `data-series`,
which the legend hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from flyweight.report.blocks import Figure, Point

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 80, 14, 12, 56
HEAD, CELL = 22, 24  # heights of the names and of a line of a heat map
FEWEST_TICKS = 3
TICK = 5  # length of a tick
LETTER = 6.4  # width of a figure above a bar
Scale = Callable[[float], float]


def draw(figure: Figure) -> str:
    if figure.kind == "heat":
        return wrap(figure, heat(figure), HEAD + CELL * len(figure.series) + 28)
    return wrap(figure, bars(figure) if figure.kind == "bars" else plane(figure), HEIGHT)


def wrap(figure: Figure, body: str, height: float) -> str:
    down = (
        ""
        if figure.kind == "heat"
        else (
            f'<text class="axis" transform="translate(14 {(TOP + height - BOTTOM) / 2:g}) '
            'rotate(-90)" text-anchor="middle">'
            f"{escape(figure.y)}</text>"
        )
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(figure.title)}">{body}{down}'
        f"{label(figure.x, (LEFT + WIDTH - RIGHT) / 2, height - 8, kind='axis')}</svg>"
    )


def label(text: str, x: float, y: float, *, kind: str = "tick", anchor: str = "middle") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def make_scale(
    values: Sequence[float], begin: float, end: float, *, log: bool, zero: bool
) -> tuple[Scale, list[float]]:
    """A map from values to pixels and where its ticks are."""
    low, high = min(values), max(values)
    if log and low > 0:
        low, high = low / 1.15, high * 1.15
        first, last = math.log(low), math.log(high)
        return (
            lambda value: (
                begin + (math.log(max(value, low)) - first) / (last - first) * (end - begin)
            ),
            log_ticks(low, high),
        )
    margin = 0.12 * (high - low or abs(high) or 1.0)
    low, high = (min(0.0, low) if zero else low - margin), high + margin
    return lambda value: begin + (value - low) / (high - low) * (end - begin), even_ticks(low, high)


def even_ticks(low: float, high: float) -> list[float]:
    step = nice((high - low) / 6)
    return [
        step * index
        for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … or powers of ten alone; where a narrow range holds too few of them, even
    steps.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [
        step * 10.0**power
        for power in powers
        for step in steps
        if low <= step * 10.0**power <= high
    ]
    return ticks if len(ticks) >= FEWEST_TICKS else even_ticks(low, high)


def nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def y_axis(scale: Scale, ticks: Sequence[float]) -> str:
    """The axis with a tick, a figure and a line across the picture at each of them."""
    shown = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(tick):.1f}" '
        f'y2="{scale(tick):.1f}"/>'
        f'<line class="rule" x1="{LEFT - TICK}" x2="{LEFT}" y1="{scale(tick):.1f}" '
        f'y2="{scale(tick):.1f}"/>'
        f"{label(f'{tick:g}', LEFT - TICK - 4, scale(tick) + 4, anchor='end')}"
        for tick in ticks
    )
    return shown + f'<line class="rule" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def x_axis(places: Sequence[tuple[float, str]], *, drop: bool = False) -> str:
    """The axis with a tick and a name at each place; `drop` puts every second name a line lower."""
    base = HEIGHT - BOTTOM
    shown = "".join(
        f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + TICK}"/>'
        f"{label(name, x, base + 18 + 14 * (index % 2 if drop else 0))}"
        for index, (x, name) in enumerate(places)
    )
    return shown + f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'


def look(figure: Figure, index: int) -> str:
    """The classes of a series: its colour, and another pattern where that was there before."""
    color, shared = figure.look(index)
    return f"s{color}{' again' if shared else ''}"


def plane(figure: Figure) -> str:
    points = [point for series in figure.series for point in series.points]
    zero = figure.kind == "line"
    across, x_ticks = make_scale(
        [float(point.x) for point in points], LEFT, WIDTH - RIGHT, log=figure.x_log, zero=zero
    )
    up, y_ticks = make_scale(
        [point.y for point in points], HEIGHT - BOTTOM, TOP, log=figure.y_log, zero=zero
    )
    largest = max((point.size or 0.0 for point in points), default=0.0) or 1.0
    out = y_axis(up, y_ticks) + x_axis([(across(tick), f"{tick:g}") for tick in x_ticks])
    if figure.front:
        corners = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in figure.front)
        out += f'<polyline class="front" points="{corners}"/>'
    for index, series in enumerate(figure.series):
        places = [(across(float(point.x)), up(point.y), point) for point in series.points]
        path = (
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)}"/>'
            if figure.kind == "line"
            else ""
        )
        marks = "".join(
            f'<circle class="{"marked" if point.marked else ""}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{radius(point, largest):.1f}" {tip(point)}/>'
            for x, y, point in places
        )
        names = "".join(
            label(series.name, x, y - radius(point, largest) - 5)
            for x, y, point in places
            if figure.front
        )
        out += group(figure, index, path + marks + names)
    return out


def radius(point: Point, largest: float) -> float:
    return 4.5 if point.size is None else 4 + 16 * math.sqrt(point.size / largest)


def bars(figure: Figure) -> str:
    names = figure.categories
    values = [point.y for series in figure.series for point in series.points]
    up, ticks = make_scale(values, HEIGHT - BOTTOM, TOP, log=figure.y_log, zero=True)
    slot = (WIDTH - LEFT - RIGHT) / len(names)
    width = 0.84 * slot / len(figure.series)
    base = HEIGHT - BOTTOM
    # there is room for the figures above the bars
    named = max(len(short(value)) for value in values) * LETTER < width
    out = y_axis(up, ticks) + x_axis(
        [(LEFT + (index + 0.5) * slot, name) for index, name in enumerate(names)], drop=slot < 90
    )
    for index, series in enumerate(figure.series):
        body = ""
        for point in series.points:
            left = LEFT + (names.index(str(point.x)) + 0.08) * slot + index * width
            body += (
                f'<rect x="{left:.1f}" y="{up(point.y):.1f}" width="{max(width - 1, 1):.1f}" '
                f'height="{max(base - up(point.y), 1):.1f}" {tip(point)}/>'
            )
            if named:
                body += label(short(point.y), left + width / 2, up(point.y) - 4, kind="value")
        out += group(figure, index, body)
    return out


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def heat(figure: Figure) -> str:
    """A line a series; blue below the middle, red above, by the logarithm."""
    names, left = figure.categories, 128
    width = (WIDTH - left - RIGHT) / len(names)
    logs = [
        math.log(point.y / (figure.middle or 1.0))
        for series in figure.series
        for point in series.points
    ]
    bound = max(map(abs, logs)) or 1.0
    out = "".join(label(name, left + (index + 0.5) * width, 14) for index, name in enumerate(names))
    for row, series in enumerate(figure.series):
        y = HEAD + row * CELL
        out += label(series.name, left - 6, y + 16, anchor="end")
        for point in series.points:
            x = left + names.index(str(point.x)) * width
            share = math.log(point.y / (figure.middle or 1.0)) / bound
            out += (
                f'<g {tip(point)}><rect class="{"slower" if share > 0 else "faster"}" x="{x:.1f}" '
                f'y="{y}" '
                f'width="{width - 2:.1f}" height="{CELL - 2}" '
                f'fill-opacity="{0.08 + 0.85 * abs(share):.2f}"/>'
                f"{label(f'{point.y:.2f}', x + width / 2, y + 16, kind='cell')}</g>"
            )
    return out


def group(figure: Figure, index: int, body: str) -> str:
    return f'<g class="series {look(figure, index)}" data-series="{index}">{body}</g>'


def tip(point: Point) -> str:
    return f'data-tip="{escape(point.tip)}" tabindex="0"'
