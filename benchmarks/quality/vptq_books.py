"""What codebooks of VPTQ in 8 bits cost in perplexity (`--vptq-books int8`).

    python benchmarks/quality/vptq_books.py OUT.jsonl --text wiki.txt --model FOLDER …
        [--tokens 4096] [--window 512] [--device cpu]

Each folder of VPTQ weights is loaded twice: its codebooks as the files have them, and rounded to
bytes. A row is of the rounded one, compared token by token with the other; products are exact.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flyweight.bench.rows import ResultFile
from flyweight.commands.evaluate import complete_rows, result_row
from flyweight.models.narrow_books import AS_STORED, IN_BYTES
from flyweight.quant.evaluate import compare
from flyweight.quant.subject import Rounding, load_subject


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    results = ResultFile(options.out)
    text = options.text.read_text(encoding="utf-8")
    for name in options.model:
        stored, rounded = (
            load_subject(name, text, device=options.device, dtype=None, rounding=books)
            for books in (Rounding(vptq_books=AS_STORED), Rounding(vptq_books=IN_BYTES))
        )
        result, agreement = compare(
            stored.decoder,
            rounded.decoder,
            rounded.ids[: options.tokens],
            window=options.window,
            bos=rounded.bos,
        )
        row = result_row(
            result, agreement, rounded, model=name, text=options.text.name, exact=True
        ) | {"vptq_books": IN_BYTES}
        shown = {key: row[key] for key in ("perplexity", "log_ratio", "log_ratio_error", "kl")}
        print(name, shown, flush=True)
        results.append(complete_rows([row], rounded.decoder.device))


if __name__ == "__main__":
    main()
