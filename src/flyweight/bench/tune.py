"""`flyweight doctor --tune`: from how many rows on which kernel is the fastest on this GPU.

Every kernel that takes a weight is timed on a small linear and on a large one, as `bench kernel`
times them. Where another kernel than the one before is clearly faster, a route begins. The file
that comes of it is the nearest GPU's (`kernels/tuned/*.toml`) with this GPU's facts and routes: the
numbers that kernels' plans are estimated with stay borrowed, and the file says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.doctor import make
from flyweight.bench.kernels import FORMATS, copied
from flyweight.bench.timing import percentile
from flyweight.errors import FlyweightError
from flyweight.kernels import dispatch, tuned
from flyweight.kernels.linear.choose import runnable
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.machine import device_name
from flyweight.saving import write_text

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 1024, 4096)
SHAPES = {"large": (24576, 4096), "small": (4096, 4096)}  # outputs, inputs
CLEARLY = 1.03  # times as fast as the kernel of the rows before
DTYPE = torch.bfloat16
Times = Mapping[int, Mapping[str, float]]  # rows → kernel → microseconds


def tune(
    device: torch.device,
    *,
    formats: Iterable[str] = tuple(FORMATS),
    rows: Iterable[int] = ROWS,
    listen: Callable[[str], None] = lambda stage: None,
) -> Path:
    """Measure, write the file and let this process use it."""
    facts = gpu.of(device)
    counts = tuple(rows)
    routes: dict[str, list[dict[str, Any]]] = {}
    for name in formats:
        listen(name)
        found = measure_format(name, device, counts)
        if found is not None:
            routes[found[0]] = found[1]
    base = base_file(facts)
    text = render(base.read_text(encoding="utf-8"), facts, device_name(device), routes)
    path = tuned.local_folder() / f"{file_name(device_name(device), facts)}.toml"
    write_text(path, text)
    tuned.read(path)  # what cannot be read must not be left behind in silence
    tuned.forget()
    return path


def file_name(name: str, facts: gpu.Gpu) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{words}-{facts.processors}"


def base_file(facts: gpu.Gpu) -> Path:
    """Of the numbers that this GPU has borrowed until now."""
    wanted = tuned.of(facts).name
    paths = [*tuned.local_files(), *sorted(tuned.FOLDER.glob("*.toml"))]
    return next(path for path in paths if tuned.read(path).name == wanted)


# -- measuring -----------------------------------------------------------------------------


def measure_format(
    name: str, device: torch.device, counts: tuple[int, ...]
) -> tuple[str, list[dict[str, Any]]] | None:
    """The format's name among tiles and its routes; None where it has no tiles on this GPU."""
    times = {}
    format_name = None
    for size, shape in SHAPES.items():
        linear = dispatch.prepare(make(name, shape, device, DTYPE), dtype=DTYPE)
        if not isinstance(linear, TiledLinear):
            return None
        format_name = linear.weight.format.name
        times[size] = {rows: measure(linear, rows, device) for rows in counts}
    assert format_name is not None
    return format_name, routes_of(times["large"], times["small"])


