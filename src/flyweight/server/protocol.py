"""The requests of the OpenAI API, with the fields that vLLM, SGLang and their benchmarks add.

Three kinds of fields: those here, which do what they say; those in `NEUTRAL`, which we know and do
not do, accepted only with a value that changes nothing and refused by name otherwise; and unknown
ones, answered with a warning header or, with `--strict`, refused. Nothing that would change an
answer is dropped in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flyweight.engine.request import SamplingParams
from flyweight.errors import unknown
from flyweight.server.counts import (
    FIRST_ERROR,
    LONGEST_NAME,
    LONGEST_STOP,
    MOST_BIAS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_STOP_TOKENS,
    MOST_STOPS,
    MOST_TEMPLATE_ARGUMENTS,
    MOST_TOKENS,
    MOST_TOOLS,
    at_most,
    check_prompt,
    check_stop,
    ignored_fields,
)
from flyweight.server.guided import GuidedFields
from flyweight.server.refusals import BadRequest, UnsupportedField
from flyweight.server.thinking import Effort
from flyweight.server.tools.choice import ToolChoice, read_choice

MOST_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # the API's own default for /v1/completions

NEUTRAL: dict[str, tuple[Any, ...]] = {  # field → the values that change nothing
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "suffix": (None, ""),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "no_stop_trim": (None, False),
    "include_stop_str_in_output": (None, False),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "lora_path": (None, ""),
    "session_params": (None,),
    "min_new_tokens": (None, 0),
    "thinking_token_budget": (None,),
    "include_reasoning": (None, True),
    "guided_whitespace_pattern": (None,),
    "separate_reasoning": (None, True),
    "documents": (None, []),
    "chat_template": (None,),
    "mm_processor_kwargs": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "verbosity": (None, "medium"),
    "store": (None, False),
    "prompt_embeds": (None,),
    "typical_p": (None, 1.0),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0.0),
}
HARMLESS = {  # fields that never change an answer
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "priority",
    "request_id",
    "rid",
    "guided_decoding_backend",
}


class Loose(BaseModel):
    """Unknown fields are kept, to be told about; known ones must be of the right type."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Loose):
    include_usage: bool | None = Field(
        False, description="A last chunk without choices tells the usage."
    )
    continuous_usage_stats: bool | None = Field(
        False, description="Every chunk tells the usage so far."
    )
    include_obfuscation: bool | None = Field(
        False, description="Accepted; chunks are never padded."
    )


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], FIRST_ERROR]
Texts = Annotated[list[str], FIRST_ERROR]
Parts = Annotated[list[dict[str, Any]], FIRST_ERROR, at_most(MOST_PARTS)]
# messages, tools and the like of other APIs
Items = Annotated[list[dict[str, Any]], FIRST_ERROR, at_most(MOST_MESSAGES)]
Prompt = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], FIRST_ERROR], BeforeValidator(check_prompt)
]
Stops = Annotated[str | Texts | None, BeforeValidator(check_stop)]
TemplateArguments = Annotated[dict[str, Any], at_most(MOST_TEMPLATE_ARGUMENTS)]


