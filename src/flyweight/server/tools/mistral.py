"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025
`[TOOL_CALLS]name[ARGS]{…}`, one after another.

Its templates refuse a call whose id is not of nine letters and digits.
"""

from __future__ import annotations

import re
import uuid

from flyweight.server.pieces import Text
from flyweight.server.tools.base import ToolParser
from flyweight.server.tools.call_reader import CallReader
from flyweight.server.tools.grammar import JSONArguments, object_rule
from flyweight.server.words import Words

OPEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
NAMED = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
LONGEST_NAME = 200  # characters until the arguments must have begun


class MistralParser(ToolParser):
    OPEN = OPEN

    def new_id(self) -> str:
        return uuid.uuid4().hex[:9]

    def _no_call(self, text: str, last: bool) -> str:
        """What is no JSON may be a name with arguments behind it."""
        if match := NAMED.match(text):
            return self._begin(text[match.end() :], CallReader(match[1]))
        if not last and len(text) < LONGEST_NAME:
            return text
        if self.calls == 0:
            self.pieces.append(Text(OPEN))
        self.state = "text"
        return text


class Mistral(JSONArguments):
    name = "mistral"
    parser = MistralParser
    opening = OPEN
    markers = (OPEN, CALL_ID, ARGS)

    def __init__(self, template: str):
        self.parallel = True
        self.names_first = ARGS in template

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        if self.names_first:
            return f"{words.literal(name)} {words.literal(ARGS)} {arguments}"
        return object_rule(name, "arguments", arguments)

    def after_opening(self, words: Words, *, many: bool) -> str:
        if self.names_first:
            return f"call ({words.literal(OPEN)} call)*" if many else "call"
        return r'/ ?/ "[" call (", " call)* "]"' if many else r'/ ?/ "[" call "]"'
