"""Text to tokens and back, the way back one token at a time.

A token may hold part of a character, and how it reads may depend on the token before it (a leading space). So the
last few tokens are decoded again with each new one, and text is given out only when it ends in a whole character
and cannot be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyweight.errors import RequestError

BROKEN = "\ufffd"  # what an incomplete character decodes to
LONGEST_CHARACTER = 8  # tokens; a replacement character still there after so many is really in the text

Message = Mapping[str, Any]


class Tokenizer:
    def __init__(self, inner: Any):
        self.inner = inner  # a transformers tokenizer

    @property
    def end_id(self) -> int | None:
        return self.inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation; options (`enable_thinking`, `tools`, …) are the template's."""
        if not self.inner.chat_template:
            raise RequestError("this model has no chat template; give a plain prompt instead of messages")
        options = {"add_generation_prompt": True, **options}
        try:
            return self.inner.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template may raise whatever it likes
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self.inner.encode(self.render_chat(messages, **options), add_special_tokens=False)


class Detokenizer:
    """Feed it tokens; `text` grows by whole characters and never shows a stop string or the beginning of one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), stop: Sequence[str] = ()):
        self.decode = decode
        self.tokens = list(context)  # the end of the prompt: it decides how the first token reads
        self.start, self.read = 0, len(self.tokens)  # text up to `read` is out; it is decoded from `start` on
        self.stop = stop
        self.pending = ""  # whole characters that may be the beginning of a stop string
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int, *, stops: bool = True) -> None:
        """`stops=False`: too early for a stop string to count."""
        self.tokens.append(token)
        new = self._decode_new()
        if not new.endswith(BROKEN) or len(self.tokens) - self.read > LONGEST_CHARACTER:
            self._accept(new)
            self._give_out(stops)

    def finish(self) -> None:
        """No more tokens will come: give out everything."""
        if self.stopped_by is None:
            self._accept(self._decode_new())
            self.text += self.pending
            self.pending = ""

    def _decode_new(self) -> str:
        return self.decode(self.tokens[self.start :])[len(self.decode(self.tokens[self.start : self.read])) :]

    def _accept(self, new: str) -> None:
        if new:
            self.start, self.read = self.read, len(self.tokens)
            self.pending += new

    def _give_out(self, stops: bool) -> None:
        hold = 0
        if stops and self.stop:
            found = [(at, stop) for stop in self.stop if (at := self.pending.find(stop)) >= 0]
            if found:
                at, self.stopped_by = min(found)
                self.text, self.pending = self.text + self.pending[:at], ""
                return
            hold = max(overlap(self.pending, stop) for stop in self.stop)
        cut = len(self.pending) - hold
        self.text, self.pending = self.text + self.pending[:cut], self.pending[cut:]


def overlap(text: str, stop: str) -> int:
    """How many of the text's last characters are a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
