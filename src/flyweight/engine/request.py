"""What a caller asks for and gets: SamplingParams in, Chunks while it runs, Outputs at the end.

A `Request` is one sequence in flight: n samples of one prompt are n requests that share the
prompt's cache blocks. It is plain Python, so that the scheduler can be tested without a model.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy

from flyweight.engine.keywords import checked
from flyweight.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

LIMITS: dict[str, tuple[float, float]] = {  # field → (least, most) allowed, both included
    "max_tokens": (1, 2**31),
    "min_tokens": (0, 2**31),
    "temperature": (0, 100),
    "top_k": (0, 2**31),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logprobs": (0, 1000),
    "prompt_logprobs": (0, 1000),
    "n": (1, 1024),
}
MOST_BIAS = 1e9
# below it the likeliest token always wins, and dividing by it could overflow
LEAST_TEMPERATURE = 1e-5
WHOLE = {"max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "n", "seed"}


@checked("sampling parameter", RequestError)
@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. None for temperature, top_k, top_p or repetition_penalty: as the
    model's generation_config says.

    The filters act in this order: penalties and bias, temperature, top_k, top_p, min_p. Logprobs
    are those of the model itself, before any of them.
    """

    max_tokens: int | None = 256  # None: until the context is full
    temperature: float | None = None  # 0: always the likeliest token
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float = 0.0  # relative to the likeliest token
    # > 1 divides the logits of tokens seen in prompt or answer
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0  # subtracted once for tokens seen in the answer
    frequency_penalty: float = 0.0  # subtracted for each time a token was seen in the answer
    seed: int | None = None  # None: drawn from the engine's own seed
    stop: Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0  # no end-of-text and no stop token before so many
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        for item in dataclasses.fields(self):
            check_field(item.name, getattr(self, item.name))
        if self.temperature is not None and self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
            )

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill what the caller left open: from the model's generation_config, then
        plain sampling.
        """
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        chosen = {
            name: defaults.get(name, value)
            for name, value in plain.items()
            if getattr(self, name) is None
        }
        return dataclasses.replace(self, **chosen)


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of a call, for type checkers; a test keeps the two
    alike.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    logit_bias: Mapping[int, float]


def is_bias(value: Any) -> bool:
    """Whether it can be added to a logit: no NaN, and nothing that float32 cannot hold."""
    return isinstance(value, (int, float)) and -MOST_BIAS <= value <= MOST_BIAS


def check_field(name: str, value: Any) -> None:
    if name in ("stop", "stop_token_ids"):
        kind: type = str if name == "stop" else int
        if bad := [item for item in value if not isinstance(item, kind) or item == ""]:
            raise RequestError(
                f"{name} must hold {'non-empty strings' if kind is str else 'token ids'}, not "
                f"{bad[0]!r}"
            )
        return
    if name == "logit_bias" and not all(
        isinstance(key, int) and is_bias(bias) for key, bias in value.items()
    ):
        raise RequestError(
            f"logit_bias must map token ids to numbers up to {MOST_BIAS:g}, not {value!r}"
        )
    if value is None or name in ("ignore_eos", "logit_bias"):
        return
    whole = name in WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise RequestError(
            f"{name} must be a {'whole number' if whole else 'number'}, not {value!r}"
        )
    least, most = LIMITS.get(name, (-(2**63), 2**64))
    if not least <= value <= most:
        raise RequestError(f"{name} must lie between {least:g} and {most:.10g}, not {value}")


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: dict[int, float]  # the likeliest tokens of that position


@dataclass(frozen=True)
class Timing:
    """Seconds of `time.perf_counter`. Chunks are (time, number of tokens), in the order
    they came.
    """

    arrival: float
    chunks: tuple[tuple[float, int], ...]

    @property
    def first_token(self) -> float | None:
        return self.chunks[0][0] if self.chunks else None

    @property
    def finished(self) -> float | None:
        return self.chunks[-1][0] if self.chunks else None


@dataclass(frozen=True)
class Completion:
    """One finished sample. `finish_reason` is stop (end of text or a stop word), length or
    cancelled.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None  # the stop string or token id that ended it
    logprobs: list[TokenLogprob] | None
    timing: Timing
    cached_tokens: int  # prompt tokens that came from the prefix cache
    drafted_tokens: int = 0  # guesses of a drafter (engine/speculation/)
    accepted_tokens: int = 0  # of those, the right ones: they came without a step of their own


