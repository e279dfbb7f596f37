"""What a request wants of its tools: which may be called, and whether one must be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyweight.errors import unknown
from flyweight.server.counts import MOST_TOOLS
from flyweight.server.refusals import BadRequest, UnsupportedField

NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class ToolChoice:
    mode: str  # none, auto or required
    tools: list[dict[str, Any]] = field(default_factory=list)  # those that may be called


def read_choice(
    choice: str | Mapping[str, Any] | None, functions: Sequence[dict[str, Any]]
) -> ToolChoice:
    """`functions` are the tools as the API describes them."""
    tools = {check_name(function): function for function in functions}
    if len(tools) < len(functions) or len(tools) > MOST_TOOLS:
        raise BadRequest(
            f"tools must be at most {MOST_TOOLS}, and no two of one name", param="tools"
        )
    if choice is None:
        choice = "auto" if tools else "none"
    if choice in ("auto", "none"):
        return ToolChoice(str(choice) if tools else "none", list(tools.values()))
    if not tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return ToolChoice("required", list(tools.values()))
    if not isinstance(choice, Mapping):
        raise BadRequest(
            f"tool_choice is auto, none, required or a function, not {choice!r}",
            param="tool_choice",
        )
    return choice_of_some(choice, tools)


def choice_of_some(choice: Mapping[str, Any], tools: Mapping[str, dict[str, Any]]) -> ToolChoice:
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise BadRequest(
                "allowed_tools needs a mode (auto or required) and tools", param="tool_choice"
            )
        return ToolChoice(mode, [find(named(item), tools) for item in listed])
    if choice.get("type", "function") != "function":
        raise UnsupportedField(
            f"tool_choice of type {choice.get('type')!r} is not supported", param="tool_choice"
        )
    return ToolChoice("required", [find(named(choice), tools)])


def named(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest(
            "tool_choice names a function: {'type': 'function', 'function': {'name': …}}",
            param="tool_choice",
        )
    return name


def find(name: str, tools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in tools:
        raise BadRequest(unknown("function", name, tools), param="tool_choice")
    return tools[name]


def check_name(function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest("a tool has a name of letters, digits, _ . : / and -", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise BadRequest(f"the parameters of {name} are a JSON schema, an object", param="tools")
    return name
