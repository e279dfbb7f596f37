"""Every name under which clients ask for answers of a given shape, and what each becomes.

OpenAI says `response_format`, vLLM `guided_…` and later `structured_outputs`, SGLang `regex`,
`ebnf` and `json_schema`. They are all the same five wishes (JSON, regex, choice, grammar,
structural tag), and only one may be made at a time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flyweight.engine.grammar_kinds import (
    ANY_TEXT,
    choice_grammar,
    ebnf_grammar,
    json_rule,
    lark_grammar,
    quoted,
    regex_grammar,
)
from flyweight.errors import FlyweightError
from flyweight.server.refusals import BadRequest, UnsupportedField
from flyweight.server.words import Words

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MOST_CHOICES = 10_000


class JSONSchema(BaseModel):
    model_config = ConfigDict(strict=True, populate_by_name=True)

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class Structure(BaseModel):
    """Between `begin` and `end` the text fits the schema."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    begin: str = Field(min_length=1)
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    end: str = ""


class StructuralTag(BaseModel):
    """Free text, until a trigger appears: then one of the structures that begin with it."""

    model_config = ConfigDict(strict=True)

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[Structure] = Field(min_length=1, max_length=1000)
    triggers: list[str] = Field(min_length=1, max_length=1000)


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal[
        "text", "json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"
    ]
    json_schema: JSONSchema | None = None
    pattern: str | None = Field(None, description="With type regex.")
    grammar: str | None = Field(
        None, description="With type grammar: Lark, or EBNF with `root ::=`."
    )
    choice: list[str] | None = Field(None, description="With type choice: the answers there are.")
    structures: list[Structure] | None = Field(None, description="With type structural_tag.")
    triggers: list[str] | None = Field(None, description="With type structural_tag.")


