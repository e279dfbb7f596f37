"""Text to tokens and back, the way back one token at a time.

A token may hold part of a character, and how it reads may depend on the token before it (a leading
space). So the last few tokens are decoded again with each new one, and text is given out only when
it ends in a whole character and cannot be the beginning of a stop string.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyweight.engine.byte_level import ByteTable, byte_table
from flyweight.engine.stop_strings import stop_strings
from flyweight.errors import RequestError

if TYPE_CHECKING:
    from flyweight.checkpoint.bare_tokenizer import Bare
    from flyweight.checkpoint.reader import Checkpoint

BROKEN = "\ufffd"  # what an incomplete character decodes to
# tokens; a replacement character still there after so many is really in the text
LONGEST_CHARACTER = 8
# tokens that are decoded together, and those kept when they have become too many
WINDOW, OVERLAP = 24, 6

# Special tokens that are part of an answer all the same: without them a call of a tool reads like
# words.
MARKERS = (
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
# The same of answers that come in channels (gpt-oss); other models call other things by some of
# these names.
CHANNEL = "<|channel|>"
IN_CHANNELS = (
    CHANNEL,
    "<|start|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

Message = Mapping[str, Any]


class Tokenizer:
    def __init__(self, inner: Any):
        self.inner = inner  # a transformers tokenizer
        # the same without the wrapping: decoding is done per token
        self.fast = getattr(inner, "backend_tokenizer", inner)
        self.markers = marked(getattr(inner, "added_tokens_decoder", {}))

    @property
    def end_id(self) -> int | None:
        return self.inner.eos_token_id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        check_unicode(text)
        return self.inner.encode(text, add_special_tokens=special)

    @functools.cached_property
    def bytes(self) -> ByteTable | None:
        return byte_table(self.fast, self.markers)

    def decode(self, tokens: Sequence[int]) -> str:
        if self.bytes is not None:
            return self.bytes.decode(tokens)
        if self.markers.keys().isdisjoint(tokens):
            return self.fast.decode(tokens, skip_special_tokens=True)
        parts: list[str] = []
        begin = 0
        for at, token in enumerate(tokens):
            if token in self.markers:
                parts += [
                    self.fast.decode(tokens[begin:at], skip_special_tokens=True),
                    self.markers[token],
                ]
                begin = at + 1
        return "".join(parts) + self.fast.decode(tokens[begin:], skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation; options (`enable_thinking`, `tools`, …) are the
        template's.
        """
        if not self.inner.chat_template:
            raise RequestError(
                "this model has no chat template; give a plain prompt instead of messages"
            )
        options = {"add_generation_prompt": True, **options}
        try:
            return self.inner.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template may raise whatever it likes
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options), special=False)


class BareTokenizer(Tokenizer):
    """The same from a `tokenizer.json` that says everything: transformers, whose import takes
    longer than loading a small model, comes when its parts are needed (chat templates, a server).
    """

    def __init__(self, bare: Bare, load: Callable[[], Any]):
        self.fast = bare.tokenizer
        self.markers = marked(self.fast.get_added_tokens_decoder())
        self._end_id = bare.end_id
        self._load = load

    @functools.cached_property
    def inner(self) -> Any:  # type: ignore[override]
        return self._load()

    @property
    def end_id(self) -> int | None:
        return self._end_id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        check_unicode(text)
        # of one text alone the library would hold the interpreter lock; `fast`: without the place
        # of each token in the text, which takes as long as the rest
        (encoded,) = self.fast.encode_batch_fast([text], add_special_tokens=special)
        return encoded.ids


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """None where the folder has none."""
    if not checkpoint.has_tokenizer:
        return None
    bare = checkpoint.bare_tokenizer()
    return (
        Tokenizer(checkpoint.tokenizer())
        if bare is None
        else BareTokenizer(bare, checkpoint.tokenizer)
    )


def marked(added: Mapping[int, Any]) -> dict[int, str]:
    names = MARKERS + (
        IN_CHANNELS if any(token.content == CHANNEL for token in added.values()) else ()
    )
    return {
        number: token.content
        for number, token in added.items()
        if token.special and token.content in names
    }


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a tokenizer's own words for it are about types
        raise RequestError(
            f"the prompt is not valid Unicode (character {error.start + 1}); is it UTF-8?"
        ) from None


class Detokenizer:
    """Feed it tokens; `text` grows by whole characters and never shows a stop string or the
    beginning of one.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        independent: bool = False,
    ):
        """`independent`: how a token reads depends on none before it, but for characters that are
        cut.
        """
        self.decode = decode
        self.independent = independent
        self.window = list(context)  # the end of the prompt: it decides how the first token reads
        # characters of the window that are dealt with
        self.read = len(decode(self.window)) if context else 0
        self.held = 0  # tokens that did not end a character yet
        self.stop = stop_strings(tuple(stop)) if stop else None
        self.node = 0  # how far into the stop strings the pending text goes
        self.known = 0  # characters of the pending text that the node stands for
        self.pending = ""  # whole characters that may be the beginning of a stop string
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int, *, stops: bool = True) -> None:
        """`stops=False`: too early for a stop string to count."""
        self.window.append(token)
        self.held += 1
        text = self.decode(self.window)
        if not text.endswith(BROKEN) or self.held > LONGEST_CHARACTER:
            self._accept(text)
            self._give_out(stops)

    def finish(self) -> None:
        """No more tokens will come: give out everything."""
        if self.stopped_by is None:
            self._accept(self.decode(self.window))
            self.text += self.pending
            self.pending = ""

    def _accept(self, text: str) -> None:
        self.pending += text[self.read :]
        self.read, self.held = len(text), 0
        if self.independent:
            self.window = []
            self.read = 0
        elif len(self.window) > WINDOW:
            self.window = self.window[-OVERLAP:]
            self.read = len(self.decode(self.window))

    def _give_out(self, stops: bool) -> None:
        if self.stop is None:
            self.text += self.pending
            self.pending = ""
            return
        hold = 0
        if stops:
            node = self.stop.advance(self.node, self.pending[self.known :])
            if node is None:
                at, self.stopped_by = self.stop.first(self.pending)
                self.text += self.pending[:at]
                self.pending = ""
                return
            self.node = node
            hold = self.stop.depth[node]
        cut = len(self.pending) - hold
        self.text += self.pending[:cut]
        self.pending = self.pending[cut:]
        self.known = hold


def overlap(text: str, stop: str) -> int:
    """How many of the text's last characters are a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