def measure(linear: TiledLinear, rows: int, device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel that takes so many rows, under the name that routes have."""
    x = torch.randn(rows, linear.weight.in_features, device=device).to(DTYPE)
    count = replay.copies_for(linear.nbytes, device)
    copies = [linear]
    while len(copies) < count:
        copies.append(copied(linear, lambda: linear))  # type: ignore[arg-type]
    works = {}
    for route, kernel in runnable(linear.weight, rows, gpu.of(device)).items():
        try:
            linear.multiply(x, kernel=kernel)
        except (FlyweightError, RuntimeError):  # it cannot be had here, whatever its plan says
            continue
        works[route] = work_of(copies, x, kernel)
    found = replay.measure(works, device, samples=3)
    return {route: percentile(times, 50) for route, times in found.items()}


def work_of(copies: list[TiledLinear], x: torch.Tensor, kernel: str) -> replay.Work:
    return replay.Work(lambda i: copies[i].multiply(x, kernel=kernel), len(copies))


# -- routes --------------------------------------------------------------------------------


def routes_of(large: Times, small: Times) -> list[dict[str, Any]]:
    """Of large linears and, behind each of them, those of small ones where they differ: the last
    route that fits is taken.
    """
    routes: list[dict[str, Any]] = []
    of_large = {rows: (kernel, why) for rows, kernel, why in borders(large)}
    of_small = borders(small)
    reached = None  # by small linears, with the routes so far
    for rows in sorted({*of_large, *(start for start, _, _ in of_small)}):
        if rows in of_large:
            kernel, why = of_large[rows]
            routes.append({"rows": rows, "kernel": kernel, "why": why})
            reached = kernel
        own = kernel_at(of_small, rows)
        if own is not None and own != reached:
            why = next(why for start, _, why in reversed(of_small) if rows >= start)
            routes.append({"rows": rows, "kernel": own, "why": why, "small": True})
            reached = own
    return routes


def borders(times: Times) -> list[tuple[int, str, str]]:
    """(rows, kernel, why) wherever another kernel becomes clearly faster."""
    found: list[tuple[int, str, str]] = []
    for rows in sorted(times):
        by_time = sorted(times[rows], key=lambda kernel: times[rows][kernel])
        if not by_time:
            continue
        best = by_time[0]
        current = found[-1][1] if found else None
        if current == best:
            continue
        still = times[rows].get(current) if current else None
        if still is not None and still < CLEARLY * times[rows][best]:
            continue
        start = rows if found else 1
        found.append((start, best, reason(times[rows], best, by_time)))
    return found


def reason(times: Mapping[str, float], best: str, by_time: list[str]) -> str:
    if len(by_time) == 1:
        return f"measured: {times[best]:.1f} us, nothing else takes it"
    second = by_time[1]
    return f"measured: {times[best]:.1f} us, {second} {times[second]:.1f}"


def kernel_at(routes: list[tuple[int, str, str]], rows: int) -> str | None:
    return next((kernel for start, kernel, _ in reversed(routes) if rows >= start), None)


# -- the file ------------------------------------------------------------------------------


def render(base: str, facts: gpu.Gpu, name: str, routes: Mapping[str, list[dict[str, Any]]]) -> str:
    """The base with this GPU's facts, and with the routes that were measured."""
    head, *sections = re.split(r"(?m)^(?=\[)", base)
    lines = [
        f"# Measured by `flyweight doctor --tune` on: {name}.",
        "# Routes are this GPU's own. All other numbers are those of the GPU of the file that "
        "follows.",
        "#",
    ]
    done = []
    for section in sections:
        title = section.split("]", 1)[0].strip("[")
        if title == "gpu":
            section = gpu_section(section, facts, name)
        elif title.startswith("formats.") and title.removeprefix("formats.") in routes:
            section = with_routes(section, routes[title.removeprefix("formats.")])
        done.append(section)
    return "\n".join(lines) + "\n" + head + "".join(done)


def gpu_section(section: str, facts: gpu.Gpu, name: str) -> str:
    """Its clock stays the borrowed one: estimates are in that GPU's cycles."""
    section = re.sub(r"(?m)^name = .*$", lambda _: f"name = {quoted(name)}", section)
    capability = f"capability = [{facts.major}, {facts.minor}]"
    section = re.sub(r"(?m)^capability = .*$", capability, section)
    return re.sub(r"(?m)^processors = .*$", f"processors = {facts.processors}", section)


def with_routes(section: str, routes: list[dict[str, Any]]) -> str:
    lines = [f"  {{ {', '.join(field(*item) for item in one.items())} }}," for one in routes]
    written = "routes = [\n" + "\n".join(lines) + "\n]"
    section = re.sub(r"(?ms)^routes = \[\n.*?^\]", lambda _: written, section)
    title, _, rest = re.sub(r"(?m)^source = .*\n", "", section).partition("\n")
    return f'{title}\nsource = "flyweight doctor --tune"\n{rest}'


def field(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    return f"{name} = {value}" if isinstance(value, int) else f"{name} = {quoted(value)}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
