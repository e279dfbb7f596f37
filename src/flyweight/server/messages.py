"""What the server and its engine process say to each other: commands one way, one `Step` for every
step the other way.

They are small plain records, pickled over a socket pair that nobody else can reach. A step's deltas
travel as bare tuples of their first fields, because at 64 streams their pickling would otherwise
show in the step time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from flyweight.engine.request import SamplingParams, TokenLogprob

# finish reasons beside the engine's own; the stop reason then is a message
REFUSED, FAILED = "refused", "failed"


@dataclass(frozen=True)
class Submit:
    key: int  # chosen by the server; every Delta of the answer carries it
    prompt: list[int]
    params: SamplingParams
    # JSON schema or another grammar that the answer must fit (engine/grammar_kinds.py)
    schema: str | None = None
    pooling: str | None = None  # mean or last: no answer is wanted but the prompt's vector
    cache_salt: str | None = None  # whose prefixes it may share
    adapter: str | None = None  # its name


@dataclass(frozen=True)
class Cancel:
    key: int


@dataclass(frozen=True)
class ResetPrefixCache:
    pass


@dataclass(frozen=True)
class Ping:
    """Changes nothing; like every command it is followed by a `Step`, which shows that the engine
    lives.
    """


class Delta(NamedTuple):
    """What one step added to one sample of one prompt."""

    key: int
    sample: int  # which of the prompt's n
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    started: float | None = None  # with a sample's first token: when it left the queue
    cached: int = 0  # with a sample's first token: prompt tokens from the prefix cache
    # with the first token, where they were asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: list[float] | None = None  # alone, where a vector was asked for
    drafted: int = 0  # with a sample's last token: guesses of its tokens that were checked
    accepted: int = 0  # and how many of them were right


class Load(NamedTuple):
    """How busy the engine is after a step."""

    steps: int
    running: int
    waiting: int
    free_blocks: int
    blocks: int
    preemptions: int  # so far
    drafted: int = 0  # guesses of a drafter, so far
    accepted: int = 0  # of those, the right ones


@dataclass(frozen=True)
class Step:
    # `time.perf_counter` at its end; the clock is the machine's, so both processes read the same
    time: float
    # each a Delta, or its first fields where the others have their defaults
    said: list[tuple[Any, ...]]
    load: Load

    @property
    def deltas(self) -> list[Delta]:
        return [Delta(*fields) for fields in self.said]


@dataclass(frozen=True)
class Started:
    """Loaded and warm. `facts` are what the start-up message, /v1/models and the limits are made
    of.
    """

    facts: dict[str, Any]


@dataclass(frozen=True)
class CannotStart:
    message: str


@dataclass(frozen=True)
class Alive:
    """A step takes long, and gets on."""


@dataclass(frozen=True)
class Hung:
    """The last word of an engine whose step does not end."""

    message: str
