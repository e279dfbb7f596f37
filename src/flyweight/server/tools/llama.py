"""Llama 3.x: an answer that is nothing but `{"name": …, "parameters": {…}}`, perhaps after
`<|python_tag|>`.

No tag tells a call from an answer in JSON, so only the name of a tool that there is makes one.
After the tag there may also be `name.call(key="value")`, or code for a tool that runs it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from flyweight.server.pieces import Arguments, Text
from flyweight.server.tools.base import SEPARATORS, ToolParser
from flyweight.server.tools.call_reader import CallReader
from flyweight.server.tools.grammar import JSONArguments, object_rule
from flyweight.server.words import Words

TAG = "<|python_tag|>"
CODE_TOOLS = ("code_interpreter", "python", "ipython")
METHOD = re.compile(r"([\w-]+)\.call\((.*)\)\s*", re.DOTALL)
ONE_AT_A_TIME = "single tool-call"  # what its templates say when there are more


class LlamaParser(ToolParser):
    OPEN = TAG

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self.state = "begin"
        self.tagged = False

    def _advance(self, text: str, last: bool) -> str:
        if self.state == "begin":
            return self._read_beginning(text, last)
        if self.state == "code":
            return self._read_code(text, last)
        return super()._advance(text, last)

    def _read_beginning(self, text: str, last: bool) -> str:
        stripped = text.lstrip()
        if stripped.startswith("{"):
            return self._begin(stripped, CallReader())
        if not last and (not stripped or TAG.startswith(stripped)):
            return text
        self.state = "text"
        return text

    def _read_text(self, text: str, last: bool) -> str:
        rest = super()._read_text(text, last)
        self.tagged = self.tagged or self.state == "inside"
        return rest

    def _read_inside(self, text: str, last: bool) -> str:
        stripped = text.lstrip()
        if self.tagged and self.calls == 0 and stripped and stripped[0] not in "{" + SEPARATORS:
            self.state = "code"
            return text
        return super()._read_inside(text, last)

    def _no_call(self, text: str, last: bool) -> str:
        if text:
            self.state = "text"
        return text

    def _announce(self, name: str) -> bool:
        return name in self.names and super()._announce(name)

    def _give_back(self, text: str) -> str:
        self.reader = None
        self.state = "text"
        return text

    def _read_code(self, text: str, last: bool) -> str:
        if not last:
            return text
        name, arguments = read_method(text) or (self._code_tool(), {"code": text.strip()})
        if name is None or not self._announce(name):
            self.pieces.append(Text(text))
        else:
            self.pieces.append(Arguments(self.calls - 1, json.dumps(arguments)))
        self.state = "text"
        return ""

    def _code_tool(self) -> str | None:
        return next((name for name in CODE_TOOLS if name in self.names), None)

    def _finish(self) -> None:
        if self.reader is not None and not self.announced:
            self.held = self.reader.raw
            self.reader = None
        super()._finish()


def read_method(text: str) -> tuple[str, dict[str, Any]] | None:
    """`search.call(query="x")` as (name, arguments): constants only, nothing is evaluated."""
    match = METHOD.fullmatch(text.strip())
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body if match else None
        if match is None or not isinstance(call, ast.Call) or call.args:
            return None
        return match[1], {item.arg or "": ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class Llama(JSONArguments):
    name = "llama"
    parser = LlamaParser
    opening = None  # a call is the whole answer
    markers = (TAG,)

    def __init__(self, template: str):
        self.parallel = ONE_AT_A_TIME not in template

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        return object_rule(name, "parameters", arguments)

    def after_opening(self, words: Words, *, many: bool) -> str:
        return 'call ("; " call)*' if many else "call"
