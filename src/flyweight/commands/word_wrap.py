"""Text that arrives in pieces, broken between words at the width of the terminal."""

from __future__ import annotations

import re

FENCE = "```"  # lines of code are left as they are: a break would be copied with them


class WordWrap:
    """`add` returns what can be shown now; the beginning of a word waits until its end is known.

    Without a width (no terminal) the text passes as it comes.
    """

    def __init__(self, width: int | None):
        self.width = width
        self.column = 0
        self.word = ""
        self.line = ""  # of the text itself, to find fences
        self.code = False

    def add(self, text: str) -> str:
        if self.width is None:
            return text
        shown = ""
        for part in re.split(r"(\s)", text):
            if part.isspace():
                shown += self._end_word() + self._space(part)
            else:
                self.word += part
                if self.code or measure(self.word) >= self.width:  # no line holds it whole
                    shown += self._end_word()
        return shown

    def finish(self) -> str:
        shown = self._end_word()
        self.column = 0
        return shown

    def _end_word(self) -> str:
        word = self.word
        if not word:
            return ""
        self.word = ""
        self.line += word
        size = measure(word)
        fits = self.code or self.column == 0 or self.column + size <= (self.width or 0)
        self.column = self.column + size if fits else size
        return word if fits else f"\n{word}"

    def _space(self, space: str) -> str:
        if space == "\n":
            if self.line.lstrip().startswith(FENCE):
                self.code = not self.code
            self.line = ""
            self.column = 0
            return space
        self.line += space
        if (
            self.column >= (self.width or 0) and not self.code
        ):  # a space at the edge would open an empty line
            return ""
        self.column += 1
        return space


def measure(text: str) -> int:
    """Columns on the screen: Chinese characters and most emoji take two."""
    from rich.cells import cell_len

    return cell_len(text)
