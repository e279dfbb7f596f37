"""Tells a model's thinking from its answer: `<think>…</think>` at the beginning of the text.

Tags may arrive in pieces, so text that may be the beginning of one is held back until it is told. A
chat template may have opened the tag already, in the prompt; then the answer begins inside it.
"""

from __future__ import annotations

from flyweight.engine.tokenizer import overlap

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Feed it text; it gives (reasoning, content), each only when it is sure."""

    def __init__(self, *, inside: bool):
        self.state = "inside" if inside else "before"  # before, inside, after
        self.held = ""
        self.fresh = True  # white space beside the tags is nobody's

    def add(self, text: str, *, last: bool = False) -> tuple[str, str]:
        text, self.held = self.held + text, ""
        reasoning = ""
        if self.state == "before":
            beginning = text.lstrip()
            if beginning.startswith(OPEN):
                self.state, text = "inside", beginning[len(OPEN) :]
            elif OPEN.startswith(beginning) and not last:
                self.held = text
                return "", ""
            else:
                self.state, self.fresh = "after", False
        if self.state == "inside":
            reasoning, found, text = text.partition(CLOSE)
            if found:
                self.state = "after"
                reasoning = self._trim(reasoning).rstrip("\n")
                self.fresh = True
            else:
                sure = (
                    reasoning
                    if last
                    else reasoning[: len(reasoning) - overlap(reasoning, CLOSE)].rstrip("\n")
                )
                self.held = reasoning[len(sure) :]
                return self._trim(sure), ""
        return reasoning, self._trim(text)

    def _trim(self, text: str) -> str:
        if self.fresh:
            text = text.lstrip("\n")
            self.fresh = not text
        return text
