"""What a model knows of its own answers, kept on the device for whoever learns it (train_head.py).

The model runs over every answer once. Of each place stay what a head reads (hidden states), the
model's likeliest tokens behind it with their probabilities, and which one it would say. Sequences
lie on shelves by their length, filled up with zeros: every batch of a shelf has one shape, so a
step of training can be captured once and replayed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from drafter_answers import Answers
from torch import Tensor

from flyweight.models.decoder import Decoder

LENGTHS = (32, 64, 128, 192, 256, 320, 384, 512, 768, 1024)
LIKELIEST = 32  # tokens whose probabilities are learned
AT_ONCE = 8192  # tokens that the model runs over


@dataclass(frozen=True, eq=False)
class Shelf:
    """Sequences of at most `length` tokens."""

    length: int
    tokens: Tensor  # int64 [sequences, length]
    states: Tensor  # [sequences, length, places · width]; of no width where nobody reads them
    best: Tensor  # int64 [sequences, length]: what the model says next
    likely: Tensor  # int64 [sequences, length, LIKELIEST]: tokens behind each place
    shares: Tensor  # [sequences, length, LIKELIEST]: their probabilities
    spans: list[tuple[int, int]]  # of the answers


@dataclass(frozen=True, eq=False)
class Batch:
    """Some places of some sequences of a shelf."""

    shelf: Shelf
    rows: Tensor  # int64 [sequences]
    places: Tensor  # int64 [places]: sequence of the batch · length + place
    counts: Tensor  # float [places]: 0 where there were not so many


@torch.inference_mode()
def shelves_of(target: Decoder, answers: Answers) -> list[Shelf]:
    """With the states that the model's steps leave (models/taps.py), if any."""
    of_length: dict[int, Answers] = {}
    for answered in answers:
        length = next((size for size in LENGTHS if size >= len(answered.tokens)), None)
        if length is not None:
            of_length.setdefault(length, []).append(answered)
    return [_shelf(target, length, of_length[length]) for length in sorted(of_length)]


def _shelf(target: Decoder, length: int, answers: Answers) -> Shelf:
    tokens = torch.zeros(len(answers), length, dtype=torch.int64)
    for row, answered in enumerate(answers):
        tokens[row, : len(answered.tokens)] = torch.tensor(answered.tokens)
    tokens = tokens.to(target.device)
    parts: list[tuple[Tensor, ...]] = []
    for some in tokens.split(max(1, AT_ONCE // length)):
        logits = target.forward_whole(some)
        best = logits.argmax(-1)
        likely = logits.topk(min(LIKELIEST, logits.shape[-1]), -1)
        shares = (likely.values - logits.logsumexp(-1, keepdim=True)).exp()
        states = some.new_empty(*some.shape, 0, dtype=target.dtype)
        if target.taps is not None:
            states = target.taps.states.clone()
        parts.append((states, best, likely.indices, shares.to(target.dtype)))
    states, best, ids, shares = (torch.cat(column) for column in zip(*parts, strict=True))
    spans = [(len(one.prompt), len(one.tokens)) for one in answers]
    # clones are tensors that training may keep
    lasting = [part.clone() for part in (tokens, states, best, ids, shares)]
    return Shelf(length, *lasting, spans)


def batches(
    shelves: Sequence[Shelf], tokens: int, ahead: int, device: torch.device, first: int = 0
) -> Iterator[Batch]:
    """Forever, of so many tokens each, in an order of its own for each round, from batch number
    `first` on. Places that count have `ahead` guesses and the token behind them in the answer.
    """
    groups: list[tuple[Shelf, list[int]]] = []
    for shelf in shelves:
        count = len(shelf.spans)
        rows = min(count, max(1, tokens // shelf.length))
        order = list(range(count))
        random.Random(shelf.length).shuffle(order)
        groups += [
            (shelf, [order[(begin + i) % count] for i in range(rows)])
            for begin in range(0, count, rows)
        ]
    for number in itertools.count(first):
        chance = random.Random(number // len(groups))
        order = list(range(len(groups)))
        chance.shuffle(order)
        shelf, chosen = groups[order[number % len(groups)]]
        yield batch_of(shelf, chosen, ahead, device, random.Random(number))


def batch_of(
    shelf: Shelf, rows: Sequence[int], ahead: int, device: torch.device, chance: random.Random
) -> Batch:
    """Half as many places as the batch has, of those that count."""
    length = shelf.length
    found: list[int] = []
    for i, row in enumerate(rows):
        begin, end = shelf.spans[row]
        found += range(i * length + begin - 1, i * length + end - 1 - ahead)
    most = max(1, len(rows) * length // 2)
    if len(found) > most:
        found = chance.sample(found, most)
    counts = [1.0] * len(found) + [0.0] * (most - len(found))
    places = found + [0] * (most - len(found))

    def moved(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        made = torch.tensor(values, dtype=dtype)
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made

    return Batch(
        shelf, moved(rows, torch.int64), moved(places, torch.int64), moved(counts, torch.float32)
    )
