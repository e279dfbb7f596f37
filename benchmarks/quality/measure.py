"""How good a quantized folder is: perplexity by window, KL divergence and top-1 agreement with the original, in float32.

Windows run in batches, the same for every model, and their losses are kept, so that any two models can be compared pair
by pair. KL needs the whole distribution of the original: every `KL_EVERY`th batch is enough for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.summary import summarize
from flyweight.models.decoder import Decoder
from flyweight.quant.evaluate import cut_windows
from flyweight.quant.subject import encode

WINDOW = 512
KL_EVERY = 4


class Ruler:
    """The original model, the text in its tokens, and what it makes of it."""

    def __init__(self, original: Path, text: Path, *, device: str, windows: int | None = None) -> None:
        exact_float32()
        self.checkpoint, self.device, self.text = Checkpoint(original), torch.device(device), text.name
        ids, self.bos = encode(self.checkpoint.tokenizer(), text.read_text(encoding="utf-8"))
        self.windows = cut_windows(ids, window=WINDOW, bos=self.bos)[:windows]
        self.model = load(self.checkpoint, self.device)
        kept = original.with_name(f"{original.name}-{text.stem}-{len(self.windows)}.safetensors")
        with FileLock(f"{kept}.lock"):  # one worker measures the original, the others wait for it
            if not kept.exists():
                self.measure_original(kept)
        with safe_open(kept, framework="pt") as file:
            count = len(file.keys()) // 2
            self.losses = [file.get_tensor(f"losses-{i}") for i in range(count)]  # by batch
            self.best = [file.get_tensor(f"best-{i}").to(self.device) for i in range(count)]

    def measure_original(self, kept: Path) -> None:
        found = {}
        for i, (ids, scored) in enumerate(self.batches()):
            logs = predictions(self.model, ids, scored)
            found |= {f"losses-{i}": losses_of(logs, ids, scored), f"best-{i}": logs.argmax(-1).int().cpu()}
        save_file(found, kept)

    def batches(self) -> Iterator[tuple[Tensor, int]]:
        """(tokens [windows, length], scored tokens of each); a window that is shorter comes alone."""
        size, begin = (8 if self.device.type == "cuda" else 2), 0
        while begin < len(self.windows):
            same = [w for w in self.windows[begin : begin + size] if len(w.tokens) == len(self.windows[begin].tokens)
                    and w.scored == self.windows[begin].scored]
            yield torch.tensor([window.tokens for window in same], device=self.device), same[0].scored
            begin += len(same)

    def measure(self, folder: Path) -> dict[str, Any]:
        """The fields of a `quality` row that depend on the model."""
        started = time.perf_counter()
        exact_float32()
        checkpoint = Checkpoint(folder)
        model, losses, same, divergence = load(checkpoint, self.device), [], [], []
        for number, (ids, scored) in enumerate(self.batches()):
            found = predictions(model, ids, scored)
            losses.append(losses_of(found, ids, scored))
            same.append((found.argmax(-1) == self.best[number]).double().mean(1))
            if number % KL_EVERY == 0:
                expected = predictions(self.model, ids, scored)
                divergence.append((expected.exp() * (expected - found)).sum(-1).double().mean(1))
        facts = self.facts(losses) | facts_of(checkpoint)
        change = torch.cat([(a - b).mean(1) for a, b in zip(losses, self.losses, strict=True)])
        return facts | {
            "perplexity_original": math.exp(float(torch.cat([part.flatten() for part in self.losses]).mean())),
            "kl": float(torch.cat(divergence).mean()), "kl_error": standard_error(torch.cat(divergence)),
            "kl_windows": sum(len(part) for part in divergence), "top1_agreement": float(torch.cat(same).mean()),
            "log_ratio": float(change.mean()), "log_ratio_error": standard_error(change),
            "seconds": round(time.perf_counter() - started, 3)}

    def facts(self, losses: list[Tensor] | None = None) -> dict[str, Any]:
        """Perplexity, its standard error from window to window, and the losses themselves."""
        found = self.losses if losses is None else losses
        flat, by_window = torch.cat([part.flatten() for part in found]), torch.cat([part.mean(1) for part in found])
        value = math.exp(float(flat.mean()))
        return {"perplexity": value, "perplexity_error": value * standard_error(by_window), "text": self.text, "window": WINDOW,
                "bos": self.bos is not None, "tokens": flat.numel(), "dtype": "float32", "kv_dtype": "float32",
                "window_losses": [round(loss, 6) for loss in by_window.tolist()]}


def exact_float32() -> None:
    """Whatever a peer has set: float32, and no TF32."""
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)


def load(checkpoint: Checkpoint, device: torch.device) -> Decoder:
    return Decoder.load(checkpoint, device=device, dtype=torch.float32, exact=True)


@torch.no_grad()
def predictions(model: Decoder, ids: Tensor, scored: int) -> Tensor:
    """Log-probabilities [windows, scored, vocabulary]."""
    return torch.log_softmax(model.forward_whole(ids)[:, -scored - 1 : -1], -1)


def losses_of(found: Tensor, ids: Tensor, scored: int) -> Tensor:
    """Negative log-likelihoods [windows, scored], float64."""
    return -found.gather(2, ids[:, -scored:, None])[..., 0].double().cpu()


def standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    linears = [group for group in summarize(checkpoint).groups if group.layers]
    bits = 8 * sum(group.nbytes for group in linears) / sum(group.parameters for group in linears)
    return {"checkpoint": checkpoint.hash(), "size_gb": round(checkpoint.nbytes / 1e9, 4), "bits_per_weight": round(bits, 4)}
