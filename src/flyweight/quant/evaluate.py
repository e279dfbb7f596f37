"""Perplexity: how well a model predicts a text, exp of the mean negative log-likelihood of its
tokens; and agreement: how close a quantized model stays to its original, token by token.

    text      │ w i n d o w │                      stride = window: every token but each window's
              │             │ w i n d o w │        first is scored, once, with what stands before it
                                                   in its window
    stride =  │ w i n d o w │
    window/2        │ . . . s c o r e d │          smaller: later windows score only their last
                          │ . . . s c o r e d │    `stride` tokens, so each has at least window −
                                                   stride tokens before it

A model whose tokenizer begins texts with a BOS token sees one at the beginning of every window (as
an addition to it, never scored). The number depends on all three, so a result states them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flyweight.errors import OptionError


class WholeModel(Protocol):
    """The part of `models.decoder.Decoder` used here."""

    device: torch.device

    def forward_whole(self, tokens: Tensor) -> Tensor: ...


class Remembered:
    """A model on a CPU whose logits are kept, so that several others can be compared with it; up to
    `ROOM` bytes of them.
    """

    ROOM = 1 << 30

    def __init__(self, model: WholeModel) -> None:
        self.model = model
        self.device = model.device
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def forward_whole(self, tokens: Tensor) -> Tensor:
        if self.device.type != "cpu" or len(tokens) != 1:
            return self.model.forward_whole(tokens)
        key = tuple(tokens[0].tolist())
        if key in self.kept:
            return self.kept[key]
        logits = self.model.forward_whole(tokens)
        if logits.nbytes + sum(kept.nbytes for kept in self.kept.values()) <= self.ROOM:
            self.kept[key] = logits
        return logits


@dataclass(frozen=True)
class Window:
    tokens: list[int]
    scored: int  # how many of its last tokens count


@dataclass(frozen=True)
class Perplexity:
    perplexity: float
    error: float  # standard error, taking the tokens' losses as independent
    tokens: int  # scored
    window: int
    stride: int
    bos: bool
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def cut_windows(
    tokens: Sequence[int], *, window: int, stride: int | None = None, bos: int | None = None
) -> list[Window]:
    stride = stride or window
    if window < 2 or not 0 < stride <= window:
        raise OptionError(
            f"a window of {window} and a stride of {stride} do not fit: 2 ≤ window, "
            "1 ≤ stride ≤ window"
        )
    head = [] if bos is None else [bos]
    windows = []
    done = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        part = [*head, *tokens[begin:end]]
        scored = min(end - done, len(part) - 1)  # nothing stands before the very first token
        if scored > 0:
            windows.append(Window(part, scored))
        done = end
        if end == len(tokens):
            break
    if not windows:
        raise OptionError(f"a text of {len(tokens)} tokens is too short to be scored")
    return windows


def token_losses(
    model: WholeModel, windows: Sequence[Window], *, batch: int = 1
) -> Iterator[Tensor]:
    """The negative log-likelihood of each scored token, [scored] float64 for each window; equal
    windows run together.
    """
    i = 0
    while i < len(windows):
        j = i + 1
        while (
            j < len(windows) and j - i < batch and len(windows[j].tokens) == len(windows[i].tokens)
        ):
            j += 1
        ids = torch.tensor([window.tokens for window in windows[i:j]], device=model.device)
        logits = model.forward_whole(ids)
        for row, window in enumerate(windows[i:j]):
            rows = logits[row, -window.scored - 1 : -1]
            losses = torch.nn.functional.cross_entropy(
                rows.float(), ids[row, -window.scored :], reduction="none"
            )
            yield losses.double().cpu()
        i = j


@dataclass(frozen=True)
class Agreement:
    """How far a model's predictions are from those of the original it was made from, at every
    scored token.
    """

    # mean Kullback-Leibler divergence from the original's distribution to this one, in nats
    kl: float
    kl_error: float  # its standard error
    top1: float  # share of tokens where both find the same next token likeliest
    log_ratio: float  # mean difference of the losses: log of the ratio of the perplexities
    log_ratio_error: float  # its standard error, paired token by token


class Mean:
    """Mean and standard error of values that come in pieces: Chan's update, exact however many
    there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0
        self.squares = 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        n = len(values)
        part = float(values.mean())
        self.squares += float(((values - part) ** 2).sum()) + (
            part - self.value
        ) ** 2 * self.count * n / (self.count + n)
        self.value += (part - self.value) * n / (self.count + n)
        self.count += n

    @property
    def error(self) -> float:
        return math.sqrt(self.squares / max(self.count - 1, 1) / self.count)


def perplexity(
    model: WholeModel,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    bos: int | None = None,
    batch: int = 1,
    progress: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """`progress` is called with (tokens scored, tokens in all, perplexity so far) after each
    window.
    """
    windows = cut_windows(tokens, window=window, stride=stride, bos=bos)
    total = sum(item.scored for item in windows)
    begin = time.perf_counter()
    mean = Mean()
    for losses in token_losses(model, windows, batch=batch):
        mean.add(losses)
        if progress:
            progress(mean.count, total, math.exp(mean.value))
    return _perplexity(mean, window, stride, bos, time.perf_counter() - begin)


def _perplexity(
    mean: Mean, window: int, stride: int | None, bos: int | None, seconds: float
) -> Perplexity:
    value = math.exp(mean.value)
    return Perplexity(
        value, value * mean.error, mean.count, window, stride or window, bos is not None, seconds
    )


def compare(
    original: WholeModel,
    model: WholeModel,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    bos: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[Perplexity, Agreement]:
    """The perplexity of `model`, and its agreement with `original`, both run side by side on every
    window.
    """
    windows = cut_windows(tokens, window=window, stride=stride, bos=bos)
    total = sum(item.scored for item in windows)
    begin = time.perf_counter()
    losses = Mean()
    divergence = Mean()
    same = Mean()
    ratio = Mean()
    for item in windows:
        ids = torch.tensor([item.tokens], device=model.device)
        wanted = ids[0, -item.scored :, None]
        expected, found = (
            torch.log_softmax(each.forward_whole(ids)[0, -item.scored - 1 : -1].float(), -1)
            for each in (original, model)
        )
        loss = -found.gather(1, wanted)[:, 0]
        loss_before = -expected.gather(1, wanted)[:, 0]
        losses.add(loss.cpu())
        ratio.add((loss - loss_before).cpu())
        expected, found = on_shared(expected, found)
        divergence.add((expected.exp() * (expected - found)).sum(1).cpu())
        same.add((expected.argmax(1) == found.argmax(1)).cpu())
        if progress:
            progress(losses.count, total, math.exp(losses.value))
    agreement = Agreement(divergence.value, divergence.error, same.value, ratio.value, ratio.error)
    return _perplexity(losses, window, stride, bos, time.perf_counter() - begin), agreement


def on_shared(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [tokens, vocabulary] of the same tokens: models of one family may pad their
    vocabularies to different sizes, and only one of them knows what stands behind the other's end.
    """
    if first.shape == second.shape:
        return first, second
    shared = min(first.shape[1], second.shape[1])
    one, other = (torch.log_softmax(each[:, :shared], -1) for each in (first, second))
    return one, other
