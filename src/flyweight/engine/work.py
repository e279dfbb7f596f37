"""What a request has computed in the next step, and how much a step has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flyweight.engine.request import Request
from flyweight.models.config import ModelConfig
from flyweight.models.rope import long_border


@dataclass(frozen=True)
class StateUse:
    """Slots of the state pool (`states.py`): the state comes from `source` (−1: from nothing) and
    goes to `slot`; once `mark` tokens of the work are in, a copy goes to `mark_slot`, unless `mark`
    is 0.
    """

    source: int
    slot: int
    mark: int = 0
    mark_slot: int = -1


@dataclass(slots=True)  # one for every answer in every step: freezing it would double its cost
class Work:
    """One request's share of a step: `count` tokens from `start` on. Only the last chunk of a
    prompt samples.

    `drafts`: guesses of the tokens to come, the last ones of `count`. The step samples after each
    of them as well, and keeps those that are what it samples itself.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: Sequence[int] = ()
    state: StateUse | None = None  # of models whose layers keep states

    @property
    def known(self) -> int:
        """Tokens that are no guesses."""
        return self.count - len(self.drafts)

    @property
    def outputs(self) -> int:
        """Tokens that are sampled."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass
class Budget:
    """What is left of a step."""

    tokens: int
    prompts: int  # how many of them may be of prompts
    # and of prompts that want logprobs: each token of theirs costs a row of the vocabulary
    logits: int

    def room(self, request: Request) -> int:
        """How many tokens of the request fit."""
        missing = request.missing
        count = min(missing, self.tokens)
        if missing > 1:
            count = min(count, self.prompts)
        if 2 < count == missing - 1:  # a last token by itself would pass for an answer
            count -= 1
        return count if request.params.prompt_logprobs is None else min(count, self.logits)

    def take(self, work: Work) -> None:
        self.tokens -= work.count
        self.prompts -= work.known if work.known > 1 else 0
        self.logits -= 0 if work.request.params.prompt_logprobs is None else work.count


@dataclass(frozen=True)
class LongPrompts:
    """Sequences of more than `border` tokens turn all their keys by other frequencies, which begin
    at `row` of the rope tables. One that grows beyond the border is computed again from its first
    token.
    """

    border: int
    row: int

    def row_of(self, tokens: int) -> int:
        return self.row if tokens > self.border else 0


def long_prompts(config: ModelConfig) -> LongPrompts | None:
    border = long_border(config)
    return None if border is None else LongPrompts(border, config.context_length)
