"""The comparison: mean over seeds, and paired differences with their standard errors.

    # prints it; `make results` puts it into the documents
    python benchmarks/quality/run.py --out rows.jsonl --table

A difference d[seed, window] of mean losses has two sources of noise, the text and the calibration
draw: error² = var(mean over seeds by window) / windows + var(mean over windows by seed) / seeds.
"Better" and "worse" mean by more than two errors, at no more stored bits per weight.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import peers

BEST = {
    "w8a8-smooth-gptq": "8 bits, activations too",
    "int4-best": "4 bits",
    "vptq-3bit": "3 bits",
    "vptq-2bit": "2 bits",
}
Results = dict[tuple[str, str], list[dict[str, Any]]]


def read(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if path.exists()
        else []
    )


def by_setting(path: Path) -> dict[tuple[str, str], Results]:
    """(model, text) → (tool, scheme) → the last good row of each seed."""
    found: dict[tuple[str, str], dict[tuple[str, str], dict[int, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in read(path):
        if row["bench"] == "quality" and row["status"] == "ok":
            found[row.get("model", ""), row.get("text", "")][row["tool"], row["scheme"]][
                row["seed"]
            ] = row
    return {
        setting: {key: [rows[seed] for seed in sorted(rows)] for key, rows in schemes.items()}
        for setting, schemes in found.items()
    }


def collect(path: Path) -> Results:
    """Of a file with one model and one text."""
    (results,) = by_setting(path).values() or [{}]
    return results


def error_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean log-ratio of the perplexities, its standard error): below zero where ours is better.
    Seeds are paired in turn.
    """
    count = max(len(ours), len(theirs))
    pairs = [
        (ours[i % len(ours)]["window_losses"], theirs[i % len(theirs)]["window_losses"])
        for i in range(count)
    ]
    gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]  # [seeds][windows]
    by_window = [statistics.fmean(column) for column in zip(*gaps, strict=True)]
    by_seed = [statistics.fmean(row) for row in gaps]
    return statistics.fmean(by_seed), math.hypot(error_of(by_window), error_of(by_seed))


