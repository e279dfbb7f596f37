"""A request to /v1/responses, and the chat it stands for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from flyweight.server.as_chat import as_chat
from flyweight.server.counts import ignored_fields
from flyweight.server.protocol import ChatRequest, Items, Loose
from flyweight.server.refusals import BadRequest, UnsupportedField

HARMLESS = {
    "metadata",
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "include",
    "stream_options",
    "client_metadata",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # field → the values that change nothing
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "max_tool_calls": (None,),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "context_management": (None,),
}
TEXTS = {"input_text", "output_text", "text"}
SYSTEM = {"developer": "system"}  # role → what chat templates call it


class Reasoning(Loose):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Loose):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Loose):
    model: str | None = Field(None, description="A served name; may be left out.")
    input: str | Items = Field(
        description="A text, or items: messages, calls of functions and their outputs."
    )
    instructions: str | None = Field(
        None, description="Before the conversation; not kept for the next response."
    )
    previous_response_id: str | None = Field(
        None, description="Goes on after that response, if it is still in memory."
    )
    store: bool | None = Field(None, description="False: not kept for later.")
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = Field(None, description="Events while the answer comes.")
    tools: Items | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, none, required, or one function by its name."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call in an answer."
    )
    reasoning: Reasoning | None = Field(
        None, description="effort, where the model's template knows of it."
    )
    text: TextOptions | None = Field(None, description="format: text, json_object or json_schema.")


def chat_of(body: ResponsesRequest, before: list[dict[str, Any]]) -> tuple[ChatRequest, list[str]]:
    """(the same as a chat request, warnings); `before` are the messages of the response this one
    goes on after.
    """
    extra = dict(body.model_extra or {})
    for name, neutral in NEUTRAL.items():
        if name in extra and extra.pop(name) not in neutral:
            raise UnsupportedField(
                f"{name} is not supported and would change the answer; leave it out", param=name
            )
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": all_messages(body, before),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": format_of(body.text.format if body.text else None),
    }
    if body.tools:
        fields["tools"] = [tool_of(tool) for tool in body.tools]
        fields["tool_choice"] = body.tool_choice
    return as_chat(fields), ignored_fields(name for name in extra if name not in HARMLESS)


def all_messages(body: ResponsesRequest, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = [*before, *new_messages(body)]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    while len(messages) > 1 and messages[0]["role"] == messages[1]["role"] == "system":
        # most templates take one, at the beginning
        joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        messages[:2] = [{"role": "system", "content": joined}]
    return messages


def new_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """What this request adds to the conversation."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for item in body.input:
        add_item(messages, item)
    if not messages:
        raise BadRequest("the input is empty; give a text or items", param="input")
    return messages


def add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = text_field(item, "role")
        messages.append({"role": SYSTEM.get(role, role), "content": text_of(item.get("content"))})
    elif kind == "function_call":
        function = {"name": text_field(item, "name"), "arguments": text_field(item, "arguments")}
        call = {"id": text_field(item, "call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": text_field(item, "call_id"),
                "content": text_of(item.get("output")),
            }
        )
    elif kind != "reasoning":  # what a model thought before is not told to it again
        raise UnsupportedField(f"input items of type {kind!r} are not supported", param="input")


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("the content of an input item is a text or a list of parts", param="input")
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") not in TEXTS
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UnsupportedField(
                f"content of type {kind!r} is not supported: this model reads text only",
                param="input",
            )
    return "\n".join(part["text"] for part in content)


def text_field(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(
            f"an input item of type {item.get('type', 'message')!r} needs {name!r}, a text",
            param="input",
        )
    return value


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedField(
            f"tools of type {tool.get('type')!r} are not supported: this server runs none of its "
            "own",
            param="tools",
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def format_of(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Their json_schema stands beside its type, not below it."""
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    return {
        "type": "json_schema",
        "json_schema": {name: form[name] for name in names if form.get(name) is not None},
    }
