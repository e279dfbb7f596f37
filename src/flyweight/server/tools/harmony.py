"""gpt-oss (harmony): an answer is a row of messages, each on a channel, and perhaps to a function.

    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>

analysis is thinking, final and commentary are words, and what goes to `functions.…` is a call. So
this format reads every answer of its models, with tools or without. The prompt ends with
`<|start|>assistant`, in the middle of the first header.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from flyweight.engine.grammar_kinds import ANY_TEXT, lark_grammar
from flyweight.engine.tokenizer import overlap
from flyweight.server.pieces import Arguments, Call, Text, Thought
from flyweight.server.tools.base import ToolParser
from flyweight.server.tools.grammar import JSONArguments, call_rules
from flyweight.server.words import Words

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
# the last two where a model forgot the end
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
THINKING = "analysis"
LONGEST_HEADER = 400  # characters


class HarmonyParser(ToolParser):
    """Headers are held back until they are whole; bodies go out as they come in."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self.state = "header"
        self.kind = "text"  # of the message at hand: text, thought or call
        self.began = False  # something of it has gone out
        self.said = False  # words have gone out
        self.first = True  # of the answer's messages

    def _advance(self, text: str, last: bool) -> str:
        return (
            self._read_header(text, last) if self.state == "header" else self._read_body(text, last)
        )

    def _read_header(self, text: str, last: bool) -> str:
        header, found, rest = text.partition(MESSAGE)
        if found and (self.first or CHANNEL in header or START in header or "to=" in header):
            self._open(header)
            return rest
        if self._may_be_header(text) and not last:
            return text
        if last and not self.first:
            return ""  # what was to follow never came
        self.first = False
        self.kind = "text"
        self.state = "body"
        return text

    def _may_be_header(self, text: str) -> bool:
        """Whether a message may still begin so."""
        beginning = text.lstrip()
        if len(text) > LONGEST_HEADER:
            return False
        if not self.first:
            return True
        starts = (CHANNEL, START, "to=")
        return not beginning or any(
            beginning.startswith(one) or one.startswith(beginning) for one in starts
        )

    def _open(self, header: str) -> None:
        self.first = False
        self.began = False
        self.state = "body"
        channel = header.partition(CHANNEL)[2].strip()
        recipient = RECIPIENT.search(header)
        if recipient is not None and (recipient[1] in self.names or "functions." in header):
            self.kind = "call"
            self.pieces.append(Call(self.calls, self.new_id(), recipient[1]))
            self.calls += 1
        else:
            self.kind = (
                "thought" if channel.startswith(THINKING) or recipient is not None else "text"
            )

    def _read_body(self, text: str, last: bool) -> str:
        found = [(at, tag) for tag in ENDS if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._hand_on(text[:at])
            self._close()
            return text[at:] if tag in (START, CHANNEL) else text[at + len(tag) :]
        keep = 0 if last else max(overlap(text, tag) for tag in ENDS)
        self._hand_on(text[: len(text) - keep])
        return text[len(text) - keep :]

    def _hand_on(self, text: str) -> None:
        if not text:
            return
        if self.kind == "call":
            self.pieces.append(Arguments(self.calls - 1, text))
        elif self.kind == "thought":
            self.pieces.append(Thought(text))
        else:
            apart = "\n\n" if self.said and not self.began else ""
            self.pieces.append(Text(apart + text))
            self.said = True
        self.began = True

    def _close(self) -> None:
        if self.kind == "call" and not self.began:
            self.pieces.append(Arguments(self.calls - 1, "{}"))
        self.state = "header"
        self.kind = "none"

    def _finish(self) -> None:
        if self.state == "body" and self.kind == "call" and not self.began:
            self.pieces.append(Arguments(self.calls - 1, "{}"))
        self.held = ""


class Harmony(JSONArguments):
    name = "harmony"
    parser = HarmonyParser
    opening = None
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS[:3])

    def __init__(self, template: str):
        self.parallel = False  # a call ends the model's turn

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        header = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
        return f"{words.literal(header)} {arguments}"

    def after_opening(self, words: Words, *, many: bool) -> str:
        return "call"

    def grammar(
        self, tools: Sequence[dict[str, Any]], words: Words, *, required: bool, answer: str | None
    ) -> str:
        """Thinking and words before it are free; then a call that fits, or a final answer."""
        rules = [
            ANY_TEXT,
            f'before: {words.literal(CHANNEL)} ("analysis" | "commentary") '
            f"{words.literal(MESSAGE)} TEXT "
            f"{words.literal(f'{ENDS[0]}{START}assistant')}",
        ]
        rules.append(
            f"final: {words.literal(f'{CHANNEL}final{MESSAGE}')} "
            f"{'TEXT' if answer is None else answer}"
        )
        if tools:
            rules += call_rules(self, tools, words)
        last = "call" if required else "(final | call)" if tools else "final"
        return lark_grammar("\n".join([f"start: before* {last}", *rules]))
