"""What an 8-bit head adds to the distance between a quantized model and its original.

    python benchmarks/quality/served_head.py OUT.jsonl --text wiki.txt --original FOLDER
        --model QUANTIZED … [--head int8] [--tokens 8192] [--window 512] [--batch 8] [--device cuda]

Schemes write `served_head = "int8"` into a folder where it hardly counts beside their own rounding.
A row is of one folder with one head: its KL from the original, and `kl_growth`, by which share that
is more than with the head as its file has it. The original runs once for each window.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.bench.facts import checkpoint_facts
from flyweight.bench.rows import ResultFile, rounded
from flyweight.commands.evaluate import complete_rows
from flyweight.quant.evaluate import Mean, cut_windows
from flyweight.quant.subject import Rounding, load_subject


class Distance:
    """Of one model from the original, over windows that come one after the other."""

    def __init__(self) -> None:
        self.kl = Mean()
        self.loss = Mean()

    def add(self, original: Tensor, logits: Tensor, tokens: Tensor) -> None:
        """Logarithms of the original's probabilities [.., tokens, vocabulary]; the logits beside
        them.
        """
        own = logits.float().log_softmax(-1)
        self.kl.add((original.exp() * (original - own)).sum(-1).flatten())
        before, now = (p.gather(-1, tokens[..., None]).flatten() for p in (original, own))
        self.loss.add((before - now).double())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    text = options.text.read_text(encoding="utf-8")
    original = load_subject(options.original, text, device=options.device, dtype=options.dtype)
    heads = ["stored", *options.head]
    cases = {
        (model, head): load_subject(
            model, text, device=options.device, dtype=options.dtype, rounding=Rounding(head=head)
        ).decoder
        for model in options.model
        for head in heads
    }
    found = {case: Distance() for case in cases}
    ids = original.ids[: options.tokens]
    windows = [
        one.tokens
        for one in cut_windows(ids, window=options.window, bos=original.bos)
        if len(one.tokens) >= options.window
    ]
    for at in range(0, len(windows), options.batch):
        tokens = torch.tensor(windows[at : at + options.batch], device=original.decoder.device)
        wanted = original.decoder.forward_whole(tokens)[:, :-1].float().log_softmax(-1)
        for case, decoder in cases.items():
            found[case].add(wanted, decoder.forward_whole(tokens)[:, :-1], tokens[:, 1:])
    return [row_of(*case, found, options) for case in cases]


def row_of(
    model: str, head: str, found: dict[tuple[str, str], Distance], options: argparse.Namespace
) -> dict[str, Any]:
    own = found[model, head]
    fields = checkpoint_facts(model).fields() | {
        "tool": "flyweight",
        "head": head,
        "text": options.text.name,
        "window": options.window,
        "tokens": own.kl.count,
        "kl": own.kl.value,
        "kl_error": own.kl.error,
        "kl_growth": own.kl.value / found[model, "stored"].kl.value - 1,
        "log_ratio": own.loss.value,
        "log_ratio_error": own.loss.error,
    }
    print(model, head, f"KL {own.kl.value:.6f}, {100 * fields['kl_growth']:+.3f} %", flush=True)
    return rounded(fields)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--original", required=True)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--head", nargs="+", default=["int8"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        rows = measure(options)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ResultFile(options.out).append(complete_rows(rows, device))


if __name__ == "__main__":
    main()
