"""Qwen3-Coder: calls in tags, with every argument as plain text between its own.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

What an argument is (text, a number, an object) only the tool's schema tells, so the parser is given
the schemas. Text goes out as it comes in; anything else when it is whole.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from typing import Any

from flyweight.engine.grammar_kinds import json_rule, quoted
from flyweight.engine.tokenizer import overlap
from flyweight.errors import RequestError
from flyweight.server.tools.base import ToolParser
from flyweight.server.words import Words

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
LONGEST_NAME = 200  # characters
DEEPEST = 8  # references within references of a schema
NOT_HELD = ("pattern", "format")  # keywords of text that the grammar of plain text has no words for


class TaggedCall:
    """One call, read as it arrives; `CallReader` with tags in place of JSON. Its arguments come out
    as JSON.
    """

    def __init__(self, schemas: Mapping[str, Any]):
        self.schemas = schemas
        self.name: str | None = None
        self.raw = ""
        self.ready = ""
        self.state = "function"
        self.buffer = ""
        self.arguments_seen = False
        self.streams = False  # the parameter at hand goes out as it comes in
        self.fresh = False  # the line break before its text is still to come
        self.kinds: set[str] = set()

    @property
    def done(self) -> bool:
        return self.state == "done"

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    def add(self, text: str) -> str:
        self.raw += text
        self.buffer += text
        before = None
        while (len(self.buffer), self.state) != before and self.state not in ("done", "failed"):
            before = (len(self.buffer), self.state)
            getattr(self, f"_{self.state}")()
        if self.state == "failed":
            return ""
        rest = self.buffer if self.done else ""
        self.buffer = "" if self.done else self.buffer
        return rest

    def take(self) -> str:
        ready = self.ready
        self.ready = ""
        return ready

    # -- the states --------------------------------------------------------------------------------

    def _tag(self, begin: str) -> str | None:
        """The name in a tag at the front of the buffer, which it is taken from; None: not there
        yet, or never.
        """
        name, end, rest = self.buffer.removeprefix(begin).partition(">")
        if end and name and len(name) <= LONGEST_NAME and "\n" not in name:
            self.buffer = rest
            return name
        if end or len(name) > LONGEST_NAME or "\n" in name:
            self._fail()
        return None

    def _fail(self) -> None:
        """Before the name is known it is no call; after it, what there is has to do."""
        if self.name is None:
            self.state = "failed"
        else:
            self._end()

    def _function(self) -> None:
        self.buffer = self.buffer.lstrip()
        if self.buffer.startswith(FUNCTION):
            if (name := self._tag(FUNCTION)) is not None:
                self.name = name
                self.state = "parameters"
        elif not FUNCTION.startswith(self.buffer):
            self._fail()

    def _parameters(self) -> None:
        self.buffer = self.buffer.lstrip()
        if self.buffer.startswith(PARAMETER):
            if (key := self._tag(PARAMETER)) is not None:
                self._open_parameter(key)
        elif self.buffer.startswith(END_FUNCTION):
            self.buffer = self.buffer[len(END_FUNCTION) :]
            self._end()
        elif not (PARAMETER.startswith(self.buffer) or END_FUNCTION.startswith(self.buffer)):
            self._end()

    def _open_parameter(self, key: str) -> None:
        schema = self.schemas.get(self.name or "") or {}
        properties = schema.get("properties") if isinstance(schema, dict) else None
        found = properties.get(key) if isinstance(properties, dict) else None
        self.kinds = kinds_of(found, schema)
        self.streams = self.kinds <= {"string"}
        self.fresh = True
        self.ready += (
            ", " if self.arguments_seen else "{"
        ) + f"{json.dumps(key, ensure_ascii=False)}: "
        self.ready += '"' if self.streams else ""
        self.arguments_seen = True
        self.state = "value"

    def _value(self) -> None:
        if self.fresh and self.buffer:
            self.buffer = self.buffer.removeprefix("\n")
            self.fresh = False
        ends = [at for tag in (END_PARAMETER, END_FUNCTION) if (at := self.buffer.find(tag)) >= 0]
        if ends:
            text = self.buffer[: min(ends)]
            self.buffer = self.buffer[min(ends) :].removeprefix(END_PARAMETER)
            self._hand_on(text.removesuffix("\n"), last=True)
            self.state = "parameters"
        elif self.streams:
            held = max(
                overlap(self.buffer, f"\n{tag}") or overlap(self.buffer, tag)
                for tag in (END_PARAMETER, END_FUNCTION)
            )
            cut = len(self.buffer) - held
            self._hand_on(self.buffer[:cut], last=False)
            self.buffer = self.buffer[cut:]

    def _hand_on(self, text: str, *, last: bool) -> None:
        if self.streams:
            self.ready += json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if last else "")
        else:
            self.ready += json.dumps(value_of(text, self.kinds), ensure_ascii=False)

    def _end(self) -> None:
        self.ready += "}" if self.arguments_seen else "{}"
        self.arguments_seen = True
        self.state = "done"


def kinds_of(schema: Any, root: Any, depth: int = DEEPEST) -> set[str]:
    """The types that a schema lets a value have; empty: it does not say."""
    if not isinstance(schema, dict) or not depth:
        return set()
    found: set[str] = set()
    kind = schema.get("type")
    found |= {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
        found.add("string" if isinstance(value, str) else "null" if value is None else "value")
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and isinstance(root, dict):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        found |= kinds_of(target, root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(word) or ():
            found |= kinds_of(one, root, depth - 1)
    return found


def value_of(text: str, kinds: set[str]) -> Any:
    """Anything but text alone: JSON, or the words of Python that models write for it."""
    stripped = text.strip()
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(stripped)
            json.dumps(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return text
    if "string" in kinds and (value is None) > ("null" in kinds):
        return text
    only_null = kinds <= {"string", "null"}
    return text if "string" in kinds and only_null and value is not None else value


class QwenCoderParser(ToolParser):
    OPEN = OPEN
    CLOSE = CLOSE

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self.schemas = names if isinstance(names, Mapping) else {}

    def _read_inside(self, text: str, last: bool) -> str:
        stripped = text.lstrip()
        if stripped.startswith(FUNCTION):
            return self._begin(stripped, TaggedCall(self.schemas))  # type: ignore[arg-type]
        if stripped and FUNCTION.startswith(stripped) and not last:
            return text
        return super()._read_inside(text, last)


class QwenCoder:
    name = "qwen_coder"
    parser = QwenCoderParser
    opening = OPEN
    markers = (OPEN, CLOSE)

    def __init__(self, template: str):
        self.parallel = True

    def argument_rules(
        self, name: str, schema: dict[str, Any], words: Words, *, strict: bool
    ) -> list[str]:
        """Every parameter between its tags, in the order of the schema; those that are not required
        may be missing.
        """
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        rules = []
        parts = []
        for number, (key, given) in enumerate(properties.items()):
            own = f"{name}_{number}"
            value, needed = value_rule(own, given, schema, words, strict=strict)
            rules += [
                f"{own}: {quoted(f'{PARAMETER}{key}>')} {quoted(chr(10))} {value} "
                f"{quoted(chr(10))}",
                *needed,
            ]
            parts.append(own if key in required else f"{own}?")
        return [f"{name}: {' '.join(parts) or quoted('')}", *rules]

    def call_rule(self, name: str, arguments: str, words: Words) -> str:
        return (
            f"{quoted(f'{FUNCTION}{name}>')} {quoted(chr(10))} {arguments} {quoted(END_FUNCTION)}"
        )

    def after_opening(self, words: Words, *, many: bool) -> str:
        one = rf'"\n" call "\n" {words.literal(CLOSE)}'
        return rf'{one} ("\n" {words.literal(OPEN)} {one})*' if many else one


def value_rule(
    name: str, schema: Any, root: dict[str, Any], words: Words, *, strict: bool
) -> tuple[str, list[str]]:
    """(what stands between a parameter's tags, its end included; the rules that needs)."""
    end = quoted(f"\n{END_PARAMETER}")
    kinds = kinds_of(schema, root)
    if not isinstance(schema, dict) or not kinds or kinds != {"string"}:
        inner = schema if isinstance(schema, dict) else {}
        shared: dict[str, Any] = {
            word: root[word] for word in ("$defs", "definitions") if word in root
        }
        if not kinds:  # it may be anything, and is read as text
            return words.until(END_PARAMETER, f"{name}_text")
        return f"{name}_value {end}", [
            f"{name}_value: {json_rule({**shared, **inner}, lenient=not strict)}"
        ]
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return f"({' | '.join(quoted(choice) for choice in choices)}) {end}", []
    if strict and (unheld := [word for word in NOT_HELD if word in schema]):
        raise RequestError(
            f"{unheld[0]} of a text cannot be enforced in this model's format of calls; leave out "
            "strict"
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return words.until(END_PARAMETER, f"{name}_text")
    count = f"{{{least},{'' if most is None else most}}}"
    # lazy: it ends where the tag first closes, and may be no longer until then
    return f"{name}_text", [rf"{name}_text[lazy]: /(.|\n){count}\n<\/parameter>/"]
