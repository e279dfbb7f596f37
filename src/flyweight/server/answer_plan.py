"""What a chat request means for the grammar that holds its answer, and for whoever reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flyweight.engine.grammar_kinds import lark_grammar
from flyweight.errors import FlyweightError
from flyweight.server.guided import Guide
from flyweight.server.reader import MessageReader
from flyweight.server.reasoning import ReasoningSplitter
from flyweight.server.refusals import BadRequest
from flyweight.server.tools import FORMATS, Format
from flyweight.server.tools.choice import ToolChoice
from flyweight.server.tools.grammar import Thinking, tool_grammar, with_thinking
from flyweight.server.tools.harmony import Harmony
from flyweight.server.words import Words


@dataclass(frozen=True)
class AnswerPlan:
    """How one chat answer is held to its shape, and how it is read."""

    grammar: str | None
    thinking: Thinking
    form: Format | None = None  # None: nothing is looked for
    tools: Mapping[str, Any] = field(default_factory=dict)  # the schema of each by its name
    warnings: list[str] = field(default_factory=list)

    def reader(self) -> MessageReader:
        splitter = ReasoningSplitter(inside=self.thinking.begun) if self.thinking.possible else None
        return MessageReader(splitter, self.form.parser(self.tools) if self.form else None)


def plan_answer(
    choice: ToolChoice,
    guide: Guide | None,
    words: Words,
    *,
    form: Format | None,
    thinking: Thinking,
    parallel: bool,
    free: bool,
) -> AnswerPlan:
    """`free`: the request forbids the answer to end by itself, so that no grammar can hold it."""
    warnings: list[str] = []
    if isinstance(form, Harmony):
        return in_channels(form, choice, guide, words, thinking=thinking, free=free)
    if choice.mode == "none":
        return AnswerPlan(guided(guide, words, thinking), thinking)
    required = choice.mode == "required"
    if form is None and required:
        form = FORMATS["llama"]("")  # plain JSON: the grammar makes any model write it
    if form is None:
        warnings.append(
            "this model's chat template is of no format of tool calls that is known: they come "
            "back as text; the server's --tool-parser names one"
        )
        return AnswerPlan(guided(guide, words, thinking), thinking, warnings=warnings)
    if guide is not None and guide.rule is None and not required:
        raise BadRequest(
            "a grammar or a structural tag cannot be combined with tools; use JSON, regex or "
            "choice",
            param="tools",
        )
    grammar = None
    if required or not free:
        try:
            grammar = tool_grammar(
                form,
                choice.tools,
                words,
                thinking=thinking,
                required=required,
                many=parallel and form.parallel,
                answer=guide.rule if guide else None,
            )
        except FlyweightError as error:
            raise BadRequest(str(error), param="tools") from error
    return AnswerPlan(grammar, thinking, form, schemas_of(choice), warnings)


def schemas_of(choice: ToolChoice) -> dict[str, Any]:
    return {tool["name"]: tool.get("parameters") for tool in choice.tools}


def in_channels(
    form: Harmony,
    choice: ToolChoice,
    guide: Guide | None,
    words: Words,
    *,
    thinking: Thinking,
    free: bool,
) -> AnswerPlan:
    """Every answer is taken apart, whether or not there are tools; a guide holds what is said on
    the last channel.
    """
    if guide is not None and guide.rule is None:
        raise BadRequest(
            "a grammar or a structural tag cannot be combined with this model's channels; use "
            "JSON, regex or choice",
            param="response_format",
        )
    tools = [] if choice.mode == "none" else choice.tools
    required = choice.mode == "required"
    grammar = None
    if required or guide is not None or (tools and not free):
        try:
            grammar = form.grammar(
                tools, words, required=required, answer=guide.rule if guide else None
            )
        except FlyweightError as error:
            raise BadRequest(str(error), param="tools") from error
    return AnswerPlan(grammar, thinking, form, schemas_of(choice) if tools else {})


def guided(guide: Guide | None, words: Words, thinking: Thinking) -> str | None:
    """A guide holds the answer, not the thinking that the prompt has begun."""
    if guide is None:
        return None
    if not thinking.begun:
        return guide.grammar(words)
    if guide.rule is None:
        raise BadRequest(
            "a grammar or a structural tag cannot follow thinking; switch the thinking off",
            param="chat_template_kwargs",
        )
    return lark_grammar(with_thinking("answer", [f"answer: {guide.rule}"], words, thinking))
