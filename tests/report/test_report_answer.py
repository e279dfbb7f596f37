"""A report opens with the answer: gains, costs, which scheme to take; its figures do not
flatter."""

import itertools
import math
import re

import pytest

from flyweight.report import figures, svg
from flyweight.report.answer import answer
from flyweight.report.blocks import (
    Figure,
    Heading,
    Highlights,
    Paragraph,
    Point,
    Series,
    Table,
    with_colors,
)
from flyweight.report.choice import perplexity_change, qualities
from flyweight.report.document import build
from flyweight.report.latency import marks_inside_errors
from flyweight.report.page import page
from flyweight.report.rows import Results
from flyweight.report.view import View

NUMBERS = itertools.count()


def row(bench, scheme, checkpoint, **more):
    return {
        "schema": 1,
        "bench": bench,
        "run_id": str(next(NUMBERS)),
        "time": None,
        "environment": "e",
        "status": "ok",
        "model": "m",
        "scheme": scheme,
        "checkpoint": checkpoint,
        "weights": "trained",
        **more,
    }


def speed(scheme, checkpoint, *rates, first=100.0, size=1.0, **more):
    return [
        row(
            "latency",
            scheme,
            checkpoint,
            backend="native",
            workload="decode_bound",
            batch=1,
            input=256,
            output=64,
            latency_s=64 / rate,
            decode_tok_s=rate,
            overall_tok_s=rate * 5,
            ttft_ms=first,
            ttft_ms_last=first,
            tpot_ms=1e3 / rate,
            size_gb=size,
            weights_gb=size,
            **more,
        )
        for rate in rates
    ]


def quality(scheme, checkpoint, perplexity, *, change=None, size=1.0, **more):
    compared = (
        {}
        if change is None
        else {"log_ratio": change, "log_ratio_error": 0.002, "kl": change / 2, "kl_error": 0.001}
    )
    return [
        row(
            "quality",
            scheme,
            checkpoint,
            perplexity=perplexity,
            perplexity_error=0.5,
            text="built-in",
            window=512,
            stride=512,
            tokens=1023,
            size_gb=size,
            **compared,
            **more,
        )
    ]


def results(*parts):
    return Results(tuple(itertools.chain(*parts)), {"e": {"id": "e", "device": "a CPU"}})


WHOLE = (
    speed("fp16", "a", 50.0, 51.0, 49.0, size=2.0),
    speed("int4", "b", 110.0, 112.0, 108.0, first=80.0, size=0.6),
    speed("int3", "c", 130.0, 131.0, 129.0, size=0.5),
    speed("int8", "d", 80.0, 81.0, 79.0, size=1.1),
    quality("fp16", "a", 20.0),
    quality("int4", "b", 20.4, change=0.02),
    quality("int3", "c", 24.0, change=0.18),
    quality("int8", "d", 20.02, change=0.001),
)


def told(*parts, baseline=None):
    blocks = answer(results(*parts), baseline)
    take = next(block.text for block in blocks if isinstance(block, Paragraph))
    return (
        take,
        {
            what: (figure, against)
            for block in blocks
            if isinstance(block, Highlights)
            for what, figure, against in block.items
        },
        blocks,
    )


def test_the_first_thing_in_a_report_is_the_answer():
    blocks = build(View(results(*WHOLE)))
    assert blocks[0] == Heading("The answer") and blocks[1].text.startswith(
        "**Take int4** instead of fp16"
    )
    html = page(blocks, title="t")
    assert html.index("Take int4") < html.index("<table>") < html.index("<svg ")


def test_it_says_what_was_gained_and_what_it_cost_with_errors():
    take, cards, _ = told(*WHOLE)
    assert take == (
        "**Take int4** instead of fp16 (3.33 × smaller, 2.20 × as fast, perplexity +2.0% ± 0.2%): "
        "of the "
        "schemes that cost at most 5% of perplexity it is the fastest; "
        "int3 (+19.7%) costs more."
    )
    assert cards["Decode"] == ("110.0 ± 2.0 tok/s", "2.20 × as fast (fp16: 50 tok/s)")
    assert cards["First token"][1] == "1.25 × sooner (fp16: 100 ms)"
    assert cards["Size"] == ("0.6 GB", "3.33 × smaller (fp16: 2 GB)")
    assert cards["Perplexity"] == ("20.40 ± 0.50", "+2.0% ± 0.2% against fp16")
    assert cards["KL from the original"][0] == "0.0100 ± 0.0010"
    assert cards["Weights in memory"][0] == "0.6 GB"


