"""A case is one variant of a model on one backend: loaded when there is work for it, its failures
turned into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flyweight.backends.base import Backend, EngineOptions, Limits, create
from flyweight.bench.facts import ModelFacts, Variant, facts_of, served_facts
from flyweight.bench.rows import Row
from flyweight.clock import clock
from flyweight.errors import (
    FlyweightError,
    MissingPackageError,
    OptionError,
    ResourceError,
    UnsupportedError,
    unknown,
)

Listen = Callable[[str], None]
SAMPLING: dict[str, Callable[[str], Any]] = {  # what --sampling takes
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
Result = TypeVar("Result")


@dataclass(eq=False)
class Case:
    facts: ModelFacts
    backend: Backend
    label: str  # of the backend, with the options that were given
    gpus: int = 1
    model: str = ""  # as it was given; a server may call it by another name
    fault: Row | None = None  # why it does not run: status and reason
    running: bool = False
    checked: Row = field(default_factory=dict)  # what the comparison of greedy tokens gave
    start_s: float | None = None  # of its latest start

    @property
    def sampling(self) -> str:
        """How tokens are chosen, as it was asked for; empty: greedily."""
        return describe_sampling(self.backend.options)

    @property
    def title(self) -> str:
        return f"{self.facts.model} {self.facts.scheme} on {self.label}"

    def key(self) -> Row:
        """What identifies its rows, before anything is loaded."""
        facts = {name: getattr(self.facts, name) for name in ("model", "scheme", "checkpoint")}
        return facts | {"backend": self.label, "gpus": self.gpus} | self._sampled()

    def fields(self) -> Row:
        return (
            self.facts.fields()
            | {"backend": self.label, "kv_dtype": self.backend.kv_dtype, "gpus": self.gpus}
            | self._sampled()
            | self._kernels()
        )

    def _kernels(self) -> Row:
        """Whose kernels multiplied, where an engine runs several parties'."""
        found = getattr(self.backend, "linear_kernels", None)
        return {"linear_kernels": found} if found else {}

    def _sampled(self) -> Row:
        return {"sampling": self.sampling} if self.sampling else {}

    def start(self, limits: Limits, listen: Listen) -> None:
        listen(f"loading {self.title}")
        begin = clock()
        self.fault = attempt(lambda: self.backend.start(limits))[1]
        self.start_s = clock() - begin
        self.running = self.fault is None

    def stop(self) -> None:
        if self.running:
            self.backend.stop()
        self.running = False


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Row | None]:
    """(result, None) or (None, status and reason): a sweep goes on when one of its cells fails, and
    the row says why.
    """
    try:
        return action(), None
    except Exception as error:
        status = (
            "skipped"
            if isinstance(error, (UnsupportedError, MissingPackageError))
            else "oom"
            if is_out_of_memory(error)
            else "failed"
        )
        kind = "" if isinstance(error, FlyweightError) else f"{type(error).__name__}: "
        return None, {
            "status": status,
            "reason": kind + (str(error).strip().split("\n")[0] or "no message"),
        }


def is_out_of_memory(error: Exception) -> bool:
    return (
        isinstance(error, ResourceError)
        or type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in str(error)
    )


def make_cases(
    variants: Sequence[str],
    backends: Sequence[str],
    options: EngineOptions,
    *,
    name: str | None = None,
) -> list[Case]:
    """Every variant on every backend; the first case is the baseline. An engine that is not
    installed ends it here.
    """
    described = describe(options)
    cases, seen = [], set()
    for text in variants:
        variant = Variant.parse(text)
        facts = (
            facts_of(variant, model=name)
            if set(backends) != {"openai"}
            else served_facts(variant, model=name)
        )
        for backend in backends:
            label = f"{backend} ({described})" if described else backend
            case = Case(
                facts,
                create(backend, variant.model, options),
                label,
                options.tensor_parallel,
                variant.model,
            )
            if tuple(case.key().values()) in seen:
                raise OptionError(
                    f"two variants would be called {facts.scheme!r} on {label}; "
                    f"name them: NAME=MODEL"
                )
            seen.add(tuple(case.key().values()))
            cases.append(case)
    return cases


def describe(options: EngineOptions) -> str:
    """Options that change what is measured, for the backend's name in the rows."""
    given = {"dtype": options.dtype, **options.extra, **options.sampling}
    parts = [options.quantization] if options.quantization else []
    return ", ".join(
        parts + [f"{name}={value}" for name, value in given.items() if value is not None]
    )


def describe_sampling(options: EngineOptions) -> str:
    return ",".join(f"{name}={value}" for name, value in options.sampling.items())


def parse_sampling(text: str | None) -> dict[str, Any]:
    """ "temperature=0.7,top_p=0.9" → fields of SamplingParams, checked; a temperature of 1 where
    none is given.
    """
    from flyweight.engine.request import SamplingParams

    found: dict[str, Any] = {}
    for pair in (text or "").split(",") if text else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in SAMPLING:
            raise OptionError(unknown("part of --sampling", name, SAMPLING))
        try:
            found[name] = SAMPLING[name](value)
        except ValueError:
            raise OptionError(f"--sampling {pair.strip()}: {name}=NUMBER is wanted") from None
    if found:
        found = {"temperature": 1.0} | found
        SamplingParams(**found)
    return found
