"""A load's records as one row: percentiles, throughput, goodput under a service-level objective,
the highest rate that holds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flyweight.bench.load import Record
from flyweight.bench.rows import Row, rounded
from flyweight.bench.timing import percentile
from flyweight.errors import OptionError, unknown

P99_FROM = 100  # requests
PRECISION = 1.05  # a highest rate is known to this factor


@dataclass(frozen=True)
class Objective:
    """Most milliseconds of each kind; a request that meets all of them is good."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objective:
        limits: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in ("ttft", "tpot", "e2e"):
                raise OptionError(
                    f"--slo {text}: {unknown('objective', name, ('ttft', 'tpot', 'e2e'))}"
                )
            try:
                limits[name] = float(value.removesuffix("ms"))
            except ValueError:
                raise OptionError(
                    f"--slo {text}: milliseconds are wanted, such as ttft=500"
                ) from None
        return cls(**limits)

    def met(self, record: Record) -> bool:
        if record.error:
            return False
        answer = record.answer
        figures = (
            (self.ttft, answer.ttft),
            (self.tpot, answer.tpot or 0.0),
            (self.e2e, record.e2e),
        )
        return all(most is None or 1e3 * value <= most for most, value in figures)

    def as_field(self) -> dict[str, float] | None:
        return {
            f"{name}_ms": value for name, value in vars(self).items() if value is not None
        } or None


def block(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """p99 only where a hundredth of the requests is at least one."""
    if not values:
        return None
    percents = (50, 90, 95, 99) if len(values) >= P99_FROM else (50, 90, 95)
    return rounded(
        {f"p{percent}": scale * percentile(values, percent) for percent in percents}
        | {"mean": scale * statistics.fmean(values)}
    )


def figures(records: Sequence[Record], objective: Objective) -> Row:
    """The figures of a serve row, under the names of docs/results.md."""
    done = [record for record in records if not record.error]
    answers = [record.answer for record in done]
    arrivals = [record.answer.arrival for record in records]
    begin, duration = (
        min(arrivals),
        max(record.answer.arrival + record.e2e for record in records) - min(arrivals),
    )
    span = max(arrivals) - begin
    good, cached = (
        sum(map(objective.met, records)),
        [record.cached for record in done if record.cached is not None],
    )
    outputs, inputs = (
        sum(answer.tokens for answer in answers),
        sum(record.input or 0 for record in done),
    )
    other = sum(record.answer.tokens != record.output for record in done)
    details = {
        record.error: record.detail
        for record in reversed(records)
        if record.error and record.detail
    }
    flags = [f"{other} answers have another length than asked"] if other else []
    flags += [f"the first failure ({kind}): {detail}" for kind, detail in details.items()]

    def per_second(count: float) -> float | None:
        return count / duration if duration else None

    return {
        "requests": len(records),
        "completed": len(done),
        "failed": dict(Counter(one.error for one in records if one.error)) or 0,
        "duration_s": duration,
        "achieved_rate": (len(records) - 1) / span if span else None,
        "mean_concurrency": per_second(sum(record.e2e for record in records)),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(cached) if cached else None,
        "slo": objective.as_field(),
        "attained": good / len(records),
        "count_source": "/".join(sorted({record.source for record in done if record.source}))
        or None,
        "client_lag_ms": round(1e3 * percentile([record.lag for record in records], 99), 3),
        "ttft_ms": block([answer.ttft for answer in answers], 1e3),
        "ttft_sent_ms": block([answer.ttft_sent for answer in answers], 1e3),
        "tpot_ms": block([answer.tpot for answer in answers if answer.tpot is not None], 1e3),
        "gap_ms": block([gap for answer in answers for gap in answer.gaps], 1e3),
        "e2e_s": block([one.e2e for one in done]),
        "output_tok_s": per_second(outputs),
        "total_tok_s": per_second(inputs + outputs),
        "request_s": per_second(len(done)),
        "goodput_s": per_second(good),
        "flags": flags,
    }


def sample(record: Record, begin: float) -> Row:
    """One request as a line of the raw rows; times in seconds from the start of the run."""
    answer = record.answer
    row: dict[str, Any] = {
        "index": record.index,
        "turn": record.turn,
        "arrival": answer.arrival - begin,
        "sent": (answer.sent or answer.arrival) - begin,
        "input": record.input,
        "output": answer.tokens,
    }
    if record.error:
        return rounded(row | {"error": record.error})
    return rounded(
        row
        | {
            "ttft_ms": 1e3 * answer.ttft,
            "ttft_sent_ms": 1e3 * answer.ttft_sent,
            "e2e_s": record.e2e,
            "tpot_ms": None if answer.tpot is None else 1e3 * answer.tpot,
            "lag_ms": 1e3 * record.lag,
            "chunks": [[round(when - begin, 6), count] for when, count in answer.chunks],
        }
    )


def find_max_rate(
    attained: Callable[[float], float], *, wanted: float, start: float, most_runs: int = 16
) -> float | None:
    """The highest rate at which at least `wanted` of the requests are good: doubled or halved to a
    bracket, then bisected.
    """
    low, high, rate = None, None, start
    for _ in range(most_runs):
        if attained(rate) >= wanted:
            low = rate
        else:
            high = rate
        if low and high and high / low <= PRECISION:
            break
        rate = (low * high) ** 0.5 if low and high else 2 * low if low else rate / 2
    return low
