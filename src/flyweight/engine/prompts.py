"""Prompts of every kind, and the parameters that go with each: what a caller of LLM may hand over,
brought into one form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from flyweight.engine.keywords import refuse_unknown
from flyweight.engine.request import SamplingOptions, SamplingParams
from flyweight.engine.tokenizer import Message, Tokenizer
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


@dataclass(frozen=True)
class PromptReader:
    """Prompts of one model → token ids, with sampling as its files ask for where callers do not."""

    model: str
    tokenizer: Tokenizer | None
    sampling_defaults: Mapping[str, Any]
    context: int
    may_grow: bool  # whether the model is made for a longer context

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sampling: SamplingOptions,
        template: Mapping[str, Any] | None,
        adapter: str | None = None,
    ) -> Prepared:
        """With complete parameters. `sampling`: by keywords, instead of `params`."""
        text, tokens = self.encode(prompt, template)
        chosen = one_of(params, sampling)
        given = params is not None or "max_tokens" in sampling
        complete = chosen.with_defaults(self.sampling_defaults)
        return Prepared(text, tokens, self._fit(tokens, complete, given), adapter)

    def encode(
        self, prompt: Prompt, template: Mapping[str, Any] | None
    ) -> tuple[str | None, list[int]]:
        """The text, where there is one, and its token ids."""
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return None, list(cast(Sequence[int], prompt))
        if self.tokenizer is None:
            raise RequestError(f"{self.model} has no tokenizer; give the prompt as token ids")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        text = self.tokenizer.render_chat(cast(Sequence[Message], prompt), **(template or {}))
        return text, self.tokenizer.encode(text, special=False)

    def _fit(self, tokens: list[int], params: SamplingParams, given: bool) -> SamplingParams:
        """An answer that the context cannot hold is refused, unless its length is the default."""
        context = self.context
        room = context - len(tokens)
        if params.max_tokens is None or params.max_tokens <= room:
            return params
        if room < 1:  # the engine says that the prompt alone is too long
            return params
        if not given:
            return replace(params, max_tokens=room)
        more = ", or raise max_model_len" if self.may_grow else ""
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens asks for {params.max_tokens} "
            f"more, but the context holds {context}; ask for at most {room}{more}"
        )
