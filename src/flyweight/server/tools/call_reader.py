"""One call written as a JSON object, read as it arrives: `{"name": "f", "arguments": {…}}`.

The arguments are handed on character by character, so that a client sees a long one grow; the name
comes first, and arguments that come before it wait. Nothing is parsed twice.
"""

from __future__ import annotations

import json

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
BEFORE_NAME = {NAME, *ARGUMENTS, "type", "id", "function"}  # another key first: this is no call
WHITE_SPACE = " \t\r\n"


class JSONValue:
    """Finds where a JSON value ends."""

    def __init__(self) -> None:
        self.text = ""
        self.depth = 0
        self.quoted = False
        self.escaped = False

    def add(self, char: str) -> bool:
        """Whether the character is still part of the value."""
        if not self.quoted and not self.depth and char in ",}]":
            return False
        self.text += char
        if self.quoted:
            self._inside_string(char)
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        return True

    def _inside_string(self, char: str) -> None:
        if self.escaped:
            self.escaped = False
        elif char == "\\":
            self.escaped = True
        elif char == '"':
            self.quoted = False

    @property
    def complete(self) -> bool:
        """The value has ended with its last character; numbers and words end only where something
        else begins.
        """
        return bool(self.text) and self.text[-1] in '}]"' and not self.quoted and not self.depth


class CallReader:
    """`name` is known before `take()` gives anything; `raw` is all that was read, for text that was
    no call after all.
    """

    def __init__(self, name: str | None = None):
        """With a name only the arguments are read: a bare JSON value."""
        self.name = name
        self.bare = name is not None
        self.key: str | None = ARGUMENTS[0] if self.bare else None
        self.value = JSONValue()
        self.state = "value" if self.bare else "begin"
        self.raw = ""
        self.ready = ""  # arguments that nobody took yet
        self.arguments_seen = False

    @property
    def done(self) -> bool:
        return self.state == "done"

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    def add(self, text: str) -> str:
        """Reads on. What comes after the end, or from where it fails, is given back."""
        for at, char in enumerate(text):
            if self.state in ("done", "failed"):
                return text[at:]
            self.raw += char
            self._step(char)
        return ""

    def take(self) -> str:
        """The arguments that have come since the last time."""
        if self.name is None:
            return ""
        ready = self.ready
        self.ready = ""
        return ready

    def _step(self, char: str) -> None:
        if self.state == "value":
            self._step_value(char)
        elif char in WHITE_SPACE and not self.value.quoted:
            return
        elif self.state == "begin":
            self.state = "key" if char == "{" else "failed"
        elif self.state == "key":
            self._step_key(char)
        elif self.state == "colon":
            self.state = "value" if char == ":" else "failed"

    def _step_key(self, char: str) -> None:
        if not self.value.text and char in ",}":
            self.state = "key" if char == "," else "done"
            return
        if not self.value.text and char != '"':
            self.state = "failed"
            return
        self.value.add(char)
        if self.value.complete:
            self.key = self._decode(self.value.text)
            known = self.name is not None or self.key in BEFORE_NAME
            self.state = "colon" if known and self.state != "failed" else "failed"
            self.value = JSONValue()

    def _step_value(self, char: str) -> None:
        if not self.value.text and char in WHITE_SPACE:
            return
        inside = self.value.add(char)
        if inside:
            self._hand_on(char)
        if self.value.complete or not inside:
            self._end_value()
            if not inside:
                self._step_key(char)

    def _hand_on(self, char: str) -> None:
        """Arguments go on at once if they are an object; else what they are is known at the end."""
        if self.key in ARGUMENTS and self.value.text.startswith("{"):
            self.arguments_seen = True
            self.ready += char

    def _end_value(self) -> None:
        text = self.value.text.strip()
        if self.key in ARGUMENTS and not text.startswith("{"):
            self.arguments_seen = True
            # some models write JSON as a string
            inner = self._decode(text) if text.startswith('"') else text
            self.ready += inner if inner and inner != "null" else "{}"
        elif self.key == NAME:
            self.name = self._decode(text)
        if self.state != "failed":
            self.state = "done" if self.bare else "key"
        self.key = None
        self.value = JSONValue()

    def _decode(self, text: str) -> str | None:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, str):
            self.state = "failed"
            return None
        return found