def test_the_table_has_every_scheme_the_original_first():
    _, _, blocks = told(*WHOLE)
    table = next(block for block in blocks if isinstance(block, Table))
    assert [line[0] for line in table.rows] == ["fp16", "int3", "int4", "int8"]
    assert table.headers[:3] == ("Scheme", "Decode (tok/s)", "× fp16")


def test_of_two_that_are_equal_within_the_error_the_smaller_is_taken():
    twin = (
        speed("int4-small", "f", 109.0, 111.0, 107.0, size=0.4),
        quality("int4-small", "f", 20.5, change=0.03),
    )
    take, _, _ = told(*WHOLE, *twin)
    assert take.startswith("**Take int4-small**") and "equal within the error" in take


def test_where_every_scheme_costs_too_much_the_original_is_kept():
    take, _, _ = told(*WHOLE[:1], WHOLE[2], WHOLE[4], WHOLE[6])
    assert (
        take == "**Keep fp16**: no scheme keeps perplexity within 5% of fp16; "
        "int3 (+19.7%) comes nearest."
    )


def test_a_scheme_that_is_slower_and_no_smaller_is_not_taken():
    slow = speed("int4", "b", 20.0, 20.5, 19.5, size=2.5), quality("int4", "b", 20.4, change=0.02)
    take, _, _ = told(WHOLE[0], WHOLE[4], *slow)
    assert take == "**Keep fp16**: no scheme is faster or smaller here."


def test_speed_without_quality_says_that_it_was_not_measured():
    take, cards, _ = told(*WHOLE[:4])
    assert take == (
        "**int3 is fastest**, and none is recommended: what the schemes cost in quality was not "
        "measured "
        "(`flyweight eval` does)."
    )
    assert "Perplexity" not in cards


def test_quality_without_speed_is_judged_by_size():
    take, cards, _ = told(*WHOLE[4:6], WHOLE[7])
    assert take.startswith("**Take") and "Decode" not in cards and "Perplexity" in cards


def test_speed_and_quality_of_two_checkpoints_of_one_name_do_not_meet():
    other = quality("int4", "another file", 99.0, change=1.6)
    _, cards, _ = told(WHOLE[0], WHOLE[1], WHOLE[4], other)
    assert "Perplexity" not in cards and "99" not in str(cards)


def test_without_an_original_or_with_one_scheme_there_is_no_answer():
    assert answer(results(*WHOLE[1:4])) == []
    assert answer(results(WHOLE[0])) == []
    assert told(*WHOLE[1:4], baseline="int8")[0].startswith("**int3 is fastest**")


def test_many_models_get_a_line_each():
    parts = [
        [
            one | {"model": name, "run_id": f"{name}{one['run_id']}"}
            for one in itertools.chain(*WHOLE)
        ]
        for name in "abc"
    ]
    blocks = answer(results(*parts))
    table = next(block for block in blocks if isinstance(block, Table))
    assert [line[0] for line in table.rows] == ["a", "b", "c"] and not any(
        isinstance(block, Highlights) for block in blocks
    )


def record(scheme, value, error):
    return {"scheme": scheme, "decode_tok_s": value, "decode_tok_s±": error}


@pytest.mark.parametrize(
    ("places", "marks"),
    [
        ([(100, 1), (90, 1), (80, 1), (70, 1)], ["🥇", "🥈", "🥉", "4."]),
        ([(100, 3), (96, 3), (80, 1)], ["=1.", "=1.", "🥉"]),
        ([(100, None), (90, None)], ["1.", "2."]),  # one run each: no error is known
    ],
)
def test_there_are_no_medals_inside_the_error(places, marks):
    best = [record(str(index), *place) for index, place in enumerate(places)]
    assert marks_inside_errors(best, "decode_tok_s") == marks


