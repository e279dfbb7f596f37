"""Answers as they grow: tokens that were read become text and chunks, and listeners hear of them.

A step's tokens are kept at once. Their text is made when it is told, while the device is busy with
the next step; only stop strings need it earlier, since they may end the request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flyweight.engine.flight import Result
from flyweight.engine.request import Chunk, Request, TokenLogprob
from flyweight.engine.tokenizer import Detokenizer
from flyweight.engine.work import Work

CONTEXT = 6  # prompt tokens that the first generated ones are decoded with

Decode = Callable[[Sequence[int]], str]
Release = Callable[[Request, str, str | int | None], None]


@dataclass
class News:
    """Tokens of a request that were read, and are not text yet or were not told to its listener."""

    request: Request
    before: int  # characters of its text that were told
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    spelled: int = 0  # how many of the tokens are text


class Answers:
    def __init__(self, decode: Decode | None, release: Release):
        """`release`: takes a request that ends, and why, out of the engine."""
        self.decode = decode
        self.independent_tokens = False  # whether how one reads depends on none before it
        self._release = release
        self.texts: dict[int, Detokenizer] = {}  # by request
        self.untold: dict[int, News] = {}  # by request: what its listener has not heard yet

    def open(self, request: Request) -> None:
        if self.decode:
            self.texts[request.number] = Detokenizer(
                self.decode,
                request.prompt[-CONTEXT:],
                request.params.stop,
                independent=self.independent_tokens,
            )

    def forget_news(self) -> None:
        """Making text of it may be what failed."""
        self.untold.clear()

    def accept(self, work: Work, result: Result, now: float) -> None:
        request = work.request
        if result.prompt_logprobs:  # a preempted request computes its prompt again
            request.prompt_logprobs = [
                *(request.prompt_logprobs[: work.start + 1] or [None]),
                *result.prompt_logprobs,
            ]
        if not result.tokens:
            return
        news = self.untold.get(request.number)
        if news is None:
            news = self.untold[request.number] = News(request, len(request.text))
        count = self._take(news, result.tokens)
        if result.logprobs:
            logprobs = result.logprobs[:count]
            request.logprobs += logprobs
            news.logprobs += logprobs
        request.chunks.append((now, count))
        if request.finished:
            self._tell_news(request)

    def _take(self, news: News, tokens: Sequence[int]) -> int:
        """The answer's next tokens, up to the one that ends it; returns how many. Only stop strings
        need their text at once.
        """
        request = news.request
        text = self.texts.get(request.number)
        spelled = text is not None and bool(text.stop)
        for count, token in enumerate(tokens, 1):
            request.tokens.append(token)
            news.tokens.append(token)
            if spelled:
                self._spell(request)
            if token in request.end_ids:
                wanted = token in request.params.stop_token_ids
                self.finish(request, "stop", token if wanted else None)
            elif text is not None and text.stopped_by:
                self.finish(request, "stop", text.stopped_by)
            elif len(request.tokens) >= request.limit:
                self.finish(request, "length")
            else:
                continue
            return count  # what comes after it was never asked for
        return len(tokens)

    def _spell(self, request: Request) -> None:
        """Make text of its tokens that were read."""
        news = self.untold.get(request.number)
        text = self.texts.get(request.number)
        if news is None or text is None:
            return
        for token in news.tokens[news.spelled :]:
            if token not in request.end_ids:
                text.add(token, stops=request.generated >= request.params.min_tokens)
        news.spelled = len(news.tokens)
        request.text = text.text

    def tell_all(self) -> None:
        """Texts of tokens that were read go to the listeners: while the device is busy, if
        possible.
        """
        for news in list(self.untold.values()):
            self._tell_news(news.request)

    def _tell_news(self, request: Request) -> None:
        self._spell(request)
        news = self.untold.pop(request.number, None)
        if news is not None:
            text = request.text[news.before :]
            self._tell(request, Chunk(request.index, text, news.tokens, news.logprobs or None))

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request, whatever its state; `tell_end` is left to the caller."""
        self._release(request, reason, stop_reason)
        self._spell(request)
        if text := self.texts.pop(request.number, None):
            text.finish()
            request.text = text.text

    def tell_end(self, request: Request) -> None:
        """Of one that has ended without new tokens."""
        self._tell(request, Chunk(request.index, "", []))

    def _tell(self, request: Request, chunk: Chunk) -> None:
        """A listener that raises ends its own request: others are in the same step."""
        if request.listener is None:
            return
        if request.finished:
            chunk = replace(
                chunk, finish_reason=request.finish_reason, stop_reason=request.stop_reason
            )
        try:
            request.listener(chunk)
        except Exception as error:
            request.listener = None
            warnings.warn(
                f"the listener of request {request.number} raised {error!r}; the request is ended"
            )
            if not request.finished:
                self.finish(request, "failed", f"its listener raised {error!r}")
