"""What the formats of tool calls share: text goes through, calls are taken out of it as they
arrive.

A format is how a family of models writes a call. Each file beside this one has two halves: a
parser, which reads calls, and the words of a grammar (`grammar.py`), which makes sure that there is
nothing else to read.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import ClassVar

from flyweight.engine.tokenizer import overlap
from flyweight.server.pieces import Arguments, Call, Piece, Text
from flyweight.server.tools.call_reader import CallReader

SEPARATORS = ",;[]"  # between calls, and around a list of them


class ToolParser:
    """Feed it an answer's text; it gives pieces, each only when it is sure what it is."""

    OPEN: ClassVar[str] = ""  # calls begin after it
    CLOSE: ClassVar[str] = ""  # and end before it

    def __init__(self, names: Collection[str]):
        self.names = names  # of the tools there are
        self.calls = 0
        self.held = ""  # text that may be the beginning of something
        self.state = "text"
        self.reader: CallReader | None = None
        self.announced = False  # the reader's name has been given out
        self.after_call = False  # white space between calls is nobody's
        self.pieces: list[Piece] = []

    def add(self, text: str, *, last: bool = False) -> list[Piece]:
        self.pieces = []
        text = self.held + text
        self.held = ""
        while text:
            before = (len(text), self.state)
            text = self._advance(text, last)
            if (len(text), self.state) == before:  # it waits for more
                self.held = text
                break
        if last:
            self._finish()
        return self.pieces

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # -- the states: each takes what it can from the front of the text and gives back the rest -----

    def _advance(self, text: str, last: bool) -> str:
        if self.state == "call":
            return self._read_call(text)
        if self.state == "inside":
            return self._read_inside(text, last)
        return self._read_text(text, last)

    def _read_text(self, text: str, last: bool) -> str:
        before, found, after = text.partition(self.OPEN)
        if found:
            self._say(before.rstrip())
            self.state = "inside"
            return after
        keep = 0 if last else overlap(text, self.OPEN)
        sure = text[: len(text) - keep]
        if not last:
            sure = sure.rstrip()  # white space before a call is nobody's either
        self._say(sure)
        return text[len(sure) :]

    def _read_inside(self, text: str, last: bool) -> str:
        text = text.lstrip()
        for tag in (self.OPEN, self.CLOSE):
            if tag and text.startswith(tag):
                self.state = "inside" if tag == self.OPEN else "text"
                return text[len(tag) :]
            if tag and text and tag.startswith(text) and not last:
                return text
        if text.startswith("{"):
            return self._begin(text, CallReader())
        if text and text[0] in SEPARATORS:
            return text[1:]
        return self._no_call(text, last)

    def _no_call(self, text: str, last: bool) -> str:
        """Between the tags stands something else: it is text, tag and all."""
        if text:
            self.state = "text"
            if not self.after_call:
                self.pieces.append(Text(self.OPEN))
        return text

    def _begin(self, text: str, reader: CallReader) -> str:
        self.reader = reader
        self.announced = False
        self.state = "call"
        return text

    def _read_call(self, text: str) -> str:
        reader = self.reader
        assert reader is not None
        rest = reader.add(text)
        if reader.name is not None and not self.announced and not self._announce(reader.name):
            return self._give_back(reader.raw + rest)
        if reader.failed and not self.announced:
            return self._give_back(reader.raw + rest)
        if arguments := reader.take():
            self.pieces.append(Arguments(self.calls - 1, arguments))
        if reader.done or reader.failed:
            self._end_call(reader)
        return rest

    def _announce(self, name: str) -> bool:
        self.announced = True
        self.pieces.append(Call(self.calls, self.new_id(), name))
        self.calls += 1
        return True

    def _end_call(self, reader: CallReader) -> None:
        if self.announced and not reader.arguments_seen:
            self.pieces.append(Arguments(self.calls - 1, "{}"))
        self.reader = None
        self.after_call = True
        self.state = "inside"

    def _give_back(self, text: str) -> str:
        """It looked like a call and was none."""
        self.reader = None
        self.state = "text"
        self.pieces.append(Text(self.OPEN))
        return text

    def _say(self, text: str) -> None:
        if self.after_call:
            text = text.lstrip()
        if text:
            self.after_call = False
            self.pieces.append(Text(text))

    def _finish(self) -> None:
        """The text ends here; what never became a call is text."""
        if self.reader is not None and not self.announced:
            self.pieces.append(Text(self.OPEN + self.reader.raw))
        elif self.reader is not None:
            self._end_call(self.reader)
        elif self.held:
            self._say(self.held)
        self.held = ""
