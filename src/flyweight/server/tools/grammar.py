"""Grammars for answers with tool calls: what comes before a call is free, the call itself fits the
tool's schema.

    start:  thinking? (TEXT | TEXT opening calls)   tool_choice auto: after the opening only a call
    start:  thinking? opening calls                 required, or by name

Where a marker such as `<tool_call>` is one token, free text cannot hold it; elsewhere a lazy rule
ends the text at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flyweight.engine.grammar_kinds import ANY_TEXT, json_rule, lark_grammar, quoted
from flyweight.server.reasoning import CLOSE as THOUGHT
from flyweight.server.reasoning import OPEN as THINK
from flyweight.server.words import Words

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class JSONArguments:
    """What formats share that write the arguments of a call as JSON."""

    def argument_rules(
        self, name: str, schema: dict[str, Any], words: Words, *, strict: bool
    ) -> list[str]:
        return [f"{name}: {json_rule(schema, lenient=not strict)}"]


class ToolFormat(Protocol):
    @property
    def opening(self) -> str | None:
        """Before the first call; None: a call is the whole answer."""

    @property
    def parallel(self) -> bool:
        """Whether the model's template knows of several calls in one message."""

    def argument_rules(
        self, name: str, schema: dict[str, Any], words: Words, *, strict: bool
    ) -> list[str]:
        """The rule `name`, of the arguments of one function, and those that it needs."""

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        """One call of a function; `arguments` is the rule of its arguments."""

    def after_opening(self, words: Words, *, many: bool) -> str:
        """Calls, up to the end of the answer."""


@dataclass(frozen=True)
class Thinking:
    """Whether the answer may begin with thinking, and whether the prompt has begun it already."""

    possible: bool
    begun: bool


def object_rule(name: str, key: str, arguments: str) -> str:
    """A call as a JSON object; `arguments` is the rule of its value."""
    before = f'{{"name": {quoted(name)}, "{key}": '
    return f'{quoted(before)} {arguments} "}}"'


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[dict[str, Any]],
    words: Words,
    *,
    thinking: Thinking,
    required: bool,
    many: bool,
    answer: str | None = None,
) -> str:
    """`tools` are functions as the API describes them; `answer` is the rule of an answer that is no
    call, free text if None.
    """
    rules = [ANY_TEXT, *call_rules(form, tools, words)]
    rules.append(f"calls: {form.after_opening(words, many=many)}")
    if required:
        opening = words.literal(form.opening) if form.opening else ""
        body = f"{opening} calls"
    elif answer is not None:
        rules.append(f"answer: {answer}")
        opening = words.literal(form.opening) if form.opening else ""
        body = f"(answer | {opening} calls)"
    else:
        body = free_text_or_calls(form, tools, words, rules)
    return lark_grammar(with_thinking(body, rules, words, thinking))


def call_rules(form: ToolFormat, tools: Sequence[dict[str, Any]], words: Words) -> list[str]:
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        schema = tool.get("parameters") or NO_ARGUMENTS
        rules.append(f"call_{number}: {form.call_rule(tool['name'], f'arguments_{number}', words)}")
        rules += form.argument_rules(
            f"arguments_{number}", schema, words, strict=bool(tool.get("strict"))
        )
    return rules


def free_text_or_calls(
    form: ToolFormat, tools: Sequence[dict[str, Any]], words: Words, rules: list[str]
) -> str:
    if form.opening is None:
        # Text is whatever does not begin as a call of one of the tools does.
        begins = "|".join(escaped(f'{{"name": {quoted(tool["name"])}') for tool in tools)
        rules.append(rf"OTHER: /(.|\n)*/ & ~/({begins})(.|\n)*/")
        return "(OTHER | calls)"
    until, needed = words.until(form.opening, "until_call")
    rules += needed
    return f"(TEXT | {until} calls)"


def with_thinking(body: str, rules: list[str], words: Words, thinking: Thinking) -> str:
    """A whole grammar: its start, and the rules it needs."""
    rules = list(rules)
    start = body
    if thinking.possible or thinking.begun:
        thought, needed = words.until(THOUGHT, "until_thought")
        rules += needed
        rules.append(rf"thinking: {'' if thinking.begun else words.literal(THINK)} {thought} /\n*/")
        start = f"thinking {body}" if thinking.begun else f"thinking? {body}"
    if ANY_TEXT not in rules:
        rules.append(ANY_TEXT)
    return "\n".join([f"start: {start}", *rules])


def escaped(text: str) -> str:
    """For a regular expression between slashes: every character that is no letter, digit or space
    stands for itself.
    """
    return "".join(char if char.isalnum() or char in ' _"' else f"\\{char}" for char in text)