def test_vllm_is_named_only_where_it_was_measured():
    def heading(*parts):
        return next(
            block.text
            for block in build(View(results(*parts)))
            if isinstance(block, Heading) and "limit" in block.text
        )

    assert heading(*WHOLE) == "Beside the memory's limit"
    assert (
        heading(
            *WHOLE,
            speed("fp16", "a", 40.0, backend_other=1),
            [one | {"backend": "vllm"} for one in speed("int4", "x", 60.0)],
        )
        == "Beside vLLM and the limit"
    )


def test_perplexity_stands_before_the_hash():
    table = next(
        block
        for block in build(View(results(*WHOLE), sections=("quality",)))
        if isinstance(block, Table)
    )
    assert table.headers[:2] == ("Scheme", "Perplexity") and table.headers[-1] == "Checkpoint"


def test_a_scheme_has_one_colour_in_every_figure():
    blocks = [block for block in build(View(results(*WHOLE))) if isinstance(block, Figure)]
    assert len(blocks) >= 4
    colors = {}
    for figure in blocks:
        for index, series in enumerate(figure.series):
            assert series.scheme is not None
            colors.setdefault(series.scheme, set()).add(figure.look(index))
    assert len(colors) == 4 and all(len(looks) == 1 for looks in colors.values())
    assert len(set(map(tuple, colors.values()))) == 4


def test_two_engines_with_one_scheme_share_its_colour_and_not_its_look():
    series = tuple(
        Series(f"int4 ({name})", (Point("a", 1.0),), scheme="int4") for name in ("native", "vllm")
    )
    (figure,) = with_colors([Figure("bars", "t", "x", "y", series)])
    assert figure.look(0) == (0, False) and figure.look(1) == (0, True)


def test_bars_begin_at_zero_and_every_axis_has_ticks():
    records = [
        {
            "model": "m",
            "device_name": "d",
            "bench": "latency",
            "scheme": scheme,
            "backend": "native",
            "workload": "base",
            "ttft_ms": value,
            "ttft_ms_last": value,
            "tpot_ms": value,
            "latency_s": value,
            "overall_tok_s": value,
        }
        for scheme, value in (("fp16", 400.0), ("int4", 410.0))
    ]
    for figure in figures.first_token_bars(records):
        assert not figure.y_log
        drawn = svg.draw(figure)
        heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', drawn)]
        assert heights[1] / heights[0] == pytest.approx(410 / 400, rel=0.01), (
            "as long as its figure is large"
        )
    (plane,) = figures.throughput_latency(records)
    for drawn in (svg.draw(plane), *map(svg.draw, figures.first_token_bars(records))):
        assert len(re.findall('class="rule"', drawn)) >= 6
        assert len(re.findall('class="grid"', drawn)) >= 3


@pytest.mark.parametrize(("low", "high"), [(400, 410), (3.1, 3.4), (1, 150), (0.01, 5000)])
def test_a_logarithmic_axis_of_any_range_has_ticks(low, high):
    ticks = svg.log_ticks(low, high)
    assert len(ticks) >= 3 and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)


def test_of_several_texts_the_one_that_costs_most_decides():
    both = quality("fp16", "a", 20.0) + quality("int4", "b", 20.4, change=0.02)
    rows = []
    for text, factor in (("easy", 1), ("hard", 10), ("easier", 0.5)):
        for i, one in enumerate(both):
            cost = {"log_ratio": factor * one["log_ratio"]} if "log_ratio" in one else {}
            rows.append(one | cost | {"text": text, "run_id": f"{text}{i}"})
    kept = qualities(Results(tuple(rows), {}), rows[0]["model"])
    assert {one["text"] for one in kept} == {"hard"}


def test_the_error_of_a_perplexity_is_of_the_original_as_its_change_is():
    change, error = perplexity_change({"log_ratio": math.log(3), "log_ratio_error": 0.01}, {})
    assert (change, error) == (pytest.approx(2.0), pytest.approx(0.03))
    assert perplexity_change({"log_ratio": 0.0}, {}) == (0.0, None)
