"""What codebooks of VPTQ in 8 bits cost in perplexity (`--vptq-books int8`).

    python benchmarks/quality/vptq_books.py OUT.jsonl --text wiki.txt --model FOLDER …
        [--original FOLDER] [--tokens 4096] [--window 512] [--device cpu]

Each folder of VPTQ weights is loaded twice: its codebooks as the files have them, and rounded to
bytes. A row is of the rounded one, compared token by token with the other; products are exact. With
the model that the folders were made of it also says by which share the KL from that one grows
(`kl_growth`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flyweight.bench.rows import ResultFile
from flyweight.commands.evaluate import complete_rows, result_row
from flyweight.models.narrow_books import AS_STORED, IN_BYTES
from flyweight.quant.evaluate import compare
from flyweight.quant.subject import Rounding, Subject, load_subject


def further(
    original: Subject, pair: tuple[Subject, Subject], ids: list[int], **windows: Any
) -> dict[str, Any]:
    """How far both are from the model that they were made of."""
    before, after = (compare(original.decoder, one.decoder, ids, **windows)[1].kl for one in pair)
    return {
        "kl_original_stored": before,
        "kl_original": after,
        "kl_growth": after / before - 1,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--original")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    results = ResultFile(options.out)
    text = options.text.read_text(encoding="utf-8")
    original = options.original and load_subject(
        options.original, text, device=options.device, dtype=None
    )
    for name in options.model:
        stored, rounded = (
            load_subject(name, text, device=options.device, dtype=None, rounding=books)
            for books in (Rounding(vptq_books=AS_STORED), Rounding(vptq_books=IN_BYTES))
        )
        ids = rounded.ids[: options.tokens]
        windows = {"window": options.window, "bos": rounded.bos}
        result, agreement = compare(stored.decoder, rounded.decoder, ids, **windows)
        row = result_row(
            result, agreement, rounded, model=name, text=options.text.name, exact=True
        ) | {"vptq_books": IN_BYTES}
        if original:
            row["original"] = Path(options.original).name
            row |= further(original, (stored, rounded), ids, **windows)
        keys = ("perplexity", "log_ratio", "log_ratio_error", "kl", "kl_growth")
        shown = {key: row[key] for key in keys if key in row}
        print(name, shown, flush=True)
        results.append(complete_rows([row], rounded.decoder.device))


if __name__ == "__main__":
    main()
