"""A launched step on its way: which works it has, and what they got once the host reads it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flyweight.engine.request import TokenLogprob
from flyweight.engine.speculation.verify import count_accepted
from flyweight.engine.work import Work
from flyweight.transfer import Download


@dataclass(slots=True)
class Result:
    """What a step gave one request: a token if its work samples, more where drafts were right, and
    the logprobs it asked for.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Flight:
    """A launched step. `results` waits for its tokens, and for nothing launched after it."""

    works: Sequence[Work]
    places: dict[int, int]  # number of a sampling work → its first token among those downloaded
    # tokens, then (logprob, best logprobs, their ids) where wanted, then the same for prompts
    download: Download
    answers: bool  # logprobs of the chosen tokens are among it
    # number of a work, the prompt tokens after each of its own
    prompts: list[tuple[int, list[int]]]
    counted: bool = False  # penalties of steps behind it count what it gives

    @functools.cached_property
    def speculative(self) -> bool:
        """How many tokens it gives is known when it is read."""
        return any(work.drafts for work in self.works)

    def results(self) -> list[Result]:
        tokens, *rest = self.download.lists()
        found = [Result() for _ in self.works]
        if not rest and not self.speculative:
            for i, place in self.places.items():
                found[i].tokens.append(tokens[place])
            return found
        triple = rest[:3] if self.answers else None
        for i, place in self.places.items():
            work = self.works[i]
            accepted = count_accepted(work.drafts, tokens, place)
            kept = tokens[place : place + accepted + 1]
            found[i].tokens = kept
            if triple is not None:
                listed = [
                    logprob(token, triple, place + k, work.request.params.logprobs)
                    for k, token in enumerate(kept)
                ]
                found[i].logprobs = [item for item in listed if item]
        for k, (i, follow) in enumerate(self.prompts):
            at = 3 * (k + self.answers)
            count = self.works[i].request.params.prompt_logprobs
            listed = [
                logprob(token, rest[at : at + 3], row, count) for row, token in enumerate(follow)
            ]
            found[i] = replace(found[i], prompt_logprobs=[item for item in listed if item])
        return found


def logprob(
    token: int, triple: list[list] | None, row: int, count: int | None
) -> TokenLogprob | None:
    if triple is None or count is None:
        return None
    chosen, best, ids = triple
    return TokenLogprob(token, chosen[row], dict(zip(ids[row][:count], best[row], strict=False)))
