"""An answer's text as it arrives, taken apart into thinking, words and calls."""

from __future__ import annotations

from flyweight.server.pieces import Call, Piece, Text, Thought
from flyweight.server.reasoning import ReasoningSplitter
from flyweight.server.tools.base import ToolParser


class MessageReader:
    """For one sample. Either part may be missing: a model that does not think, a request without
    tools.
    """

    def __init__(self, splitter: ReasoningSplitter | None = None, parser: ToolParser | None = None):
        self.splitter = splitter
        self.parser = parser
        self.called = False  # whether there was a call

    def add(self, text: str, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self.splitter is not None:
            thought, text = self.splitter.add(text, last=last)
            if thought:
                pieces.append(Thought(thought))
        if self.parser is not None:
            pieces += self.parser.add(text, last=last)
        elif text:
            pieces.append(Text(text))
        self.called = self.called or any(isinstance(piece, Call) for piece in pieces)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """An answer that ended well and called something ended for that."""
        return "tool_calls" if reason == "stop" and self.called else reason