def kl_difference(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> tuple[float, float] | None:
    """(ours less theirs over theirs, its standard error) of the mean KL divergence from the
    original; of pairs of windows where the rows have them. Where a model hardly knows a text, its
    perplexity may fall by rounding; its KL cannot.
    """
    if any("kl" not in row for row in (*ours, *theirs)):
        return None
    whole = mean(theirs, "kl")
    gap = mean(ours, "kl") - whole
    if all("window_kls" in row for row in (*ours, *theirs)):
        columns = zip(*(row["window_kls"] for row in ours), strict=True)
        others = zip(*(row["window_kls"] for row in theirs), strict=True)
        pairs = zip(map(statistics.fmean, columns), map(statistics.fmean, others), strict=True)
        error = error_of([a - b for a, b in pairs])
    else:
        error = math.hypot(mean(ours, "kl_error"), mean(theirs, "kl_error"))
    return gap / whole, error / whole


def change(log_ratio: float, error: float) -> str:
    """In percent. The error of a logarithm is one of the ratio by the ratio itself: ten percent of
    a perplexity three times the original's are thirty of the original's.
    """
    return f"{100 * math.expm1(log_ratio):+.2f} ± {100 * math.exp(log_ratio) * error:.2f} %"


def verdict(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    gap, error = difference(ours, theirs)
    more_bits = ours[0]["bits_per_weight"] > theirs[0]["bits_per_weight"] + 0.005
    word = "equal" if abs(gap) <= 2 * error else "better" if gap < 0 else "worse"
    kl = kl_difference(ours, theirs)
    said = f"{word} {change(gap, error)}"
    if kl is not None:
        said += f", KL {100 * kl[0]:+.0f} ± {100 * kl[1]:.0f} %"
    return said + (" with more bits" if more_bits else "")


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def quality_lines(results: Results) -> list[str]:
    """Markdown: one line per tool and scheme, the best first."""
    columns = ("tool", "scheme", "bits", "perplexity", "change", "KL", "top-1", "seeds")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for (tool, scheme), rows in sorted(
        results.items(), key=lambda item: mean(item[1], "perplexity")
    ):
        compared = ["", "", ""]
        if "kl" in rows[0]:
            ratio = mean(rows, "log_ratio")
            error = math.hypot(
                mean(rows, "log_ratio_error"), error_of([row["log_ratio"] for row in rows])
            )
            compared = [
                change(ratio, error),
                f"{mean(rows, 'kl'):.5f}",
                f"{100 * mean(rows, 'top1_agreement'):.2f} %",
            ]
        lines.append(
            f"| {tool} | {scheme} | {rows[0]['bits_per_weight']:.3f} | "
            f"{mean(rows, 'perplexity'):.4f} | {' | '.join(compared)} | {len(rows)} |"
        )
    return lines


def rival_lines(results: Results) -> list[str]:
    """Every comparison that is asked for of which both sides are here."""
    lines = ["| ours | against | ours is |", "|---|---|---|"]
    for scheme, others in peers.RIVALS.items():
        for other in others:
            if ("flyweight", scheme) in results and other in results:
                said = compared(results, scheme, other)
                lines.append(f"| {scheme} | {' '.join(other)} | {said} |")
    return lines


def best_lines(results: Results) -> list[str]:
    """Ours for each number of bits, and the best that it is held against of the packages."""

    def told(tool: str, scheme: str) -> str:
        rows = results[tool, scheme]
        return (
            f"{tool} {scheme}".removeprefix("flyweight ")
            + f": {100 * math.expm1(mean(rows, 'log_ratio')):+.1f} % "
            f"({rows[0]['bits_per_weight']:.2f} bits)"
        )

    lines = ["| | ours | the best of llm-compressor and auto-round |", "|---|---|---|"]
    for scheme, what in BEST.items():
        others = [
            key for key in peers.RIVALS.get(scheme, []) if key in results and key[0] != "flyweight"
        ]
        if ("flyweight", scheme) in results:
            rival = (
                told(*min(others, key=lambda key: mean(results[key], "perplexity")))
                if others
                else "–"
            )
            lines.append(f"| {what} | {told('flyweight', scheme)} | {rival} |")
    return lines


def unfinished(rows: list[dict[str, Any]]) -> list[str]:
    """Jobs whose last attempt failed, with the reason."""
    last = {(row.get("model", ""), row["job"]): row for row in rows if row["bench"] == "quality"}
    return [
        f"{job}: {row['reason']}"
        for (_, job), row in sorted(last.items())
        if row["status"] == "failed"
    ]


def document(path: Path) -> str:
    """Everything there is to say of the rows, in markdown; a heading for each model and text where
    there are several.
    """
    rows, settings = read(path), by_setting(path)
    parts = []
    for (model, text), results in settings.items():
        if len(settings) > 1:
            parts.append(f"### {model}, {text}")
        parts += [
            "\n".join(quality_lines(results)),
            "\n".join(rival_lines(results)),
        ]
    if missing := unfinished(rows):
        parts.append("Did not finish:\n\n" + "\n".join(f"- {line}" for line in missing))
    return "\n\n".join(parts)


def across(path: Path) -> str:
    """One line for each model, tool and scheme, the texts side by side; then every comparison with
    a peer.
    """
    settings = by_setting(path)
    texts = list(dict.fromkeys(text for _, text in settings))
    lines = [
        f"| model | tool | scheme | bits | {' | '.join(f'{text}, KL' for text in texts)} |",
        "|" + "---|" * (4 + len(texts)),
    ]
    rivals = [f"| model | ours | against | {' | '.join(texts)} |", "|" + "---|" * (3 + len(texts))]
    for model in dict.fromkeys(model for model, _ in settings):
        found = {text: settings[model, text] for text in texts if (model, text) in settings}
        first = next(iter(found.values()))
        for key in sorted(first, key=lambda key: (-first[key][0]["bits_per_weight"], key)):
            cells = [told(found.get(text, {}).get(key)) for text in texts]
            lines.append(
                f"| {model} | {' | '.join(key)} | {first[key][0]['bits_per_weight']:.3f} "
                f"| {' | '.join(cells)} |"
            )
        for scheme, others in peers.RIVALS.items():
            for other in others:
                if ("flyweight", scheme) in first and other in first:
                    said = [compared(found.get(text, {}), scheme, other) for text in texts]
                    rivals.append(
                        f"| {model} | {scheme} | {' '.join(other)} | {' | '.join(said)} |"
                    )
    return "\n".join(lines) + "\n\n" + "\n".join(rivals)


def made_with(path: Path) -> str:
    """Of each model: how much was calibrated on, judged and learned; less than `run.py` takes by
    itself where time was short.
    """
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in read(path):
        if row["bench"] == "quality" and row["status"] == "ok":
            for name in ("calibration_tokens", "tokens", "learn_steps"):
                if row.get(name):
                    found[row["model"]][name].add(row[name])
    lines = []
    for model, facts in found.items():
        parts = {
            "calibration_tokens": "calibrated on {} tokens",
            "tokens": "{} tokens of each text",
            "learn_steps": "{} steps where a scheme learns",
        }
        said = [
            text.format(" or ".join(f"{one:,}" for one in sorted(facts[name])))
            for name, text in parts.items()
            if facts[name]
        ]
        lines.append(f"- {model}: {', '.join(said)}")
    return "\n".join(lines)


def told(rows: list[dict[str, Any]] | None) -> str:
    """Change of perplexity and KL of one cell; the original's perplexity itself."""
    if not rows:
        return "–"
    if "kl" not in rows[0]:
        return f"perplexity {mean(rows, 'perplexity'):.3f}"
    error = math.hypot(mean(rows, "log_ratio_error"), error_of([row["log_ratio"] for row in rows]))
    return f"{change(mean(rows, 'log_ratio'), error)}, {mean(rows, 'kl'):.4f}"


def compared(results: Results, scheme: str, other: tuple[str, str]) -> str:
    ours, theirs = results.get(("flyweight", scheme)), results.get(other)
    if not ours or not theirs:
        return "–"
    said = verdict(ours, theirs)
    return f"**{said}**" if said.startswith("worse") else said


def show(path: Path) -> None:
    print(document(path))


def made_on(path: Path) -> str:
    machines = {row["id"]: row for row in read(path) if row["bench"] == "environment"}
    used = [
        machines[row["environment"]]
        for row in read(path)
        if row["bench"] == "quality" and row["environment"] in machines
    ]
    told = {f"{one['device']}, commit {str(one['commit'])[:12]}" for one in used}
    return f"Measured on {'; '.join(sorted(told))}."
