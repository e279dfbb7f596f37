"""A request to /v1/messages, and the chat it stands for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from flyweight.server.as_chat import as_chat
from flyweight.server.counts import FIRST_ERROR, MOST_MESSAGES, MOST_TOOLS, at_most, ignored_fields
from flyweight.server.protocol import ChatRequest, Loose, Parts, Stops
from flyweight.server.refusals import BadRequest, UnsupportedField

HARMLESS = {
    "metadata",
    "service_tier",
    "container",
    "context_management",
    "mcp_servers",
    "betas",
    "inference_geo",
}
Content = str | Parts


class AnthropicMessage(Loose):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Loose):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class Thinking(Loose):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountRequest(Loose):
    """What a prompt is made of."""

    model: str | None = Field(None, description="A served name; may be left out.")
    messages: Annotated[list[AnthropicMessage], FIRST_ERROR, at_most(MOST_MESSAGES)] = Field(
        min_length=1, description="Texts, calls of tools and their results."
    )
    system: Content | None = Field(None, description="Instructions before the conversation.")
    tools: Annotated[list[AnthropicTool], FIRST_ERROR, at_most(MOST_TOOLS)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description="auto, any, none, or tool with a name."
    )
    thinking: Thinking | None = Field(
        None, description="Switches thinking on or off where the model's template can."
    )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=2**31, description="Most tokens of the answer.")
    stop_sequences: Stops = Field(None, description="The answer ends before the first of these.")
    stream: bool | None = Field(None, description="Events while the answer comes.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    output_config: dict[str, Any] | None = Field(
        None, description="effort, and format with a JSON schema."
    )


def chat_of(body: CountRequest) -> tuple[ChatRequest, list[str]]:
    """(the same as a chat request, warnings about what was passed over)."""
    fields: dict[str, Any] = {"model": body.model, "messages": messages_of(body)}
    if body.tools:
        fields["tools"] = [tool_of(tool) for tool in body.tools]
        fields |= choice_of(body.tool_choice)
    warnings = ignored_fields(name for name in body.model_extra or {} if name not in HARMLESS)
    if body.thinking is not None:
        fields["enable_thinking"] = body.thinking.type != "disabled"
        if body.thinking.budget_tokens is not None:
            warnings.append("thinking.budget_tokens is not enforced (ignored)")
    if isinstance(body, MessagesRequest):
        fields |= sampling_of(body)
    return as_chat(fields), warnings


def sampling_of(body: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    config = body.output_config or {}
    if form := config.get("format"):
        if (
            not isinstance(form, dict)
            or form.get("type") != "json_schema"
            or not isinstance(form.get("schema"), dict)
        ):
            raise BadRequest(
                "output_config.format is a json_schema with a schema", param="output_config"
            )
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form["schema"]},
        }
    if effort := config.get("effort"):
        fields["reasoning_effort"] = effort
    return fields


def tool_of(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedField(
            f"tools of type {tool.type!r} are not supported: this server runs none of its own",
            param="tools",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def choice_of(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    wanted: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in wanted:
        raise BadRequest(
            f"tool_choice is of type auto, any, tool or none, not {kind!r}", param="tool_choice"
        )
    return {
        "tool_choice": wanted[kind],
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }


def messages_of(body: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(assistant_message(message.content))
        else:
            messages += user_messages(message.content, message.role)
    return messages


def assistant_message(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += field_of(block, "text")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + field_of(
                block, "thinking"
            )
        elif kind == "tool_use":
            function = {
                "name": field_of(block, "name"),
                "arguments": json.dumps(block.get("input") or {}),
            }
            calls.append({"id": field_of(block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise unsupported(kind)
    return message | ({"tool_calls": calls} if calls else {})


def user_messages(blocks: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, in the order they stand in."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": field_of(block, "text")})
            else:
                messages[-1]["content"] += "\n" + field_of(block, "text")
        elif kind == "tool_result":
            content = text_of(block.get("content") or "", "tool_result")
            if block.get("is_error"):
                content = f"Error: {content}"
            messages.append(
                {"role": "tool", "tool_call_id": field_of(block, "tool_use_id"), "content": content}
            )
        else:
            raise unsupported(kind)
    return messages


def text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"the content of {where} is a text or a list of blocks", param="messages")
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise unsupported(block.get("type") if isinstance(block, dict) else block)
    return "\n".join(field_of(block, "text") for block in content)


def field_of(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(
            f"a block of type {block.get('type')!r} needs {name!r}, a text", param="messages"
        )
    return value


def unsupported(kind: Any) -> UnsupportedField:
    return UnsupportedField(
        f"content of type {kind!r} is not supported: this model reads text only", param="messages"
    )
