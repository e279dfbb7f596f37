"""Literal text in a grammar over one vocabulary.

llguidance takes a token that stands apart from the text (a special one, or one written as `<…>`)
only by its number, never for the letters it is written with. So literals are cut at such tokens.
"""

from __future__ import annotations

import re

from flyweight.engine.grammar_kinds import quoted
from flyweight.engine.tokenizer import Tokenizer


class Words:
    def __init__(self, tokenizer: Tokenizer | None):
        added = tokenizer.inner.added_tokens_decoder if tokenizer else {}
        self.apart = {
            token.content: number
            for number, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        longest_first = sorted(self.apart, key=len, reverse=True)
        self.cut = (
            re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        )

    def is_token(self, text: str) -> bool:
        return text in self.apart

    def literal(self, text: str) -> str:
        """For a rule; empty for an empty text."""
        parts = self.cut.split(text) if self.cut else [text]
        return " ".join(
            f"<[{self.apart[part]}]>" if part in self.apart else quoted(part)
            for part in parts
            if part
        )

    def until(self, text: str, name: str) -> tuple[str, list[str]]:
        """Free text that ends with the first `text`: (what stands in a rule, the rules it needs
        beside TEXT).
        """
        if self.is_token(text):
            return f"TEXT {self.literal(text)}", []
        return name, [f"{name}[lazy]: TEXT {quoted(text)}"]
