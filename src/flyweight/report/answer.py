"""What a report opens with: what was gained, what it cost, and which scheme to take.

One record a variant of a model: its speed under the one condition that covers most variants, its quality
on the one text that does. Speed and quality are joined by checkpoint alone. A difference counts where it
is larger than the errors of both sides; what is inside them is called equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyweight.report.blocks import Block, Column, Heading, Highlights, Paragraph, make_table
from flyweight.report.layouts import BASELINES
from flyweight.report.records import Record, make_record
from flyweight.report.rows import Results, group, number
from flyweight.report.units import plain

TOLERANCE = 0.05  # of perplexity: what a scheme may cost and still be the one to take
MOST_MODELS = 2  # that get a screen of their own; with more, a line each

TABLE = (
    Column("Scheme", "scheme"), Column("Decode (tok/s)", "decode_tok_s", "±.1f", optional=True),
    Column("× {baseline}", "faster", ".2f", optional=True),
    Column("First token (ms)", "ttft_ms_last", "±.1f", optional=True), Column("Size (GB)", "size_gb", ".3f", optional=True),
    Column("× smaller", "smaller", ".2f", optional=True), Column("Perplexity", "perplexity_text", optional=True),
    Column("change", "change_text", optional=True), Column("KL", "kl_text", optional=True),
    Column("Peak memory (GB)", "allocated_gb", ".2f", optional=True), Column("Weights (GB)", "weights_gb", ".2f", optional=True),
)
SHORT = (
    Column("Model", "model"), Column("Device", "device_name"), Column("Scheme", "scheme"), Column("Instead of", "baseline"),
    Column("Perplexity", "change_text", absent="not measured"),
    Column("Decode (tok/s)", "decode_tok_s", "±.1f", optional=True), Column("× as fast", "faster", ".2f", optional=True),
    Column("First token (ms)", "ttft_ms_last", "±.1f", optional=True), Column("× smaller", "smaller", ".2f", optional=True),
)
SPEED = ("backend", "bench", "workload", "batch", "input", "output", "kv_dtype")
QUALITY = ("text", "window", "stride", "tokens", "kv_dtype")
TIMED = ("decode_tok_s", "ttft_ms_last")  # what differs from run to run
JUDGED = ("perplexity", "perplexity_error", "perplexity_original", "kl", "kl_error", "log_ratio", "log_ratio_error", "tokens",
          "text", "size_gb")  # what a quality row adds to a speed row of the same checkpoint


@dataclass(frozen=True)
class Choice:
    """Of one model on one device: every variant, the original first, and the one to take."""

    model: str
    device: str | None
    variants: list[Record]
    original: Record
    best: Record
    why: str


def answer(results: Results, baseline: str | None = None) -> list[Block]:
    choices = [choice for key in places(results) if (choice := choose(results, *key, baseline)) is not None]
    if not choices:
        return []
    if len(choices) <= MOST_MODELS:
        return [Heading("The answer"), *(block for choice in choices for block in screen(choice, alone=len(choices) == 1))]
    lines = [choice.best | {"model": choice.model, "device_name": choice.device} for choice in choices]
    return [Heading("The answer"), make_table("The fastest scheme of each model, within what it may cost", SHORT, lines),
            Paragraph(f"{RULE} Where perplexity was not measured (random weights have none) the fastest is shown, and none is "
                      "recommended.")]


def places(results: Results) -> list[tuple[str, str | None]]:
    """Models with the devices they ran on; one whose speed was not measured is judged by its quality alone."""
    timed = [(row["model"], results.device(row)) for bench in ("latency", "speed") for row in results.of(bench)]
    others = [(row["model"], None) for row in results.of("quality")
              if row.get("model") not in {model for model, _ in timed}]
    return list(dict.fromkeys([*timed, *others]))


def choose(results: Results, model: str, device: str | None, baseline: str | None) -> Choice | None:
    variants = merge(speeds(results, model, device), qualities(results, model))
    names = [str(one["scheme"]) for one in variants]
    wanted = [baseline] if baseline else list(BASELINES)
    original = next((one for name in wanted for one in variants if str(one["scheme"]).lower() == name.lower()), None)
    if original is None or len(set(names)) < 2:
        return None
    for one in variants:
        compare(one, original)
    variants.sort(key=lambda one: (one is not original, -(one.get("decode_tok_s") or 0.0)))
    best, why = recommend(variants, original)
    return Choice(model, device, variants, original, best, why)


def speeds(results: Results, model: str, device: str | None) -> list[Record]:
    """Decode speed, first token and memory under the condition that covers most variants; decoding alone first."""
    rows = [row for bench in ("latency", "speed") for row in results.of(bench)
            if row["model"] == model and results.device(row) == device and number(row.get("decode_tok_s"))]
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in map(make_record, group(results, rows)):
        found.setdefault(tuple(record.get(name) for name in SPEED), []).append(record)

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        schemes = {one["scheme"] for one in found[key]}
        return (not str(key[0]).startswith("native"), -len(schemes), "decode_bound" not in key, key[3] not in (1, None),
                str(key))

    return found[min(found, key=rank)] if found else []


def qualities(results: Results, model: str) -> list[Record]:
    """Perplexity and KL on the text that covers most variants."""
    rows = [row for row in results.of("quality")
            if row.get("model") == model and not row.get("check") and number(row.get("perplexity")) is not None]
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in map(make_record, group(results, rows)):
        found.setdefault(tuple(record.get(name) for name in QUALITY), []).append(record)
    return found[max(found, key=lambda key: len({one["scheme"] for one in found[key]}))] if found else []


def merge(speed: Sequence[Record], quality: Sequence[Record]) -> list[Record]:
    """By checkpoint; a random one, or one that is not told, has no quality."""
    known = {one["checkpoint"]: one for one in quality if one.get("checkpoint")}
    taken = set()
    merged = []
    for one in speed:
        other = known.get(one.get("checkpoint"), {})
        taken.add(other.get("checkpoint"))
        merged.append({**one, **{name: other[name] for name in JUDGED if other.get(name) is not None and one.get(name) is None}})
    return merged + [dict(one) for one in quality if one.get("checkpoint") not in taken and not speed]


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
    """Relative, with its standard error: paired token by token where the row tells, else from both perplexities."""
    if one.get("log_ratio") is not None:
        return math.expm1(one["log_ratio"]), one.get("log_ratio_error")
    before = original.get("perplexity") or one.get("perplexity_original")
    if one is original or not before or one.get("perplexity") is None:
        return (0.0, None) if one is original and before else (None, None)
    errors = [float(side["perplexity_error"]) for side in (one, original) if side.get("perplexity_error") is not None]
    error = math.hypot(*errors) / before if len(errors) == 2 else None
    return one["perplexity"] / before - 1, error


def recommend(variants: Sequence[Record], original: Record) -> tuple[Record, str]:
    """The fastest of those that cost little; among equals the smallest. And why, in a sentence."""
    others = [one for one in variants if one is not original]
    measured = [one for one in others if one["change"] is not None]
    fine = [one for one in measured if one["change"] <= TOLERANCE] if measured else others
    if not fine:
        return original, (f"no scheme keeps perplexity within {TOLERANCE:.0%} of {original['scheme']}; "
                          f"{described(min(measured, key=lambda one: one['change']))} comes nearest")
    best = min(fine, key=lambda one: -(one.get("decode_tok_s") or 0.0))
    equals = [one for one in fine if not clearly_faster(best, one)]
    best = min(equals, key=lambda one: (one.get("size_gb") or math.inf, one["change"] if one["change"] is not None else math.inf))
    if clearly_faster(original, best) and not (best["smaller"] or 0) > 1:
        return original, "no scheme is faster or smaller here"
    return best, reasons(best, equals, others, fine, bool(measured))


def clearly_faster(one: Record, other: Record) -> bool:
    """By more than the deviations of both; without repeats by any difference."""
    fast, slow = one.get("decode_tok_s"), other.get("decode_tok_s")
    if not fast or not slow:
        return bool(fast) and not slow
    return fast - slow > (one.get("decode_tok_s±") or 0.0) + (other.get("decode_tok_s±") or 0.0)


def reasons(best: Record, equals: Sequence[Record], others: Sequence[Record], fine: Sequence[Record], measured: bool) -> str:
    among = f"of the schemes that cost at most {TOLERANCE:.0%} of perplexity" if measured else "of the schemes"
    timed = best.get("decode_tok_s") is not None
    kind = "the fastest" if timed and len(equals) == 1 else "the smallest of the fastest, which are equal within the error" \
        if timed else "the smallest"
    text = f"{among} it is {kind}" if len(fine) > 1 else (f"it is the only scheme that costs at most {TOLERANCE:.0%} of "
                                                          "perplexity" if measured else "it is the only one measured")
    worse = [one for one in others if one not in fine]
    if worse:
        text += f"; {', '.join(f'{described(one)}' for one in worse)} cost{'s' if len(worse) == 1 else ''} more"
    return text if measured else "what the schemes cost in quality was not measured (`flyweight eval` does)"


def described(one: Record) -> str:
    return f"{one['scheme']} ({one['change']:+.1%})" if one.get("change") is not None else str(one["scheme"])


RULE = (f"To take: the fastest decoding among the schemes that cost at most {TOLERANCE:.0%} of perplexity, as far as that was "
        "measured; among those that are equal within the error, the smallest.")


def screen(choice: Choice, *, alone: bool) -> list[Block]:
    best, original = choice.best, choice.original
    head = [] if alone else [Heading(f"{choice.model}{f' on {choice.device}' if choice.device else ''}", level=3)]
    if best is original:
        take = f"**Keep {original['scheme']}**: {choice.why}."
    elif best["change"] is None:
        take = f"**{best['scheme']} is fastest**, and none is recommended: {choice.why}."
    else:
        take = f"**Take {best['scheme']}** instead of {original['scheme']}: {choice.why}."
    where = conditions(choice.variants)
    shown = best if best is not original else min(choice.variants[1:], key=lambda one: one["change"] or 0.0)
    return [*head, Paragraph(take), Highlights(tuple(cards(shown, original))),
            make_table(f"{choice.model}: what each scheme gains and costs", TABLE, choice.variants), Paragraph(where)]


def cards(best: Record, original: Record) -> list[tuple[str, str, str]]:
    """(what, the figure, against what)"""
    found = []
    for name, key, unit, words in (("Size", "size_gb", "GB", ("smaller", "larger")), ("Decode", "decode_tok_s", "tok/s",
                                   ("as fast", "as fast")), ("First token", "ttft_ms_last", "ms", ("sooner", "later")),
                                   ("Peak memory", "allocated_gb", "GB", ("less", "more")),
                                   ("Weights in memory", "weights_gb", "GB", ("less", "more"))):
        if not best.get(key) or (key == "weights_gb" and best.get("allocated_gb") is not None):
            continue
        error = best.get(f"{key}±") if key in TIMED else None
        figure = f"{plain(best[key])} {unit}" if error is None else f"{best[key]:.1f} ± {error:.1f} {unit}"
        found.append((name, figure, against(best, original, key, unit, words)))
    if best.get("perplexity_text"):
        change = best.get("change_text")
        found.append(("Perplexity", best["perplexity_text"], f"{change} against {original['scheme']}" if change else ""))
    if best.get("kl_text"):
        found.append(("KL from the original", best["kl_text"], "nats a token; 0 is the same"))
    return found


def against(best: Record, original: Record, key: str, unit: str, words: tuple[str, str]) -> str:
    before = original.get(key)
    if not before or best is original:
        return ""
    times = best[key] / before if key == "decode_tok_s" else before / best[key]
    if key in TIMED and inside_the_error(best, original, key):
        return f"{original['scheme']}: {plain(before)} {unit}, equal within the error"
    if times >= 1 or key == "decode_tok_s":
        return f"{times:.2f} × {words[0]} ({original['scheme']}: {plain(before)} {unit})"
    return f"{1 / times:.2f} × {words[1]} ({original['scheme']}: {plain(before)} {unit})"


def inside_the_error(one: Record, other: Record, key: str) -> bool:
    errors = [float(side[f"{key}±"]) for side in (one, other) if side.get(f"{key}±") is not None]
    return len(errors) == 2 and abs(one[key] - other[key]) <= sum(errors)


def conditions(variants: Sequence[Record]) -> str:
    """How the figures of this screen were measured."""
    parts: list[str] = []
    timed = next((one for one in variants if one.get("decode_tok_s") is not None), None)
    if timed is not None:
        work = timed.get("workload") or "one workload"
        parts.append(f"Speed: {work}, batch {timed.get('batch') or 1}, {timed.get('input')} tokens in, {timed.get('output')} "
                     f"out, {timed['runs']} run{'s' * (timed['runs'] != 1)} (± is the deviation of the runs), {timed['backend']}"
                     f"{on(timed)}.")
    judged = next((one for one in variants if one.get("perplexity") is not None), None)
    if judged is not None:
        text = f"{judged.get('tokens') or '?'} tokens of {judged.get('text') or 'a text'}"
        parts.append(f"Quality: {text} (± is the standard error; a change is paired token by token where the rows tell).")
    if any(str(one.get("checkpoint")).startswith("random") for one in variants):
        parts.append("Random weights: they have a speed and no quality.")
    return " ".join([*parts, RULE])


def on(record: Record) -> str:
    return f" on {record['device_name']}" if record.get("device_name") else ""
