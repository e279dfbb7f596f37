"""Guesses from text that was there before: what followed the last tokens when they stood somewhere
else.

Answers that quote (summaries, edits of code, questions about a document) repeat their prompts, and
servers repeat themselves. Looked through are the request's own prompt and answer, then what others
of the same cache salt were answered. Each text is indexed by its runs of GRAM tokens as it grows, a
dictionary entry a token; of the latest places where the last GRAM tokens stood, that with the
longest common past is continued. Nothing is found: nothing is spent but a lookup.

A request whose guesses were wrong has to show a longer common past before the next ones: two tokens
that stood somewhere before are nothing special in a long answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flyweight.engine.request import Request
from flyweight.engine.work import Work

GRAM = 2  # tokens that must agree, at least
EARLIER = 5  # with answers to others, of which there are many
LONGEST = 12  # and at most: a request that failed often asks for so many
CANDIDATES = 8  # places that are compared
PAST = 24  # tokens that are compared there
KEPT_TOKENS = 1 << 18  # of earlier answers with one salt: tens of megabytes
KEPT_SALTS = 16
END = -1  # between two texts


class TokenIndex:
    """A growing list of tokens, in which the places of any GRAM tokens are found, the
    latest first.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self.last: dict[tuple[int, ...], int] = {}  # GRAM tokens → where they last ended
        # where the tokens that end here ended the time before; −1: nowhere
        self.before: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        listed, last, before = self.tokens, self.last, self.before
        known = len(listed)
        listed.extend(tokens)
        for end in range(known, len(listed)):
            if end < GRAM - 1:
                before.append(-1)
                continue
            gram = tuple(listed[end - GRAM + 1 : end + 1])
            before.append(last.get(gram, -1))
            last[gram] = end

    def match(self, past: Sequence[int], needed: int, *, own: bool) -> int | None:
        """Where the end of `past` stood, with `needed` tokens before it agreeing; of several the
        longest, then the latest.

        `own`: `past` is the end of this very list, which does not count.
        """
        place = self.last.get(tuple(past[-GRAM:]), -1) if len(past) >= GRAM else -1
        if own and place >= 0:
            place = self.before[place]
        found, best = None, needed - 1
        for _ in range(CANDIDATES):
            if place < 0:
                break
            if (common := self._common(past, place)) > best:
                found, best = place, common
                if best == PAST:  # no other can agree longer
                    break
            place = self.before[place]
        return found

    def _common(self, past: Sequence[int], place: int) -> int:
        limit = min(PAST, len(past), place + 1)
        count = GRAM
        while count < limit and past[-1 - count] == self.tokens[place - count]:
            count += 1
        return count

    def after(self, place: int, count: int, *, own: bool) -> list[int]:
        """What followed, up to the end of that text. Where the text is still being written, it goes
        on repeating.
        """
        following = self.tokens[place + 1 : place + 1 + count]
        if END in following:
            following = following[: following.index(END)]
        period = len(self.tokens) - 1 - place
        while own and 0 < period <= len(following) < count:
            following.append(following[len(following) - period])
        return following


@dataclass
class Reader:
    """A request's own text, and how much must agree before it guesses."""

    needed: int
    index: TokenIndex = field(default_factory=TokenIndex)


class NgramDrafter:
    guesses_ahead = True  # a token in flight is one that must be guessed too

    def __init__(self, least: int = GRAM):
        """`least`: tokens that must agree before a guess, if none was wrong lately."""
        self.least = least
        self.readers: dict[int, Reader] = {}
        self.answers: OrderedDict[bytes, TokenIndex] = OrderedDict()  # earlier ones, by salt

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        return False

    def expect(self, count: int) -> None:
        pass

    def promising(self, request: Request) -> bool:
        return True

    def propose(self, requests: Sequence[Request], most: Mapping[int, int]) -> dict[int, list[int]]:
        found = {}
        for request in requests:
            unread = request.pending
            found[request.number] = self._guess(request, unread + most[request.number])[unread:]
        return found

    def _reader(self, request: Request) -> Reader:
        """With all of its tokens."""
        reader = self.readers.get(request.number)
        if reader is None:
            reader = self.readers[request.number] = Reader(self.least)
        reader.index.extend(request.tokens[len(reader.index.tokens) :])
        return reader

    def quotes(self, request: Request) -> bool:
        """Whether the last tokens that were read stood in its own text before."""
        reader = self._reader(request)
        return reader.index.match(request.tokens, reader.needed, own=True) is not None

    def _guess(self, request: Request, count: int) -> list[int]:
        reader = self._reader(request)
        index, tokens = reader.index, request.tokens
        if (place := index.match(tokens, reader.needed, own=True)) is not None:
            return index.after(place, count, own=True)
        earlier = None if request.salt is None else self.answers.get(request.salt)
        needed = max(EARLIER, reader.needed)
        if earlier is None or (place := earlier.match(tokens, needed, own=False)) is None:
            return []
        return earlier.after(place, count, own=False)

    def release(self, request: Request) -> None:
        pass

    def learn(self, works: Sequence[Work], seconds: float) -> None:
        pass

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        """A right guess makes it easier to guess again, a wrong one harder."""
        if (reader := self.readers.get(request.number)) is not None:
            reader.needed = self.least if accepted else min(LONGEST, reader.needed + 1)

    def forget(self, request: Request) -> None:
        """Its answer may be of use to those who come."""
        self.readers.pop(request.number, None)
        answer = request.tokens[len(request.prompt) :]
        if request.salt is None or len(answer) <= GRAM:
            return
        kept = self.answers.setdefault(request.salt, TokenIndex())
        self.answers.move_to_end(request.salt)
        if len(kept.tokens) + len(answer) > KEPT_TOKENS:  # the older half goes
            kept = self.answers[request.salt] = TokenIndex(kept.tokens[len(kept.tokens) // 2 :])
        kept.extend([*answer, END])
        while len(self.answers) > KEPT_SALTS:
            self.answers.popitem(last=False)