class StructuredOutputs(BaseModel):
    """vLLM's name for it; only one of these."""

    model_config = ConfigDict(strict=True, populate_by_name=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTag | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GuidedFields(BaseModel):
    response_format: ResponseFormat | None = Field(None, description="The shape of the answer.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The same in vLLM's words."
    )
    guided_json: dict[str, Any] | str | None = Field(
        None, description="The same in older words of vLLM."
    )
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = Field(None, description="The same in SGLang's words.")
    ebnf: str | None = None
    json_schema: str | None = None
    structural_tag: str | StructuralTag | None = None

    @functools.cached_property
    def guide(self) -> Guide | None:
        """What the answer must fit. Raises where more than one thing is asked for, or one that
        cannot be read.
        """
        asked = [(name, wish) for name, wish in self._wishes() if wish is not None]
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            raise BadRequest(
                f"{names} both ask for a shape of the answer; send one of them", param=asked[1][0]
            )
        for name, (kind, value) in asked:
            try:
                return MAKERS[kind](value)
            except FlyweightError as error:
                raise BadRequest(str(error), param=name) from error
            except RecursionError as error:
                raise BadRequest(
                    "what the answer must fit is nested too deeply", param=name
                ) from error
        return None

    @property
    def shaped(self) -> bool:
        """Whether there is anything of this to be read."""
        names = ("response_format", "structured_outputs", *NAMES)
        return any(getattr(self, name) is not None for name in names)

    def _wishes(self) -> list[tuple[str, tuple[str, Any] | None]]:
        wishes: list[tuple[str, tuple[str, Any] | None]] = []
        wishes.append(("response_format", wish_of_format(self.response_format)))
        wishes.append(("structured_outputs", wish_of_outputs(self.structured_outputs)))
        for field, kind in NAMES.items():
            value = getattr(self, field)
            wishes.append((field, None if value is None else (kind, value)))
        return wishes


NAMES = {  # field → kind
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True)
class Guide:
    """What an answer must fit, for the engine; `rule` is the same as part of a larger grammar,
    where it can be.
    """

    text: str = ""
    rule: str | None = None
    tag: StructuralTag | None = None

    def grammar(self, words: Words) -> str:
        return tag_grammar(self.tag, words) if self.tag else self.text


def wish_of_format(wanted: ResponseFormat | None) -> tuple[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise BadRequest(
            "response_format of type json_schema, and no other, has a json_schema",
            param="response_format",
        )
    if wanted.type == "json_object":
        return "json", ANY_OBJECT
    if wanted.json_schema is not None:
        return "json", wanted.json_schema.schema_
    if wanted.type == "structural_tag":
        if not wanted.structures or not wanted.triggers:
            raise BadRequest(
                "response_format of type structural_tag needs structures and triggers",
                param="response_format",
            )
        return "structural_tag", StructuralTag(
            structures=wanted.structures, triggers=wanted.triggers
        )
    field = "pattern" if wanted.type == "regex" else wanted.type
    value = getattr(wanted, field)
    if value is None:
        raise BadRequest(
            f"response_format of type {wanted.type} needs {field!r}", param="response_format"
        )
    return wanted.type, value


def wish_of_outputs(wanted: StructuredOutputs | None) -> tuple[str, Any] | None:
    if wanted is None:
        return None
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(wanted, name):
            raise UnsupportedField(
                f"structured_outputs.{name} is not supported: between elements stands one space",
                param="structured_outputs",
            )
    asked = [
        (kind, value)
        for kind, value in (
            ("json", wanted.json_),
            ("regex", wanted.regex),
            ("choice", wanted.choice),
            ("grammar", wanted.grammar),
            ("json", ANY_OBJECT if wanted.json_object else None),
            ("structural_tag", wanted.structural_tag),
        )
        if value is not None
    ]
    if len(asked) != 1:
        raise BadRequest(
            "structured_outputs asks for exactly one of json, regex, choice, grammar, json_object "
            f"and structural_tag, not {len(asked)}",
            param="structured_outputs",
        )
    return asked[0]


def json_guide(schema: dict[str, Any] | bool | str) -> Guide:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise BadRequest("a JSON schema is an object")
    return Guide(json.dumps(schema), None if schema is False else json_rule(schema))


def regex_guide(pattern: str) -> Guide:
    slashes = pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return Guide(regex_grammar(pattern), f"/{slashes}/")


def choice_guide(choices: list[str]) -> Guide:
    if not choices or len(choices) > MOST_CHOICES or "" in choices:
        raise BadRequest(f"a choice needs 1 to {MOST_CHOICES} answers, none of them empty")
    return Guide(choice_grammar(choices), "(" + " | ".join(map(quoted, choices)) + ")")


def grammar_guide(text: str) -> Guide:
    return Guide(ebnf_grammar(text))


def tag_guide(tag: str | StructuralTag) -> Guide:
    if isinstance(tag, str):
        try:
            tag = StructuralTag.model_validate_json(tag)
        except ValueError as error:
            raise BadRequest(
                f"the structural tag cannot be read: {str(error).splitlines()[0]}; it has "
                "structures (begin, schema, end) and triggers"
            ) from error
    for trigger in tag.triggers:
        if not trigger or not any(item.begin.startswith(trigger) for item in tag.structures):
            raise BadRequest(f"no structure begins with the trigger {trigger!r}")
    for item in tag.structures:
        if not any(item.begin.startswith(trigger) for trigger in tag.triggers):
            raise BadRequest(
                f"the structure that begins with {item.begin!r} begins with none of the triggers"
            )
        json_rule(item.schema_)
    return Guide(tag=tag)


def tag_grammar(tag: StructuralTag, words: Words) -> str:
    rules = [ANY_TEXT]
    tags = []
    for number, trigger in enumerate(tag.triggers):
        until, needed = words.until(trigger, f"trigger_{number}")
        ends = [
            f"{words.literal(item.begin[len(trigger) :])} {json_rule(item.schema_)} "
            f"{words.literal(item.end)}"
            for item in tag.structures
            if item.begin.startswith(trigger)
        ]
        rules += [*needed, f"tag_{number}: {until} ({' | '.join(ends)})"]
        tags.append(f"tag_{number}")
    return lark_grammar("\n".join([f"start: ({' | '.join(tags)})* TEXT", *rules]))


MAKERS: dict[str, Callable[[Any], Guide]] = {
    "json": json_guide,
    "regex": regex_guide,
    "choice": choice_guide,
    "grammar": grammar_guide,
    "structural_tag": tag_guide,
}
