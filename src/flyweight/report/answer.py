"""What a report opens with: what was gained, what it cost, and which scheme to take."""

from __future__ import annotations

from collections.abc import Sequence

from flyweight.report.blocks import Block, Column, Heading, Highlights, Paragraph, make_table
from flyweight.report.choice import TIMED, TOLERANCE, Choice, choose, inside_the_error, places
from flyweight.report.records import Record
from flyweight.report.rows import Results
from flyweight.report.units import plain

MOST_MODELS = 2  # that get a screen of their own; with more, a line each

TABLE = (
    Column("Scheme", "scheme"),
    Column("Decode (tok/s)", "decode_tok_s", "±.1f", optional=True),
    Column("× {baseline}", "faster", ".2f", optional=True),
    Column("First token (ms)", "ttft_ms_last", "±.1f", optional=True),
    Column("Size (GB)", "size_gb", ".3f", optional=True),
    Column("× smaller", "smaller", ".2f", optional=True),
    Column("Perplexity", "perplexity_text", optional=True),
    Column("change", "change_text", optional=True),
    Column("KL", "kl_text", optional=True),
    Column("Peak memory (GB)", "allocated_gb", ".2f", optional=True),
    Column("Weights (GB)", "weights_gb", ".2f", optional=True),
)
SHORT = (
    Column("Model", "model"),
    Column("Device", "device_name"),
    Column("Scheme", "scheme"),
    Column("Instead of", "baseline"),
    Column("Perplexity", "change_text", absent="not measured"),
    Column("Decode (tok/s)", "decode_tok_s", "±.1f", optional=True),
    Column("× as fast", "faster", ".2f", optional=True),
    Column("First token (ms)", "ttft_ms_last", "±.1f", optional=True),
    Column("× smaller", "smaller", ".2f", optional=True),
)


def answer(results: Results, baseline: str | None = None) -> list[Block]:
    choices = [
        choice for key in places(results) if (choice := choose(results, *key, baseline)) is not None
    ]
    if not choices:
        return []
    if len(choices) <= MOST_MODELS:
        return [
            Heading("The answer"),
            *(block for choice in choices for block in screen(choice, alone=len(choices) == 1)),
        ]
    lines = [
        choice.best | {"model": choice.model, "device_name": choice.device} for choice in choices
    ]
    return [
        Heading("The answer"),
        make_table("The fastest scheme of each model, within what it may cost", SHORT, lines),
        Paragraph(
            f"{RULE} Where perplexity was not measured (random weights have none) the fastest is "
            "shown, and none is recommended."
        ),
    ]


RULE = (
    f"To take: the fastest decoding among the schemes that cost at most {TOLERANCE:.0%} of "
    "perplexity, as far as that was measured; among those that are equal within the error, the "
    "smallest."
)


def screen(choice: Choice, *, alone: bool) -> list[Block]:
    best, original = choice.best, choice.original
    head = (
        []
        if alone
        else [Heading(f"{choice.model}{f' on {choice.device}' if choice.device else ''}", level=3)]
    )
    if best is original:
        take = f"**Keep {original['scheme']}**: {choice.why}."
    elif best["change"] is None:
        take = f"**{best['scheme']} is fastest**, and none is recommended: {choice.why}."
    else:
        gains = ", ".join(gained(best, original))
        take = f"**Take {best['scheme']}** instead of {original['scheme']} ({gains}): {choice.why}."
    where = conditions(choice.variants)
    shown = (
        best
        if best is not original
        else min(choice.variants[1:], key=lambda one: one["change"] or 0.0)
    )
    return [
        *head,
        Paragraph(take),
        Highlights(tuple(cards(shown, original))),
        make_table(f"{choice.model}: what each scheme gains and costs", TABLE, choice.variants),
        Paragraph(where),
    ]


def gained(best: Record, original: Record) -> list[str]:
    """What the one to take gains and costs, in a few words."""
    parts = []
    if best["smaller"]:
        parts.append(f"{best['smaller']:.2f} × smaller")
    if best["faster"] and inside_the_error(best, original, "decode_tok_s"):
        parts.append("as fast within the error")
    elif best["faster"]:
        parts.append(f"{best['faster']:.2f} × as fast")
    if best.get("change_text"):
        parts.append(f"perplexity {best['change_text']}")
    return parts


def cards(best: Record, original: Record) -> list[tuple[str, str, str]]:
    """(what, the figure, against what)"""
    found = []
    for name, key, unit, words in (
        ("Size", "size_gb", "GB", ("smaller", "larger")),
        ("Decode", "decode_tok_s", "tok/s", ("as fast", "as fast")),
        ("First token", "ttft_ms_last", "ms", ("sooner", "later")),
        ("Peak memory", "allocated_gb", "GB", ("less", "more")),
        ("Weights in memory", "weights_gb", "GB", ("less", "more")),
    ):
        if not best.get(key) or (key == "weights_gb" and best.get("allocated_gb") is not None):
            continue
        error = best.get(f"{key}±") if key in TIMED else None
        digits = 0 if best[key] >= 1000 else 1
        figure = f"{plain(best[key])} {unit}"
        if error is not None:
            figure = f"{best[key]:.{digits}f} ± {error:.{digits}f} {unit}"
        found.append((name, figure, against(best, original, key, unit, words)))
    if best.get("perplexity_text"):
        change = best.get("change_text")
        found.append(
            (
                "Perplexity",
                best["perplexity_text"],
                f"{change} against {original['scheme']}" if change else "",
            )
        )
    if best.get("kl_text"):
        found.append(("KL from the original", best["kl_text"], "nats a token; 0 is the same"))
    return found


def against(best: Record, original: Record, key: str, unit: str, words: tuple[str, str]) -> str:
    before = original.get(key)
    if not before or best is original:
        return ""
    times = best[key] / before if key == "decode_tok_s" else before / best[key]
    if f"{times:.2f}" == "1.00" and key not in TIMED:
        return f"as {original['scheme']}"
    if key in TIMED and inside_the_error(best, original, key):
        return f"{original['scheme']}: {plain(before)} {unit}, equal within the error"
    if times >= 1 or key == "decode_tok_s":
        return f"{times:.2f} × {words[0]} ({original['scheme']}: {plain(before)} {unit})"
    return f"{1 / times:.2f} × {words[1]} ({original['scheme']}: {plain(before)} {unit})"


def conditions(variants: Sequence[Record]) -> str:
    """How the figures of this screen were measured."""
    parts: list[str] = []
    timed = next((one for one in variants if one.get("decode_tok_s") is not None), None)
    if timed is not None:
        work = timed.get("workload") or "one workload"
        shape = f"{timed.get('input')} tokens in, {timed.get('output')} out"
        runs = f"{timed['runs']} run{'s' * (timed['runs'] != 1)} (± is the deviation of the runs)"
        where = f"{timed['backend']}{on(timed)}"
        parts.append(f"Speed: {work}, batch {timed.get('batch') or 1}, {shape}, {runs}, {where}.")
    judged = next((one for one in variants if one.get("perplexity") is not None), None)
    if judged is not None:
        text = f"{judged.get('tokens') or '?'} tokens of {judged.get('text') or 'a text'}"
        parts.append(
            f"Quality: {text} (± is the standard error; a change is paired token by token where "
            "the rows tell)."
        )
    if any(str(one.get("checkpoint")).startswith("random") for one in variants):
        parts.append("Random weights: they have a speed and no quality.")
    return " ".join([*parts, RULE])


def on(record: Record) -> str:
    return f" on {record['device_name']}" if record.get("device_name") else ""
