"""How the ranges of a grid are best chosen where there is no calibration: distance from the
original by KL.

    python benchmarks/quality/grid_ranges.py OUT.jsonl --model FOLDER --text wiki.txt c4.txt …
        [--bits 4 3 8] [--group-size 128] [--windows 8]

The weights of all layers are rounded to nearest, symmetrically. Ranges are whole (`minmax`), those
of the least squared error (`squares`, which no scheme takes) or of the least error to the fourth
power (`fourth`, that of `rtn-*`). FOLDER is a model in float32, for the default model its off-grid
copy (offgrid.py). Windows of 512 tokens lie evenly over each text; standard errors are of windows,
and `kl_change` is paired with those of `minmax`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flyweight.bench.facts import checkpoint_facts
from flyweight.bench.rows import ResultFile, rounded
from flyweight.checkpoint.reader import Checkpoint
from flyweight.commands.evaluate import complete_rows
from flyweight.quant.grid import Integers
from flyweight.quant.rtn import rtn
from flyweight.quant.subject import encode

WEIGHT = re.compile(r"\.layers\..*_proj\.weight$")
WINDOW = 512
RANGES = ("minmax", "squares", "fourth")


def rounded_weight(weight: Tensor, ranges: str, settings: dict[str, Any]) -> Tensor:
    if ranges == "squares":  # columns that all count alike
        ones = torch.ones(weight.shape[1], device=weight.device)
        return rtn(weight, Integers(**settings, ranges="importance"), ones).dequantize()
    return rtn(weight, Integers(**settings, ranges=ranges)).dequantize()


def rounded_model(
    source: Path, target: Path, ranges: str, settings: dict[str, Any], device: str
) -> float:
    """Writes the model with rounded weights; returns the relative squared error of the weights."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    errors = []
    for shard in sorted(source.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in filter(WEIGHT.search, tensors):
            before = tensors[name].to(device)
            after = rounded_weight(before, ranges, settings)
            errors.append(float((after - before).square().sum() / before.square().sum()))
            tensors[name] = after.to("cpu", before.dtype).contiguous()
        save_file(tensors, target / shard.name, {"format": "pt"})
    return sum(errors) / len(errors)


def windows_of(checkpoint: Checkpoint, text: Path, count: int) -> list[Tensor]:
    ids, bos = encode(checkpoint.tokenizer(), text.read_text(encoding="utf-8"))
    head = [] if bos is None else [bos]
    step = max(WINDOW, (len(ids) - WINDOW) // count)
    begins = range(0, len(ids) - WINDOW + 1, step)[:count]
    return [torch.tensor([[*head, *ids[begin : begin + WINDOW]]]) for begin in begins]


@torch.inference_mode()
def log_probabilities(folder: Path, windows: list[Tensor], device: str) -> Iterator[Tensor]:
    """[scored tokens, vocabulary] of each window."""
    model = measure.load(Checkpoint(folder), torch.device(device))
    for window in windows:
        logits = model.forward_whole(window.to(device))[0, :-1]
        yield logits.float().log_softmax(-1)


def distances(
    folder: Path, windows: list[Tensor], wanted: list[Tensor], device: str
) -> tuple[Tensor, Tensor]:
    """The KL divergence of each window, and how much more its tokens cost."""
    divergence = []
    change = []
    found = log_probabilities(folder, windows, device)
    for expected, own, window in zip(wanted, found, windows, strict=True):
        tokens = window[0, 1:, None].to(own.device)
        divergence.append((expected.exp() * (expected - own)).sum(-1).double().mean())
        change.append((expected.gather(1, tokens) - own.gather(1, tokens)).double().mean())
    return torch.stack(divergence).cpu(), torch.stack(change).cpu()


def measured(options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """A row for each number of bits, choice of ranges and text."""
    checkpoint = Checkpoint(options.model)
    by_text = [windows_of(checkpoint, text, options.windows) for text in options.text]
    windows = [window for part in by_text for window in part]
    wanted = list(log_probabilities(options.model, windows, options.device))
    for bits in options.bits:
        settings = {"bits": bits, "group_size": options.group_size}
        whole: Tensor | None = None
        for ranges in RANGES:
            folder = scratch / f"{bits}-{ranges}"
            error = rounded_model(options.model, folder, ranges, settings, options.device)
            kl, change = distances(folder, windows, wanted, options.device)
            shutil.rmtree(folder)
            whole = kl if whole is None else whole
            begin = 0
            for text, part in zip(options.text, by_text, strict=True):
                here = slice(begin, begin + len(part))
                begin += len(part)
                tokens = sum(window.shape[1] - 1 for window in part)
                yield {
                    "scheme": f"rtn-int{bits}",
                    **settings,
                    "ranges": ranges,
                    "text": text.name,
                    "weight_error": error,
                    "tokens": tokens,
                } | compared(kl[here], whole[here], change[here])


def compared(kl: Tensor, whole: Tensor, change: Tensor) -> dict[str, float]:
    """The fields of a row that are means over windows."""
    mean = float(whole.mean())
    return {
        "kl": float(kl.mean()),
        "kl_error": measure.standard_error(kl),
        "kl_change": float((kl - whole).mean()) / mean,
        "kl_change_error": measure.standard_error(kl - whole) / mean,
        "log_ratio": float(change.mean()),
        "log_ratio_error": measure.standard_error(change),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    facts = checkpoint_facts(str(options.model)).fields()
    shared = {key: facts[key] for key in ("checkpoint", "weights")} | {
        "model": options.model.name,
        "tool": "flyweight",
        "window": WINDOW,
    }
    rows = []
    with tempfile.TemporaryDirectory(dir=options.out.parent) as scratch:
        for row in measured(options, Path(scratch)):
            rows.append(rounded(shared | row))
            told = f"{row['scheme']} {row['ranges']:8} {row['text']:24} KL {row['kl']:.4f}"
            print(f"{told}, {100 * row['kl_change']:+.1f} %", flush=True)
    ResultFile(options.out).append(complete_rows(rows, torch.device(options.device)))


if __name__ == "__main__":
    main()
