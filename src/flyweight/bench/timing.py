"""How everything here is timed. Every benchmark of this package follows these rules, and no other
file holds a timer.

1. Warm before timing: the same work, its answers cut to 64 tokens (16 of eager transformers) where
   no shape depends on their length, its prompts to as many as are in work at once, is run until two
   runs in a row agree within 5 %, so that JIT compilation, autotuning, graph capture and clock
   ramps lie before the first sample. What never settles is flagged. A run of more than 2.5 seconds
   is enough by itself: nothing of it is still cold at its end.
2. Nothing is reused: prompts are random token ids, drawn afresh for every run from a seed that the
   row tells, and prefix caches are off. End of text is ignored and lengths are fixed, so that every
   run does the same work.
3. Chunks are stored as (time, number of tokens); the first token is the first chunk that *has*
   tokens, counted by id.
4. Wall time runs from handing the prompts over to holding the last token. TTFT, TPOT and the decode
   window are taken from the token times of that same run (definitions: docs/results.md), not from
   other runs with other lengths.
5. Variants take turns: each round runs every variant once, in an order that rotates and every other
   time runs backwards, so that a drifting clock or a noisy neighbour meets all of them alike, and
   none always follows the same one: at a GPU's power limit a kernel's time depends on what ran
   before it.
6. Every run is a row with an id of its own, and raw samples are kept. A spread (p10, p90) is
   printed from ten samples on; tables of three runs show mean ± deviation and say so.
7. An outlier is a sample further from the median than 3.5 scaled median absolute deviations and by
   more than 2 % of it. It is flagged and shown, never dropped.
8. A sequence alone has steady token times on a steady machine. Where the slow tenth of its steps
   takes half as long again as the fast tenth, the row is flagged: such a run tells as much of its
   neighbours as of the engine.
9. A process that shares the GPU makes everything slower, evenly, which no spread shows. Its share
   of the second before a benchmark begins is in the environment row (`busy`), and the user is
   warned.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flyweight.clock import Run

# two warm-up runs that agree within this are warm; so is one of so many seconds
STABLE, LONG = 0.05, 2.5
SPREAD_FROM = 10  # samples, for p10 and p90
OUTLIER_DEVIATIONS, OUTLIER_SHARE = 3.5, 0.02
STEADY = 1.5  # p90 ÷ p10 of a run's steps
RESAMPLES = 1000
LOWEST_ID = 10  # the first ids of many vocabularies are special

Item = TypeVar("Item")


def batch_figures(run: Run, *, input: int, output: int) -> dict[str, float | None]:
    """The figures of a latency row, under the names of docs/results.md."""
    batch, window = len(run.answers), run.window()
    last_first = max(answer.ttft for answer in run.answers)
    rate = window[1] / window[0] if window else None
    return {
        "latency_s": run.seconds,
        "ttft_ms": 1e3 * statistics.median(answer.ttft for answer in run.answers),
        "ttft_ms_last": 1e3 * last_first,
        "tpot_ms": 1e3 * batch / rate if rate else None,
        "decode_tok_s": rate,
        "overall_tok_s": batch * (input + output) / run.seconds,
        "output_tok_s": batch * output / run.seconds,
        "input_tok_s": batch * input / last_first,
        "qps": batch / run.seconds,
        "total_tok_s": batch * (input + output) / run.seconds,
    }


def warm_up(run: Callable[[], float], *, most: int = 8) -> tuple[int, bool]:
    """Run until two in a row agree; `run` returns its seconds. (how many runs, whether they
    settled)
    """
    before = run()
    if before > LONG:
        return 1, True
    for count in range(2, most + 1):
        after = run()
        if abs(after - before) <= STABLE * min(after, before):
            return count, True
        before = after
    return most, False


def turns(variants: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """(round, variant): every variant once a round, each round beginning with the next one, odd
    ones going backwards.
    """
    for round in range(rounds):
        shift, step = round % max(len(variants), 1), -1 if round % 2 else 1
        yield from (
            (round, variants[(shift + step * i) % len(variants)]) for i in range(len(variants))
        )


def seed_from(*parts: Any) -> int:
    """A seed of its own for everything that can be named; the same on every machine."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:6], "little")


def random_prompts(count: int, length: int, *, vocabulary: int, seed: int) -> list[list[int]]:
    draw, ids = random.Random(seed), range(min(LOWEST_ID, vocabulary - 1), vocabulary)
    return [draw.choices(ids, k=length) for _ in range(count)]


@dataclass(frozen=True)
class Summary:
    """Of raw samples: p10 and p90 only from ten on, a 95 % bootstrap interval of the median from
    three on.
    """

    count: int
    median: float
    mean: float
    deviation: float | None
    p10: float | None
    p90: float | None
    interval: tuple[float, float] | None


def summarize(samples: Sequence[float]) -> Summary:
    count, spread = len(samples), len(samples) >= SPREAD_FROM
    return Summary(
        count,
        statistics.median(samples),
        statistics.fmean(samples),
        statistics.stdev(samples) if count > 1 else None,
        percentile(samples, 10) if spread else None,
        percentile(samples, 90) if spread else None,
        median_interval(samples),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest samples."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def unsteady(run: Run) -> list[str]:
    """Rule 8, as a flag."""
    gaps = run.answers[0].gaps if len(run.answers) == 1 else []
    if len(gaps) < SPREAD_FROM:
        return []
    fast, slow = (1e3 * percentile(gaps, percent) for percent in (10, 90))
    return (
        [f"not steady: its steps took {fast:.3g} to {slow:.3g} ms (p10 to p90)"]
        if slow > STEADY * fast
        else []
    )


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    if len(samples) < 3:
        return None
    draw = random.Random(0)  # the same samples give the same text
    medians = sorted(
        statistics.median(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def outliers(samples: Sequence[float]) -> list[bool]:
    """Rule 7, one answer a sample; of fewer than three samples none can be called one."""
    if len(samples) < 3:
        return [False] * len(samples)
    middle = statistics.median(samples)
    scale = 1.4826 * statistics.median(abs(sample - middle) for sample in samples)
    return [
        abs(sample - middle) > max(OUTLIER_DEVIATIONS * scale, OUTLIER_SHARE * abs(middle))
        for sample in samples
    ]
