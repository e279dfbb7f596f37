"""What is asked: conversations of one or more turns, of random token ids or of people's texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flyweight.bench.arrivals import Arrival
from flyweight.bench.timing import random_prompts, seed_from
from flyweight.errors import OptionError

BLOCK = 512  # tokens that one hash of a Mooncake trace stands for


@dataclass(frozen=True)
class Turn:
    """Token ids, or the user's text; `output` tokens are wanted."""

    prompt: tuple[int, ...] | str
    output: int


@dataclass(frozen=True)
class Conversation:
    """Turns follow one another, each with all that came before; `arrival` (open loop) is of the
    first.
    """

    turns: tuple[Turn, ...]
    arrival: float | None = None

    @property
    def longest(self) -> int:
        """Tokens in the end; texts are counted at a token for every two letters, which is more than
        they have.
        """
        return sum(
            (len(turn.prompt) if not isinstance(turn.prompt, str) else len(turn.prompt) // 2 + 32)
            + turn.output
            for turn in self.turns
        )


@dataclass(frozen=True)
class RandomIds:
    """Lengths vary evenly by ± `spread` of themselves; the first `prefix` tokens are the same for
    all.
    """

    vocabulary: int
    input: int
    output: int
    spread: float = 0.0
    prefix: int = 0
    turns: int = 1
    seed: int = 0

    def make(self, count: int) -> list[Conversation]:
        draw = random.Random(seed_from(self.seed, "lengths"))
        shared = random_prompts(
            1, self.prefix, vocabulary=self.vocabulary, seed=seed_from(self.seed, "prefix")
        )[0]
        return [
            Conversation(
                tuple(
                    self._turn(draw, index, turn, shared if turn == 0 else [])
                    for turn in range(self.turns)
                )
            )
            for index in range(count)
        ]

    def _turn(self, draw: random.Random, index: int, turn: int, shared: list[int]) -> Turn:
        inputs, outputs = (
            max(1, round(mean * draw.uniform(1 - self.spread, 1 + self.spread)))
            for mean in (self.input, self.output)
        )
        ids = random_prompts(
            1, inputs, vocabulary=self.vocabulary, seed=seed_from(self.seed, index, turn)
        )[0]
        return Turn((*shared, *ids), outputs)


def from_trace(
    arrivals: Sequence[Arrival], *, vocabulary: int, seed: int = 0
) -> list[Conversation]:
    """Random ids of the trace's lengths; prompts that shared a block in the trace share its ids
    here.
    """
    found = []
    for index, one in enumerate(arrivals):
        ids = [
            token
            for block in one.blocks
            for token in random_prompts(
                1, BLOCK, vocabulary=vocabulary, seed=seed_from(seed, "block", block)
            )[0]
        ][: one.input]
        ids += random_prompts(
            1, one.input - len(ids), vocabulary=vocabulary, seed=seed_from(seed, index)
        )[0]
        found.append(Conversation((Turn(tuple(ids), one.output),), one.time))
    return found


def read_conversations(
    path: Path, *, output: int, count: int | None = None, seed: int = 0
) -> list[Conversation]:
    """ShareGPT-like (`conversations` or `messages`), MT-bench (`turns`) or `prompt` lines; shuffled
    by the seed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        rows = (
            json.loads(text)
            if whole
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
        found = [
            Conversation(tuple(Turn(said, output) for said in said_by_user(row))) for row in rows
        ]
    except FileNotFoundError:
        raise OptionError(f"--dataset {path}: no such file; `random` needs none") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"--dataset {path}: not a file of conversations ({error})") from error
    found = [one for one in found if one.turns]
    if not found:
        raise OptionError(
            f"--dataset {path}: no line has conversations, messages, turns or a prompt"
        )
    random.Random(seed).shuffle(found)
    return [found[index % len(found)] for index in range(count or len(found))]


def said_by_user(row: dict[str, Any]) -> list[str]:
    if "turns" in row:
        return [str(turn) for turn in row["turns"]]
    if "prompt" in row:
        return [str(row["prompt"])]
    messages = row.get("conversations") or row.get("messages") or []
    return [
        str(one.get("value", one.get("content")))
        for one in messages
        if one.get("from", one.get("role")) in ("human", "user")
    ]


def schedule(conversations: Sequence[Conversation], times: Sequence[float]) -> list[Conversation]:
    return [replace(one, arrival=time) for one, time in zip(conversations, times, strict=True)]
