"""Hermes, Qwen 2.5, Qwen 3 and many more: `<tool_call>\\n{"name": …, "arguments":
{…}}\\n</tool_call>`, one after another.
"""

from __future__ import annotations

from flyweight.server.tools.base import ToolParser
from flyweight.server.tools.grammar import JSONArguments, object_rule
from flyweight.server.words import Words

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(ToolParser):
    OPEN = OPEN
    CLOSE = CLOSE


class Hermes(JSONArguments):
    name = "hermes"
    parser = HermesParser
    opening = OPEN
    markers = (OPEN, CLOSE)

    def __init__(self, template: str):
        self.parallel = True

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        return object_rule(name, "arguments", arguments)

    def after_opening(self, words: Words, *, many: bool) -> str:
        one = rf'"\n" call "\n" {words.literal(CLOSE)}'
        return rf'{one} ("\n" {words.literal(OPEN)} {one})*' if many else one