@dataclass(frozen=True)
class Output:
    """The answer to one prompt; the shortcuts speak of its first sample."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None  # the first token has none

    @classmethod
    def of(cls, prompt: str | None, tokens: list[int], requests: Sequence[Request]) -> Output:
        """Of requests that are over, or as far as they have come."""
        wanted = bool(requests) and requests[0].params.prompt_logprobs is not None
        return cls(
            prompt,
            tokens,
            [request.completion() for request in requests],
            (requests[0].prompt_logprobs or [None]) if wanted else None,
        )

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason


@dataclass(slots=True)
class Chunk:
    """What one step added to one sample: whole characters only, so `text` may be empty."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Constraint:
    """What may come next, step by step."""

    def allowed(self, generated: Sequence[int]) -> Tensor | None:
        """Bool [vocabulary] on the CPU, given every token so far; None: anything."""
        raise NotImplementedError

    @classmethod
    def masks(
        cls, asked: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> Sequence[numpy.ndarray | None]:
        """The same for constraints of this class, each with its tokens so far: uint8, a bit a
        token, the lowest first. A step asks for all of a class at once.
        """
        found = (constraint.allowed(generated) for constraint, generated in asked)
        return [
            None if mask is None else numpy.packbits(mask.numpy(), bitorder="little")
            for mask in found
        ]


@dataclass(eq=False)
class Request:
    """One sequence in flight. The scheduler owns `state`, `rope_row`, `blocks`, `digests`,
    `registered`, `computed`, `state_slot` and `state_source`.
    """

    number: int  # by arrival, the order of service
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # most tokens, prompt included
    index: int = 0  # which of the n samples
    # only requests of one salt share cache blocks; None shares with nobody
    salt: bytes | None = b""
    end_ids: frozenset[int] = frozenset()  # tokens that end the text
    listener: Callable[[Chunk], None] | None = None
    constraint: Constraint | None = None  # such as a grammar: its steps wait for the token before
    adapter: int = -1  # the slot of its adapter; -1 (`batch.NOBODY`): none
    arrival: float = field(default_factory=time.perf_counter)

    tokens: list[int] = field(default_factory=list)  # prompt, then what was generated and read
    pending: int = 0  # tokens that steps in flight sample: on the device, not yet in `tokens`
    state: State = State.WAITING
    computed: int = 0  # tokens whose K and V are in the cache
    cached: int | None = None  # prompt tokens found in the prefix cache when first scheduled
    started: float | None = None  # when it was first scheduled
    rope_row: int = 0  # of the rope tables, where its first token is
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full blocks, in order
    registered: int = 0  # blocks that the pool knows by their digests
    state_slot: int = -1  # of the state pool, where layers keep states
    state_source: int = -1  # where its next tokens find their state; -1: it is zero
    preemptions: int = 0
    drafted: int = 0  # tokens that a drafter guessed
    accepted: int = 0  # of those, the right ones

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def length(self) -> int:
        """Of the whole sequence, with what is sampled but not read."""
        return len(self.tokens) + self.pending

    @property
    def missing(self) -> int:
        """Tokens still to be computed before the next can be sampled; 1 while decoding."""
        return self.length - self.computed

    @property
    def complete(self) -> bool:
        """Every token it may have is sampled, though perhaps not read."""
        return self.length >= self.limit

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def completion(self) -> Completion:
        return Completion(
            index=self.index,
            text=self.text,
            token_ids=self.tokens[len(self.prompt) :],
            finish_reason=self.finish_reason or "cancelled",
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            timing=Timing(self.arrival, tuple(self.chunks)),
            cached_tokens=self.cached or 0,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
