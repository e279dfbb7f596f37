"""What a model's text is made of: thinking, words for the reader, and calls of tools.

Every API has other names for these; here they have one. Joined in their order, the arguments of a
call are a JSON text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Call:
    """A call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    index: int
    text: str


Piece = Thought | Text | Call | Arguments
