"""How good a quantized folder is: perplexity by window, KL divergence and top-1 agreement with the
original.

Windows run in batches, the same for every model, and their losses are kept, so that any two models
can be compared pair by pair. KL and agreement are of every scored token. Products are float32's
own, or TF32's where that is asked for: several times as fast, the same for the original and for
what is compared with it, and said in the rows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import exl3
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.summary import summarize
from flyweight.models.decoder import Decoder
from flyweight.quant.evaluate import Window, cut_windows
from flyweight.quant.subject import encode

WINDOW = 512
LOGITS = 2**30  # bytes of logits that a batch may take: vocabularies differ by ten


class Ruler:
    """The original model, one text in its tokens, and what it makes of it."""

    def __init__(self, original: Original, text: Path, *, windows: int | None = None) -> None:
        self.original, self.device, self.text = original, original.device, text.name
        folder, self.bos = original.folder, None
        kept = folder.with_name(
            f"{folder.name}-{text.stem}-{windows or 'all'}-{original.products}.safetensors"
        )
        with FileLock(f"{kept}.lock"):  # one worker measures the original, the others wait for it
            if not kept.exists():
                self.read_text(text, windows)
                self.measure_original(kept)
        with safe_open(kept, framework="pt") as file:
            self.windows, self.bos = unpack_windows(
                file.get_tensor("windows"), int(file.get_tensor("bos"))
            )
            # by batch
            self.losses = [file.get_tensor(f"losses-{i}") for i in range(len(file.keys()) - 2)]

    def read_text(self, text: Path, windows: int | None) -> None:
        ids, self.bos = encode(
            self.original.checkpoint.tokenizer(), text.read_text(encoding="utf-8")
        )
        self.windows = cut_windows(ids, window=WINDOW, bos=self.bos)[:windows]

    def measure_original(self, kept: Path) -> None:
        """Its losses, and the tokens beside them: to cut a text into tokens takes as long as to
        judge it.
        """
        found = {
            "windows": pack_windows(self.windows),
            "bos": torch.tensor(-1 if self.bos is None else self.bos),
        }
        for i, (ids, scored) in enumerate(self.batches()):
            logits = self.original.logits(ids, scored)
            found[f"losses-{i}"] = torch.stack(
                [
                    losses_of(torch.log_softmax(one, -1), line, scored)
                    for one, line in zip(logits, ids, strict=True)
                ]
            ).cpu()
        half = kept.with_suffix(".half")
        save_file(found, half)
        half.rename(kept)  # whole or not there: a run may be cut off here

    def batches(self) -> Iterator[tuple[Tensor, int]]:
        """(tokens [windows, length], scored tokens of each); a window that is shorter
        comes alone.
        """
        most = max(1, LOGITS // (4 * WINDOW * self.original.model.config.vocab_size))
        size, begin = min(most, 8 if self.device.type == "cuda" else 2), 0
        while begin < len(self.windows):
            same = [
                w
                for w in self.windows[begin : begin + size]
                if len(w.tokens) == len(self.windows[begin].tokens)
                and w.scored == self.windows[begin].scored
            ]
            yield (
                torch.tensor([window.tokens for window in same], device=self.device),
                same[0].scored,
            )
            begin += len(same)

    def measure(self, checkpoint: Checkpoint, model: Decoder) -> dict[str, Any]:
        """The fields of a `quality` row that depend on the model."""
        started = time.perf_counter()
        losses, same, divergence = [], [], []
        for ids, scored in self.batches():
            pairs = zip(
                self.original.logits(ids, scored), logits_of(model, ids, scored), ids, strict=True
            )
            for expected, found, line in pairs:  # one window at a time: a vocabulary can be large
                expected, found = torch.log_softmax(expected, -1), torch.log_softmax(found, -1)
                losses.append(losses_of(found, line, scored))
                same.append((found.argmax(-1) == expected.argmax(-1)).double().mean())
                divergence.append((expected.exp() * (expected - found)).sum(-1).double().mean())
        # only now: a device that is asked at every window waits for the next one
        losses = [line.cpu() for line in losses]
        facts = self.facts(losses) | facts_of(checkpoint)
        before = [line for part in self.losses for line in part]
        change = torch.stack([(a - b).mean() for a, b in zip(losses, before, strict=True)])
        return facts | {
            "perplexity_original": math.exp(float(torch.cat(before).mean())),
            "kl": float(torch.stack(divergence).mean()),
            "kl_error": standard_error(torch.stack(divergence)),
            "kl_windows": len(divergence),
            "window_kls": [round(one, 6) for one in torch.stack(divergence).tolist()],
            "top1_agreement": float(torch.stack(same).mean()),
            "log_ratio": float(change.mean()),
            "log_ratio_error": standard_error(change),
            "seconds": round(time.perf_counter() - started, 3),
        }

    def facts(self, losses: list[Tensor] | None = None) -> dict[str, Any]:
        """Perplexity, its standard error from window to window, and the losses [scored] of the
        windows themselves.
        """
        found = [line for part in self.losses for line in part] if losses is None else losses
        by_window = torch.stack([line.mean() for line in found])
        value = math.exp(float(torch.cat(found).mean()))
        return {
            "perplexity": value,
            "perplexity_error": value * standard_error(by_window),
            "text": self.text,
            "window": WINDOW,
            "bos": self.bos is not None,
            "tokens": sum(len(line) for line in found),
            "dtype": self.original.products,
            "kv_dtype": "float32",
            "window_losses": [round(loss, 6) for loss in by_window.tolist()],
        }


def pack_windows(windows: Sequence[Window]) -> Tensor:
    """[windows, 1 + most tokens]: how many are scored, the tokens, −1 behind the last."""
    most = max(len(window.tokens) for window in windows)
    return torch.tensor([[w.scored, *w.tokens, *[-1] * (most - len(w.tokens))] for w in windows])


def unpack_windows(packed: Tensor, bos: int) -> tuple[list[Window], int | None]:
    windows = [
        Window([token for token in row[1:] if token >= 0], row[0]) for row in packed.tolist()
    ]
    return windows, None if bos < 0 else bos


class Original:
    """The model that all are compared with; `products` is float32 or tf32."""

    def __init__(self, folder: Path, *, device: str, products: str = "float32") -> None:
        set_products(products)
        self.folder, self.products, self.device = folder, products, torch.device(device)
        self.checkpoint = Checkpoint(folder)
        self.model = load(self.checkpoint, self.device)

    def logits(self, ids: Tensor, scored: int) -> Tensor:
        return logits_of(self.model, ids, scored)


def measure_folder(rulers: Sequence[Ruler], folder: Path) -> list[dict[str, Any]]:
    """One quantized model on every text."""
    original = rulers[0].original
    set_products(original.products)
    checkpoint = Checkpoint(folder)
    model = load(checkpoint, original.device)
    return [ruler.measure(checkpoint, model) for ruler in rulers]


def set_products(products: str) -> None:
    """Whatever a peer has set: float32, with TF32's products or without."""
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high"}[products])
    torch.set_default_dtype(torch.float32)


def load(checkpoint: Checkpoint, device: torch.device) -> Decoder:
    return Decoder.load(checkpoint, device=device, dtype=torch.float32, exact=True)


@torch.no_grad()
def logits_of(model: Decoder, ids: Tensor, scored: int) -> Tensor:
    """[windows, scored, vocabulary]"""
    return model.forward_whole(ids)[:, -scored - 1 : -1]


def losses_of(found: Tensor, ids: Tensor, scored: int) -> Tensor:
    """Negative log-likelihoods [scored] of one window, float64."""
    return -found.gather(1, ids[-scored:, None])[:, 0].double()


def standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    spelled_out = checkpoint.folder / exl3.STORED  # and what the tool's own file would take
    if spelled_out.exists():
        return {"checkpoint": checkpoint.hash(), **json.loads(spelled_out.read_text())}
    linears = [group for group in summarize(checkpoint).groups if group.layers]
    bits = 8 * sum(group.nbytes for group in linears) / sum(group.parameters for group in linears)
    return {
        "checkpoint": checkpoint.hash(),
        "size_gb": round(checkpoint.nbytes / 1e9, 4),
        "bits_per_weight": round(bits, 4),
    }
