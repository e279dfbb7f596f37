"""What a KV cache of 8-bit codes costs in perplexity, with real weights and on any device.

    python benchmarks/quality/kv_cache.py OUT.jsonl --text wiki.txt [--model smollm2-135m …]
        [--kv fp8 int8] [--tokens 4096] [--window 512]

Rows are those of `flyweight eval MODEL MODEL --kv-dtype fp8`: keys and values as a cache of that
type gives them back, products exact. What the model makes of a window with its plain cache is kept
where there is room for it, for every type is compared with it: `log_ratio` and its error are of
pairs of losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from flyweight.bench.rows import ResultFile
from flyweight.commands.evaluate import complete_rows, result_row
from flyweight.kv_format import MODEL
from flyweight.quant.evaluate import compare
from flyweight.quant.subject import Rounding, Subject, load_subject

KEPT_BYTES = 4 << 30  # of predictions


class Kept:
    """The model with its plain cache; its predictions are kept where there is room for them."""

    def __init__(self, subject: Subject, tokens: int):
        self.model = subject.decoder
        self.device = subject.decoder.device
        fits = 4 * tokens * subject.decoder.config.vocab_size <= KEPT_BYTES
        self.kept: dict[tuple[int, ...], Tensor] | None = {} if fits else None

    def forward_whole(self, tokens: Tensor) -> Tensor:
        if self.kept is None:
            return self.model.forward_whole(tokens)
        key = tuple(tokens[0].tolist())
        if key not in self.kept:
            self.kept[key] = self.model.forward_whole(tokens)
        return self.kept[key]


def measure(plain: Kept, name: str, kv: str, options: argparse.Namespace) -> dict:
    """One type of cache, with the weights as they are loaded for it."""
    text = options.text.read_text(encoding="utf-8")
    subject = load_subject(
        name, text, device=options.device, dtype=None, rounding=Rounding(kv_dtype=kv)
    )
    result, agreement = compare(
        plain,
        subject.decoder,
        subject.ids[: options.tokens],
        window=options.window,
        bos=subject.bos,
    )
    return result_row(result, agreement, subject, model=name, text=options.text.name, exact=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--kv", nargs="+", default=["fp8", "int8"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    results = ResultFile(options.out)
    text = options.text.read_text(encoding="utf-8")
    for name in options.model:
        subject = load_subject(
            name, text, device=options.device, dtype=None, rounding=Rounding(kv_dtype=MODEL)
        )
        plain = Kept(subject, min(options.tokens, len(subject.ids)))
        for kv in options.kv:
            row = measure(plain, name, kv, options)
            shown = {key: row[key] for key in ("kv_dtype", "perplexity", "log_ratio", "kl")}
            print(name, shown, flush=True)
            results.append(complete_rows([row], subject.decoder.device))


if __name__ == "__main__":
    main()
