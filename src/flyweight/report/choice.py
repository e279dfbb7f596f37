"""Which scheme of a model to take: every variant beside the original, and the one that gains most.

One record a variant: its speed under the one condition that covers most variants, its quality on
the one text that does, of several such texts on the one on which the variants cost most. Speed and
quality are joined by checkpoint alone. A difference counts where it is larger than the errors of
both sides; what is inside them is called equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyweight.report.layouts import BASELINES
from flyweight.report.records import Record, make_record
from flyweight.report.rows import Results, group, number

TOLERANCE = 0.05  # of perplexity: what a scheme may cost and still be the one to take
SPEED = ("backend", "bench", "workload", "batch", "input", "output", "kv_dtype")
QUALITY = ("text", "window", "stride", "tokens", "kv_dtype")
TIMED = ("decode_tok_s", "ttft_ms_last")  # what differs from run to run
JUDGED = (
    "perplexity",
    "perplexity_error",
    "perplexity_original",
    "kl",
    "kl_error",
    "log_ratio",
    "log_ratio_error",
    "tokens",
    "text",
    "size_gb",
)  # what a quality row adds to a speed row of the same checkpoint


@dataclass(frozen=True)
class Choice:
    """Of one model on one device: every variant, the original first, and the one to take."""

    model: str
    device: str | None
    variants: list[Record]
    original: Record
    best: Record
    why: str


def places(results: Results) -> list[tuple[str, str | None]]:
    """Models with the devices they ran on; one that was not timed is judged by quality alone."""
    timed = [
        (row["model"], results.device(row))
        for bench in ("latency", "speed")
        for row in results.of(bench)
    ]
    others = [
        (row["model"], None)
        for row in results.of("quality")
        if row.get("model") not in {model for model, _ in timed}
    ]
    return list(dict.fromkeys([*timed, *others]))


def choose(results: Results, model: str, device: str | None, baseline: str | None) -> Choice | None:
    variants = merge(speeds(results, model, device), qualities(results, model))
    names = [str(one["scheme"]) for one in variants]
    wanted = [baseline] if baseline else list(BASELINES)
    original = next(
        (one for name in wanted for one in variants if str(one["scheme"]).lower() == name.lower()),
        None,
    )
    if original is None or len(set(names)) < 2:
        return None
    for one in variants:
        compare(one, original)
    variants.sort(key=lambda one: (one is not original, -(one.get("decode_tok_s") or 0.0)))
    best, why = recommend(variants, original)
    return Choice(model, device, variants, original, best, why)


def speeds(results: Results, model: str, device: str | None) -> list[Record]:
    """Speed, first token and memory under the condition that covers most variants."""
    rows = [
        row
        for bench in ("latency", "speed")
        for row in results.of(bench)
        if row["model"] == model
        and results.device(row) == device
        and number(row.get("decode_tok_s"))
    ]
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in map(make_record, group(results, rows)):
        found.setdefault(tuple(record.get(name) for name in SPEED), []).append(record)

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        schemes = {one["scheme"] for one in found[key]}
        return (
            not str(key[0]).startswith("native"),
            -len(schemes),
            "decode_bound" not in key,
            key[3] not in (1, None),
            str(key),
        )

    return found[min(found, key=rank)] if found else []


def qualities(results: Results, model: str) -> list[Record]:
    """Perplexity and KL on the text that covers most variants; of several the one that asks most of
    them: what is good enough there is so on the others.
    """
    rows = [
        row
        for row in results.of("quality")
        if row.get("model") == model
        and not row.get("check")
        and number(row.get("perplexity")) is not None
    ]
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in map(make_record, group(results, rows)):
        found.setdefault(tuple(record.get(name) for name in QUALITY), []).append(record)

    def rank(key: tuple[Any, ...]) -> tuple[int, float]:
        costs = [one["log_ratio"] for one in found[key] if one.get("log_ratio") is not None]
        return len({one["scheme"] for one in found[key]}), sum(costs) / max(1, len(costs))

    return found[max(found, key=rank)] if found else []


def merge(speed: Sequence[Record], quality: Sequence[Record]) -> list[Record]:
    """By checkpoint; a random one, or one that is not told, has no quality."""
    known = {one["checkpoint"]: one for one in quality if one.get("checkpoint")}
    taken = set()
    merged = []
    for one in speed:
        other = known.get(one.get("checkpoint"), {})
        taken.add(other.get("checkpoint"))
        merged.append(
            {
                **one,
                **{
                    name: other[name]
                    for name in JUDGED
                    if other.get(name) is not None and one.get(name) is None
                },
            }
        )
    return merged + [
        dict(one) for one in quality if one.get("checkpoint") not in taken and not speed
    ]


def compare(one: Record, original: Record) -> None:
    """What a variant gains and costs against the original, as numbers and as text."""
    one["baseline"] = original["scheme"]
    one["faster"] = ratio(one.get("decode_tok_s"), original.get("decode_tok_s"))
    one["smaller"] = ratio(original.get("size_gb"), one.get("size_gb"))
    one["change"], one["change_error"] = perplexity_change(one, original)
    if one.get("perplexity") is not None:
        error = one.get("perplexity_error")
        one["perplexity_text"] = f"{one['perplexity']:.2f}" + (f" ± {error:.2f}" if error else "")
    if one["change"] is not None and one is not original:
        error = one["change_error"]
        one["change_text"] = f"{one['change']:+.1%}" + (f" ± {error:.1%}" if error else "")
    if one.get("kl") is not None:
        error = one.get("kl_error")
        one["kl_text"] = f"{one['kl']:.4f}" + (f" ± {error:.4f}" if error else "")


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def perplexity_change(one: Record, original: Record) -> tuple[float | None, float | None]:
    """Relative, with its standard error: paired by token where the row tells, else of both."""
    if one.get("log_ratio") is not None:
        error = one.get("log_ratio_error")
        share = math.exp(one["log_ratio"])  # of the original's, which the error is a share of
        return share - 1, None if error is None else share * error
    before = original.get("perplexity") or one.get("perplexity_original")
    if one is original or not before or one.get("perplexity") is None:
        return (0.0, None) if one is original and before else (None, None)
    errors = [
        float(side["perplexity_error"])
        for side in (one, original)
        if side.get("perplexity_error") is not None
    ]
    error = math.hypot(*errors) / before if len(errors) == 2 else None
    return one["perplexity"] / before - 1, error


def recommend(variants: Sequence[Record], original: Record) -> tuple[Record, str]:
    """The fastest of those that cost little; among equals the smallest. And why, in a sentence."""
    others = [one for one in variants if one is not original]
    measured = [one for one in others if one["change"] is not None]
    fine = [one for one in measured if one["change"] <= TOLERANCE] if measured else others
    if not fine:
        return original, (
            f"no scheme keeps perplexity within {TOLERANCE:.0%} of {original['scheme']}; "
            f"{described(min(measured, key=lambda one: one['change']))} comes nearest"
        )
    best = min(fine, key=lambda one: -(one.get("decode_tok_s") or 0.0))
    equals = [one for one in fine if not clearly_faster(best, one)]
    best = min(
        equals,
        key=lambda one: (
            one.get("size_gb") or math.inf,
            one["change"] if one["change"] is not None else math.inf,
        ),
    )
    if clearly_faster(original, best) and not (best["smaller"] or 0) > 1:
        return original, "no scheme is faster or smaller here"
    return best, reasons(best, equals, others, fine, bool(measured))


def clearly_faster(one: Record, other: Record) -> bool:
    """By more than the deviations of both; without repeats by any difference."""
    fast, slow = one.get("decode_tok_s"), other.get("decode_tok_s")
    if not fast or not slow:
        return bool(fast) and not slow
    return fast - slow > (one.get("decode_tok_s±") or 0.0) + (other.get("decode_tok_s±") or 0.0)


def reasons(
    best: Record,
    equals: Sequence[Record],
    others: Sequence[Record],
    fine: Sequence[Record],
    measured: bool,
) -> str:
    among = (
        f"of the schemes that cost at most {TOLERANCE:.0%} of perplexity"
        if measured
        else "of the schemes"
    )
    timed = best.get("decode_tok_s") is not None
    kind = (
        "the fastest"
        if timed and len(equals) == 1
        else "the smallest of the fastest, which are equal within the error"
        if timed
        else "the smallest"
    )
    text = (
        f"{among} it is {kind}"
        if len(fine) > 1
        else (
            f"it is the only scheme that costs at most {TOLERANCE:.0%} of perplexity"
            if measured
            else "it is the only one measured"
        )
    )
    worse = [one for one in others if one not in fine]
    if worse:
        verb = "costs" if len(worse) == 1 else "cost"
        text += f"; {', '.join(map(described, worse))} {verb} more"
    return (
        text
        if measured
        else "what the schemes cost in quality was not measured (`flyweight eval` does)"
    )


def described(one: Record) -> str:
    return (
        f"{one['scheme']} ({one['change']:+.1%})"
        if one.get("change") is not None
        else str(one["scheme"])
    )


def inside_the_error(one: Record, other: Record, key: str) -> bool:
    errors = [float(side[f"{key}±"]) for side in (one, other) if side.get(f"{key}±") is not None]
    return len(errors) == 2 and abs(one[key] - other[key]) <= sum(errors)