class SamplingFields(Loose, GuidedFields):
    """What both endpoints take."""

    model: str | None = Field(None, description="A served name; may be left out.")
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(
        None, description="Accepted where it equals n, which changes nothing."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops = Field(
        None,
        description=f"Where the text ends: at most {MOST_STOPS} strings of {LONGEST_STOP} "
        "characters.",
    )
    stop_token_ids: Annotated[TokenIds | None, at_most(MOST_STOP_TOKENS)] = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: Annotated[dict[str, float] | None, at_most(MOST_BIAS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Cached prefixes are shared only with requests that send the same.",
    )
    return_token_ids: bool | None = Field(
        None, description="The token ids of the prompt and of each piece of the answer."
    )

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def endless(self) -> bool:
        """The answer may not end where it wants to, which no grammar can follow."""
        return bool(self.ignore_eos or self.min_tokens)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, *, strict: bool) -> list[str]:
        """The warnings about fields that were ignored; raises for those that may not be."""
        if self.best_of not in (None, self.samples):
            raise UnsupportedField(
                f"best_of is not supported, except where it equals n ({self.samples})",
                param="best_of",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream: true", param="stream_options")
        if self.guide is not None and self.endless:
            raise BadRequest(
                "ignore_eos and min_tokens contradict response_format: a shape ends where it is "
                "complete",
                param="ignore_eos" if self.ignore_eos else "min_tokens",
            )
        extra = dict(self.model_extra or {})
        for name, neutral in NEUTRAL.items():
            if name in extra and extra.pop(name) not in neutral:
                accepted = " or ".join(
                    "null" if value is None else repr(value).lower() for value in neutral
                )
                raise UnsupportedField(
                    f"{name} is not supported and would change the answer; leave it out or send "
                    f"{accepted}",
                    param=name,
                )
        known = [*type(self).model_fields, *NEUTRAL]
        extra |= {
            f"stream_options.{name}": None
            for name in (self.stream_options and self.stream_options.model_extra) or ()
        }
        strangers = [name for name in extra if name not in HARMLESS]
        if not strangers:
            return []
        # The nearest known field of the first only: to look for one costs more than all the rest of
        # a request.
        guess = unknown("field", strangers[0][:LONGEST_NAME], known).split("; known:")[0]
        if strict:
            raise BadRequest(guess, param=strangers[0][:LONGEST_NAME])
        return [f"{guess} (ignored)", *ignored_fields(strangers)[1:]]

    def sampling(self, **more: Any) -> SamplingParams:
        """None leaves a value to the model's own defaults, or to ours."""
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "n",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given |= {"stop": [self.stop] if isinstance(self.stop, str) else self.stop or []}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.logit_bias:
            given["logit_bias"] = bias_by_id(self.logit_bias)
        return SamplingParams(**(given | more))


class CompletionRequest(SamplingFields):
    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = Field(None, description="The prompt comes back before the answer.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="So many of the likeliest tokens, each with its own.",
    )
    add_special_tokens: bool | None = Field(
        None, description="False: a text prompt gets no begin-of-text token."
    )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise BadRequest("the prompt is empty; give a text or token ids", param="prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value, list-item]


class Message(Loose):
    """Further fields (`name`, `tool_calls`, `tool_call_id`, `reasoning_content`) go to the chat
    template.
    """

    role: str = Field(min_length=1, max_length=64)
    content: str | Parts | None = None


class Tool(Loose):
    type: Literal["function"] = "function"
    function: dict[str, Any]


Messages = Annotated[list[Message], FIRST_ERROR, at_most(MOST_MESSAGES)]
Tools = Annotated[list[Tool], FIRST_ERROR, at_most(MOST_TOOLS)]


class ChatFields(Loose):
    """What a chat template takes; /tokenize has it too."""

    messages: Messages = Field(min_length=1)
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    chat_template_kwargs: TemplateArguments | None = Field(
        None, description="Such as enable_thinking for Qwen3."
    )
    reasoning_effort: Effort | None = Field(
        None, description="none, or how hard to think, where the template knows of it."
    )
    enable_thinking: bool | None = Field(None, description="The switch alone.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(SamplingFields, ChatFields):
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31, description="The newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, none, required, or one function by its name."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call in an answer."
    )

    @property
    def shaped(self) -> bool:
        return bool(self.tools) or super().shaped

    @functools.cached_property
    def chosen_tools(self) -> ToolChoice:
        return read_choice(self.tool_choice, [tool.function for tool in self.tools or ()])

    def check(self, *, strict: bool) -> list[str]:
        if self.chosen_tools.mode == "required" and self.endless:
            raise BadRequest(
                "ignore_eos and min_tokens contradict tool_choice: a call ends where it is "
                "complete",
                param="tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise BadRequest(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) are two names of one thing and differ",
                param="max_tokens",
            )
        return super().check(strict=strict)


class TokenizeRequest(Loose):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Loose):
    model: str | None = None
    tokens: Annotated[TokenIds, at_most(MOST_TOKENS)]


def bias_by_id(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise BadRequest(
            f"logit_bias must map token ids to numbers: {error}", param="logit_bias"
        ) from error
