"""The kinds of grammars an answer can be held to, all as one string that travels with its request.

A JSON schema is its own text. Anything else begins with its kind: `regex:…`, or `lark:…` in
llguidance's dialect of Lark, which all the others (choices, EBNF, tags, tool calls) are written in.
The functions here make such strings; `translate` turns them into what llguidance reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flyweight.errors import MissingPackageError, RequestError

# Exactly one space between elements, as most models write it: where any is allowed, small models
# write it for ever.
WHITE_SPACE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
REGEX = "regex:"
LARK = "lark:"
ANY_TEXT = r"TEXT: /(.|\n)*/"


def regex_grammar(pattern: str) -> str:
    return REGEX + pattern


def lark_grammar(text: str) -> str:
    return LARK + text


def choice_grammar(choices: Sequence[str]) -> str:
    return lark_grammar("start: " + " | ".join(quoted(choice) for choice in choices))


def ebnf_grammar(text: str) -> str:
    """Lark, or the EBNF that llama.cpp, vLLM and SGLang take (`root ::= …`)."""
    if "::=" not in text:
        return lark_grammar(text)
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError as error:
        raise missing() from error
    try:
        return lark_grammar(any_to_lark(text))
    except Exception as error:  # it raises what its parser happens to raise
        raise RequestError(f"the EBNF grammar cannot be read: {error}") from error


def quoted(text: str) -> str:
    """As a literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: dict[str, Any] | bool, *, lenient: bool = False) -> str:
    """A JSON value as part of a Lark rule; `lenient` passes over keywords that cannot
    be followed.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema must be an object: `false` lets nothing through")
    return "%json " + json.dumps({**schema, "x-guidance": {**WHITE_SPACE, "lenient": lenient}})


def translate(grammar: str) -> tuple[str, str]:
    """(what messages call it, llguidance's own form)."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise missing() from error
    name = "the JSON schema"
    try:
        if grammar.startswith(REGEX):
            name = "the regular expression"
            return name, LLMatcher.grammar_from_regex(grammar[len(REGEX) :])
        if grammar.startswith(LARK):
            name = "the grammar"
            return name, LLMatcher.grammar_from_lark(grammar[len(LARK) :])
        return name, LLMatcher.grammar_from_json_schema(grammar, overrides=WHITE_SPACE)
    except ValueError as error:  # not JSON, or not Unicode
        raise RequestError(f"{name} cannot be read: {error}") from error


def missing() -> MissingPackageError:
    return MissingPackageError(
        "answers in a given shape need llguidance: pip install 'flyweight[serve]'"
    )
