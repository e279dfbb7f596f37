"""Prompts of every kind, and the parameters that go with each: what a caller of LLM may hand over,
brought into one form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

from flyweight.engine.keywords import refuse_unknown
from flyweight.engine.request import SamplingOptions, SamplingParams
from flyweight.engine.tokenizer import Message
from flyweight.errors import RequestError

Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids, or a conversation

SAMPLING = [field.name for field in fields(SamplingParams)]


@dataclass(frozen=True)
class Prepared:
    """A prompt of any kind, ready for the engine."""

    text: str | None
    tokens: list[int]
    params: SamplingParams
    adapter: str | None = None


def one_of(params: SamplingParams | None, sampling: SamplingOptions) -> SamplingParams:
    """The parameters of one prompt, however they were told."""
    refuse_unknown(sampling, [*SAMPLING, "chat_template_kwargs", "adapter"])
    if params is None:
        return SamplingParams(**sampling)
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params must be SamplingParams, not {type(params).__name__}; or give "
            "keywords, such as max_tokens=5"
        )
    if sampling:
        raise RequestError(
            f"{next(iter(sampling))} is given beside params; put it into the "
            "SamplingParams, or give keywords only"
        )
    return params


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, sampling: SamplingOptions, count: int
) -> list[SamplingParams | None]:
    """One for each prompt; None where only keywords tell."""
    if params is None or isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        one_of(params, sampling)  # refused before any prompt is looked at
        return [params] * count
    if len(params) != count:
        raise RequestError(f"there are {count} prompts but {len(params)} sampling parameters")
    return list(params)


def adapter_of_each(adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise RequestError(f"there are {count} prompts but {len(adapter)} adapters")
    return list(adapter)


def check_served(finish_reason: str | None, stop_reason: str | int | None) -> None:
    """A step fails in the thread that makes it; whoever waits in another must hear of it too."""
    if finish_reason == "failed":
        raise RequestError(f"the step that served this request failed: {stop_reason}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one: text, numbers and messages are no lists of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
