"""Requests to /api/chat and /api/generate, and the chats they stand for."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from flyweight.server.as_chat import as_chat
from flyweight.server.counts import FIRST_ERROR, MOST_MESSAGES, at_most, ignored_fields
from flyweight.server.protocol import ChatRequest, Items, Loose, Texts, TokenIds
from flyweight.server.refusals import UnsupportedField

OPTIONS = {  # their name → ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_tokens",
}
# options that would change an answer → the values that change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mirostat": (None, 0),
    "typical_p": (None, 1.0),
    "tfs_z": (None, 1.0),
}
SERVERS = {  # what the one who starts the server decides
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "num_keep",
    "f16_kv",
    "vocab_only",
    "repeat_last_n",
    "penalize_newline",
    "mirostat_tau",
    "mirostat_eta",
}


class OllamaFields(Loose):
    model: str = Field(description="A served name, with or without :latest.")
    stream: bool | None = Field(
        None, description="Lines of JSON while the answer comes; on unless false."
    )
    format: str | dict[str, Any] | None = Field(None, description="json, or a JSON schema.")
    options: dict[str, Any] | None = Field(
        None, description="temperature, num_predict, seed, stop and so on."
    )
    think: bool | str | None = Field(
        None, description="Whether, or how hard, to think, where the model's template can."
    )
    keep_alive: float | str | None = Field(
        None, description="Accepted; the server decides what stays loaded."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaMessage(Loose):
    role: str = Field(min_length=1, max_length=64)
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = None
    tool_calls: Items | None = None


class OllamaChat(OllamaFields):
    messages: Annotated[list[OllamaMessage], FIRST_ERROR, at_most(MOST_MESSAGES)] = Field(
        [], description="The conversation."
    )
    tools: Items | None = Field(None, description="Functions that the model may call.")


class OllamaGenerate(OllamaFields):
    prompt: str = Field("", description="A text; empty asks whether the model is there.")
    system: str | None = Field(None, description="Instructions before the prompt.")
    images: Texts | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = Field(None, description="The prompt as it is, without the chat template.")
    context: TokenIds | None = None


class ShowRequest(Loose):
    model: str = Field("", description="A served name.")
    name: str | None = Field(None, description="The older name of `model`.")
    verbose: bool | None = None


def chat_of(body: OllamaChat) -> tuple[ChatRequest, list[str]]:
    fields, warnings = common_fields(body)
    fields["messages"] = [message_of(message) for message in body.messages]
    fields["tools"] = body.tools or None
    return as_chat(fields), warnings


def generate_of(body: OllamaGenerate) -> tuple[ChatRequest, list[str]]:
    for name in ("suffix", "template", "context", "images"):
        if getattr(body, name):
            raise UnsupportedField(
                f"{name} is not supported and would change the answer; leave it out", param=name
            )
    fields, warnings = common_fields(body)
    fields["messages"] = [{"role": "user", "content": body.prompt}]
    if body.system:
        fields["messages"].insert(0, {"role": "system", "content": body.system})
    return as_chat(fields), warnings


def common_fields(body: OllamaFields) -> tuple[dict[str, Any], list[str]]:
    if body.logprobs or body.top_logprobs:
        raise UnsupportedField(
            "logprobs are not supported here; /v1/chat/completions gives them", param="logprobs"
        )
    fields: dict[str, Any] = {"model": served_name(body.model), "stream": body.stream is not False}
    warnings = ignored_fields(body.model_extra or {})
    strangers: list[str] = []
    for name, value in (body.options or {}).items():
        if name in OPTIONS:
            fields[OPTIONS[name]] = value
        elif name in NEUTRAL and value not in NEUTRAL[name]:
            raise UnsupportedField(
                f"options.{name} is not supported and would change the answer", param="options"
            )
        elif name not in NEUTRAL and name not in SERVERS:
            strangers.append(name)
    warnings += ignored_fields(strangers, "option")
    limit = fields.get("max_tokens")
    if isinstance(limit, int) and limit < 0:  # their word for: as long as it takes
        del fields["max_tokens"]
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["enable_thinking"] = body.think
    fields |= format_fields(body.format)
    return fields, warnings


def format_fields(form: str | dict[str, Any] | None) -> dict[str, Any]:
    if not form:
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    return {"guided_json": form}


def message_of(message: OllamaMessage) -> dict[str, Any]:
    if message.images:
        raise UnsupportedField(
            "images are not supported: this model reads text only", param="messages"
        )
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            call_of(number, call) for number, call in enumerate(message.tool_calls)
        ]
    extra = message.model_extra or {}
    if "tool_name" in extra:
        plain["name"] = extra["tool_name"]
    return plain


def call_of(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Their calls have no ids; some templates want one of nine letters."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise UnsupportedField("a tool call needs a function", param="messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call.get("id") or f"call{number:05d}",
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def served_name(name: str) -> str:
    return name.removesuffix(":latest")
