"""Perplexity: how well a model predicts a text, exp of the mean negative log-likelihood of its tokens.

    text      │ w i n d o w │                      stride = window: every token but each window's first is
              │             │ w i n d o w │        scored, once, with what stands before it in its window
    stride =  │ w i n d o w │
    window/2        │ . . . s c o r e d │          smaller: later windows score only their last `stride` tokens,
                          │ . . . s c o r e d │    so each has at least window − stride tokens before it

A model whose tokenizer begins texts with a BOS token sees one at the beginning of every window (as an addition to
it, never scored). The number depends on all three, so a result states them.
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


def cut_windows(tokens: Sequence[int], *, window: int, stride: int | None = None, bos: int | None = None) -> list[Window]:
    stride = stride or window
    if window < 2 or not 0 < stride <= window:
        raise OptionError(f"a window of {window} and a stride of {stride} do not fit: 2 ≤ window, 1 ≤ stride ≤ window")
    head = [] if bos is None else [bos]
    windows, done = [], 0
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


def token_losses(model: WholeModel, windows: Sequence[Window], *, batch: int = 1) -> Iterator[Tensor]:
    """The negative log-likelihood of each scored token, [scored] float64 for each window; equal windows run together."""
    i = 0
    while i < len(windows):
        j = i + 1
        while j < len(windows) and j - i < batch and len(windows[j].tokens) == len(windows[i].tokens):
            j += 1
        ids = torch.tensor([window.tokens for window in windows[i:j]], device=model.device)
        logits = model.forward_whole(ids)
        for row, window in enumerate(windows[i:j]):
            rows = logits[row, -window.scored - 1 : -1]
            losses = torch.nn.functional.cross_entropy(rows.float(), ids[row, -window.scored :], reduction="none")
            yield losses.double().cpu()
        i = j


def perplexity(model: WholeModel, tokens: Sequence[int], *, window: int = 512, stride: int | None = None, bos: int | None = None,
               batch: int = 1, progress: Callable[[int, int, float], None] | None = None) -> Perplexity:
    """`progress` is called with (tokens scored, tokens in all, perplexity so far) after each window."""
    windows = cut_windows(tokens, window=window, stride=stride, bos=bos)
    total = sum(item.scored for item in windows)
    begin, count, mean, squares = time.perf_counter(), 0, 0.0, 0.0
    for losses in token_losses(model, windows, batch=batch):
        # Chan's update: exact however many tokens there are.
        n, part = len(losses), float(losses.mean())
        squares += float(((losses - part) ** 2).sum()) + (part - mean) ** 2 * count * n / (count + n)
        mean += (part - mean) * n / (count + n)
        count += n
        if progress:
            progress(count, total, math.exp(mean))
    error = math.exp(mean) * math.sqrt(squares / max(count - 1, 1) / count)
    return Perplexity(math.exp(mean), error, count, window, stride or window, bos is not None, time.perf_counter() - begin)
