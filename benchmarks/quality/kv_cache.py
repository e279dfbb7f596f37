"""What a KV cache of 8-bit codes costs in perplexity, with real weights and on any device.

    python benchmarks/quality/kv_cache.py OUT.jsonl --text wiki.txt [--model smollm2-135m …]
        [--kv fp8 int8] [--tokens 4096] [--window 512]

Rows are those of `flyweight eval MODEL MODEL --kv-dtype fp8`: keys and values as a cache of that
type gives them back, products exact. The weights are loaded once, and what the model makes of a
window with its plain cache is kept where there is room for it, for every type is compared with it:
`log_ratio` and its error are of pairs of losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from flyweight.bench.rows import ResultFile
from flyweight.commands.evaluate import complete_rows, result_row
from flyweight.models.decoder import Decoder
from flyweight.models.kv_scheme import KVScheme, choose_kv_scheme
from flyweight.quant.evaluate import compare
from flyweight.quant.subject import Subject, load_subject

KEPT_BYTES = 4 << 30  # of predictions


class Seen:
    """The model, with keys and values in the type of one cache."""

    def __init__(self, decoder: Decoder, scheme: KVScheme, *, keeps: bool = False):
        self.decoder = decoder
        self.scheme = scheme
        self.device = decoder.device
        self.kept: dict[tuple[int, ...], Tensor] | None = {} if keeps else None

    def forward_whole(self, tokens: Tensor) -> Tensor:
        key = tuple(tokens[0].tolist())
        if self.kept is not None and key in self.kept:
            return self.kept[key]
        self.decoder.kv_scheme = self.scheme
        logits = self.decoder.forward_whole(tokens)
        if self.kept is not None:
            self.kept[key] = logits
        return logits


def measure(subject: Subject, plain: Seen, name: str, kv: str, options: argparse.Namespace) -> dict:
    decoder = subject.decoder
    scheme = choose_kv_scheme(kv, subject.checkpoint, decoder.config)
    result, agreement = compare(
        plain,
        Seen(decoder, scheme),
        subject.ids[: options.tokens],
        window=options.window,
        bos=subject.bos,
    )
    decoder.kv_scheme = scheme
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
        subject = load_subject(name, text, device=options.device, dtype=None)
        count = min(options.tokens, len(subject.ids))
        fits = 4 * count * subject.decoder.config.vocab_size <= KEPT_BYTES
        plain = Seen(subject.decoder, KVScheme(), keeps=fits)
        rows = []
        for kv in options.kv:
            rows.append(measure(subject, plain, name, kv, options))
            shown = {key: rows[-1][key] for key in ("kv_dtype", "perplexity", "log_ratio", "kl")}
            print(name, shown, flush=True)
        results.append(complete_rows(rows, subject.decoder.device))


if __name__ == "__main__":
    main()
