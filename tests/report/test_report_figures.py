"""Pictures of a report: what they show, and that no two end in one file."""

import itertools
import warnings
from pathlib import Path

import pytest

from flyweight.commands.report import drawer
from flyweight.report import figures, plot
from flyweight.report.document import build
from flyweight.report.read import read
from flyweight.report.view import View

ROWS = Path(__file__).parents[2] / "benchmarks" / "h200"
FACTS = {"model": "m", "checkpoint": "random:0", "device_name": "a GPU", "scheme": "int4"}


def record(bench, backend="native", **more):
    numbers = {"latency_s": 1.0, "overall_tok_s": 9.0, "ttft_ms": 8.0, "tpot_ms": 2.0}
    return FACTS | {"bench": bench, "backend": backend} | numbers | more


def test_each_picture_of_a_report_has_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        plot, "draw", lambda figure, folder, *, kind, name: folder / f"{name}.{kind}"
    )
    place = drawer(tmp_path / "report.md", "png")
    pictures = [
        block
        for block in build(View(read(sorted(ROWS.glob("*.jsonl")))))
        if isinstance(block, figures.Figure)
    ]
    assert len({str(place(one)).lower() for one in pictures}) == len(pictures) > 20
    assert place(pictures[0]) == place(pictures[0]), "the same again"


def test_served_and_offline_throughput_are_two_pictures():
    served = record("serve", e2e_s=1.0, output_tok_s=3.0, latency_s=None)
    found = figures.throughput_latency([*[record("latency")] * 2, *[served] * 2])
    assert len({plot.file_name(one) for one in found}) == 2


def test_a_start_is_no_workload():
    rows = [record("latency", workload=name, ttft_ms_last=5.0) for name in ("base", "startup")]
    assert all(
        point.x == "base"
        for one in figures.first_token_bars(rows)
        for series in one.series
        for point in series.points
    )


def test_long_names_below_bars_leave_room_for_them(tmp_path):
    pytest.importorskip("matplotlib")
    long = [
        f"vllm ({name}, gpu_memory_utilization=0.6, "
        f"compilation_config={{'mode': 0, 'sizes': [1, 8]}})"
        for name in "ab"
    ]
    (figure,) = figures.first_token_bars([record("serve", one) for one in ("native", *long)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout that collapsed
        assert plot.draw(figure, tmp_path).stat().st_size > 0


def test_bars_of_more_series_than_colors_differ():
    from matplotlib.figure import Figure as Canvas

    count = len(plot.COLORS) + 2
    series = tuple(figures.Series(str(i), (figures.Point("a", 1.0),)) for i in range(count))
    axes = Canvas().subplots()
    plot.bars(figures.Figure("bars", "t", "x", "y", series), axes)
    looks = [(patch.get_facecolor(), patch.get_hatch() or "") for patch in axes.patches]
    assert len(looks) == count and all(a != b for a, b in itertools.combinations(looks, 2))
