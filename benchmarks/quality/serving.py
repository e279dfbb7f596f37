"""Tables of what the options of serving cost in quality: 8-bit caches, heads, prompts and
codebooks; of the tasks that quantized models were asked; and of ranges without calibration.

`make results` puts them into docs/serve.md and docs/quantize.md. Rows are those of kv_cache.py,
../needle.py, served_head.py, vptq_books.py, tasks.py, grid_ranges.py and `flyweight eval MODEL
MODEL --prompt-dtype …`; of rows of one kind the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import table

Row = dict[str, Any]


def last_of(folders: Sequence[Path], name: str, keys: Sequence[str]) -> list[Row]:
    """The last good row for each value of the keys, in the order in which these came first; a later
    folder comes after an earlier one.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for row in (row for folder in folders for row in table.read(folder / name)):
        if row["bench"] == "quality" and row["status"] == "ok":
            found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


def lines_of(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def name_of(row: Row) -> str:
    """Of the model, without what its file is called by."""
    return Path(row["model"]).name.removesuffix(".gguf")


def compared(row: Row) -> tuple[str, str, str]:
    """Change of perplexity, KL, and over how many tokens."""
    return (
        table.change(row["log_ratio"], row["log_ratio_error"]),
        f"{row['kl']:.5f}",
        f"{row['tokens']:,}",
    )


def caches(folders: Sequence[Path]) -> str:
    """Perplexity with keys and values in 8 bits, against a cache in the type of activations."""
    rows = last_of(folders, "kv-cache.jsonl", ("model", "text", "kv_dtype"))
    lines = [
        (name_of(row), row["text"], row["kv_dtype"], *compared(row))
        for row in sorted(rows, key=lambda row: (name_of(row), row["text"], row["kv_dtype"]))
    ]
    return (
        lines_of(("model", "text", "cache", "perplexity", "KL", "tokens"), lines) if lines else ""
    )


def needles(folders: Sequence[Path]) -> str:
    """Sentences found again in long texts."""
    rows = last_of(folders, "needle.jsonl", ("model", "kv_dtype", "window"))
    lengths = sorted({row["window"] for row in rows})
    found = {(name_of(row), row["kv_dtype"], row["window"]): row["found"] for row in rows}
    lines = []
    for model, kv in dict.fromkeys(key[:2] for key in found):
        cells = [found.get((model, kv, length)) for length in lengths]
        lines.append((model, kv, *(f"{sum(one)} of {len(one)}" if one else "–" for one in cells)))
    return lines_of(("model", "cache", *(f"{n:,} tokens" for n in lengths)), lines) if lines else ""


def heads(folders: Sequence[Path]) -> str:
    """By how much a head in fewer bits moves a quantized model further from its original."""
    rows = last_of(folders, "heads.jsonl", ("model", "scheme", "head"))
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((name_of(row), row["scheme"]), {})[row["head"]] = row
    kinds = [kind for kind in ("int8", "int4") if any(kind in one for one in found.values())]
    lines = [
        (*key, f"{one['stored']['kl']:.4f}")
        + tuple(f"{100 * one[kind]['kl_growth']:+.2f} %" if kind in one else "–" for kind in kinds)
        for key, one in sorted(found.items())
    ]
    return lines_of(("model", "scheme", "KL with its own head", *kinds), lines) if lines else ""


def prompts(folders: Sequence[Path]) -> str:
    """4-bit weights with prompts in 8 bits, against themselves."""
    rows = last_of(folders, "prompts.jsonl", ("model", "scheme", "prompt_dtype"))
    lines = [
        (name_of(row), row["scheme"], row["prompt_dtype"], *compared(row))
        for row in rows
        if row.get("prompt_dtype")
    ]
    columns = ("model", "scheme", "prompts", "perplexity", "KL", "tokens")
    return lines_of(columns, lines) if lines else ""


def books(folders: Sequence[Path]) -> str:
    """VPTQ with codebooks in 8 bits, against itself."""
    rows = last_of(folders, "vptq-books.jsonl", ("model", "scheme"))
    lines = [
        (
            name_of(row),
            row["scheme"],
            *compared(row),
            f"{100 * row['kl_growth']:+.2f} %" if "kl_growth" in row else "–",
        )
        for row in rows
    ]
    columns = ("model", "scheme", "perplexity", "KL", "tokens", "KL from the original")
    return lines_of(columns, lines) if lines else ""


def tasks(folders: Sequence[Path]) -> str:
    """Right answers of quantized models, and the paired difference from their originals."""
    rows = last_of(folders, "tasks.jsonl", ("model", "scheme", "task"))
    lines = [
        (
            name_of(row),
            row["scheme"],
            row["task"],
            f"{row['questions']:,}",
            f"{100 * row['accuracy_original']:.2f} %",
            f"{100 * row['accuracy']:.2f} %",
            f"{100 * row['accuracy_change']:+.2f} ± {100 * row['accuracy_change_error']:.2f}",
        )
        for row in rows
    ]
    columns = ("model", "scheme", "task", "questions", "original", "quantized", "points")
    return lines_of(columns, lines) if lines else ""


def grid_ranges(folders: Sequence[Path]) -> str:
    """Rounding to nearest by three choices of ranges: KL from the original, and how much less or
    more that is than with whole ranges.
    """
    rows = last_of(folders, "grid-ranges.jsonl", ("model", "bits", "group_size", "ranges", "text"))
    texts = list(dict.fromkeys(row["text"] for row in rows))
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (name_of(row), row["bits"], row["group_size"], row["ranges"])
        found.setdefault(key, {})[row["text"]] = row
    lines = []
    for (model, bits, group_size, chosen), by_text in found.items():
        group = "channel" if group_size == -1 else str(group_size)
        cells = [changed_kl(by_text[text]) if text in by_text else "–" for text in texts]
        lines.append((model, str(bits), group, chosen, *cells))
    columns = ("model", "bits", "group, at most", "ranges", *texts)
    return lines_of(columns, lines) if lines else ""


def changed_kl(row: Row) -> str:
    if row["ranges"] == "minmax":
        return f"{row['kl']:.4f}"
    change = f"{100 * row['kl_change']:+.1f} ± {100 * row['kl_change_error']:.1f} %"
    return f"{row['kl']:.4f}, {change}"


BLOCKS: dict[str, Callable[[Sequence[Path]], str]] = {
    "caches": caches,
    "needles": needles,
    "heads": heads,
    "prompts": prompts,
    "books": books,
    "tasks": tasks,
    "grid_ranges": grid_ranges,
}
