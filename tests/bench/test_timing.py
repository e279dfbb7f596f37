"""The rules of bench/timing.py on times that are made up, so that every figure is known."""

import pytest

from flyweight.bench.timing import (
    batch_figures,
    outliers,
    percentile,
    random_prompts,
    seed_from,
    summarize,
    turns,
    unsteady,
    warm_up,
)
from flyweight.clock import Answer, Run


def answer(first, gap, count, *, arrival=0.0):
    return Answer(arrival, tuple((first + gap * i, 1) for i in range(count)))


def test_ttft_counts_from_the_scheduled_arrival_and_the_sent_figure_stands_beside_it():
    late = Answer(arrival=1.0, sent=1.25, chunks=((1.5, 1), (1.6, 1)))
    assert late.ttft == pytest.approx(0.5) and late.ttft_sent == pytest.approx(0.25)


def test_tpot_leaves_out_the_tokens_of_the_first_chunk():
    chunks = Answer(0.0, ((1.0, 3), (1.5, 2), (2.0, 2)))
    assert chunks.tpot == pytest.approx(1.0 / 4) and chunks.gaps == pytest.approx([0.5, 0.5])
    assert Answer(0.0, ((1.0, 4),)).tpot is None


def test_the_decode_window_is_where_the_whole_batch_decodes():
    early, late = answer(1.0, 0.1, 21), answer(2.0, 0.1, 21)  # 1.0 … 3.0 and 2.0 … 4.0
    seconds, tokens = Run(0.0, 4.0, (early, late)).window()
    assert seconds == pytest.approx(1.0) and tokens == 20
    assert Run(0.0, 2.0, (answer(1.0, 0.1, 1),)).window() is None


def test_the_figures_of_a_batch_by_hand():
    run = Run(10.0, 13.0, (answer(11.0, 0.5, 5, arrival=10.0), answer(11.0, 0.5, 5, arrival=10.0)))
    figures = batch_figures(run, input=100, output=5)
    assert figures["latency_s"] == 3.0 and figures["ttft_ms"] == figures["ttft_ms_last"] == 1000.0
    assert figures["decode_tok_s"] == pytest.approx(4.0) and figures["tpot_ms"] == pytest.approx(
        500.0
    )
    assert figures["overall_tok_s"] == pytest.approx(2 * 105 / 3) and figures[
        "input_tok_s"
    ] == pytest.approx(200.0)
    assert figures["qps"] == pytest.approx(2 / 3)


def test_warm_up_goes_on_until_two_runs_agree():
    times = iter([2.0, 1.0, 0.5, 0.51, 2.4])
    assert warm_up(lambda: next(times)) == (4, True)
    restless = iter(range(1, 100))
    assert warm_up(lambda: 2.0 ** -next(restless), most=5) == (5, False)
    assert warm_up(lambda: 6.0) == (1, True), "a long run is warm at its end"


def test_variants_take_turns_and_each_round_begins_with_another():
    assert list(turns("abc", 3)) == [
        (0, "a"),
        (0, "b"),
        (0, "c"),
        (1, "b"),
        (1, "a"),
        (1, "c"),
        (2, "c"),
        (2, "a"),
        (2, "b"),
    ]
    assert list(turns([], 3)) == []


def test_prompts_are_random_ids_that_the_seed_tells():
    one = random_prompts(2, 50, vocabulary=1000, seed=seed_from(0, "base", 1))
    assert one == random_prompts(2, 50, vocabulary=1000, seed=seed_from(0, "base", 1))
    assert (
        one != random_prompts(2, 50, vocabulary=1000, seed=seed_from(0, "base", 2))
        and one[0] != one[1]
    )
    assert all(10 <= token < 1000 for prompt in one for token in prompt) and len(set(one[0])) > 30


def test_a_spread_is_told_from_ten_samples_on():
    few, many = summarize([1.0, 2.0, 3.0]), summarize(list(range(1, 12)))
    assert few.p10 is None and few.median == 2.0 and few.interval == (1.0, 3.0)
    assert (many.p10, many.p90, many.median) == (2.0, 10.0, 6)
    assert percentile([1.0, 2.0], 50) == 1.5 and summarize([4.0]).interval is None


def test_outliers_are_flagged_by_the_stated_rule():
    assert outliers([1.0, 1.01, 0.99, 1.0, 2.0]) == [False, False, False, False, True]
    assert outliers([1.0, 1.0, 1.0, 1.01]) == [False] * 4, (
        "one per cent is nothing, however steady the others are"
    )
    assert outliers([1.0, 9.0]) == [False, False]


def test_a_run_whose_steps_change_is_flagged():
    def run(gaps):
        times = [1.0]
        for gap in gaps:
            times.append(times[-1] + gap)
        return Answer(0.0, tuple((time, 1) for time in times))

    steady, taken_away = [0.028] * 40 + [0.9], [0.028] * 20 + [0.059] * 20
    assert unsteady(Run(0.0, 9.0, (run(steady),))) == [], "one late step is no rule"
    assert unsteady(Run(0.0, 9.0, (run(taken_away),))) == [
        "not steady: its steps took 28 to 59 ms (p10 to p90)"
    ]
    assert unsteady(Run(0.0, 9.0, (run(taken_away[:5]),))) == [], "too few to tell"
    assert unsteady(Run(0.0, 9.0, (run(taken_away), run(steady)))) == [], (
        "prompts of others lie between"
    )
