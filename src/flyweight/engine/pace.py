"""How many tokens of prompts may run beside answers, by the time they take.

A fixed number of tokens is too many for a slow machine: on two cores 512 of them take ten times as
long as the answers alone, and every answer waits. So a server on a CPU learns two figures from the
steps it has read: what a step of answers takes, and what a token of a prompt adds to it. Prompts
then get as many tokens as add `STRETCH` times the former.

Offline nobody waits between tokens, and steps that depend on the clock would not come out the same
twice: there the fixed number stands.
"""

from __future__ import annotations

# a step with prompts takes 2.5 times one without: within three, which readers hardly notice
STRETCH = 1.5
FEWEST = 32  # tokens: a prompt must get on, and a smaller pass costs hardly less
NEW = 0.2  # the weight of the latest step in the moving averages


class Pace:
    def __init__(self) -> None:
        self.answer_seconds: float | None = None  # of a step of answers only
        self.token_seconds: float | None = None  # that a token of a prompt adds

    def learn(self, seconds: float, *, prompt_tokens: int, answers: int) -> None:
        """What a step took."""
        if not prompt_tokens:
            if answers:
                self.answer_seconds = average(self.answer_seconds, seconds)
            return
        alone = (self.answer_seconds or 0.0) if answers else 0.0
        self.token_seconds = average(self.token_seconds, max(0.0, seconds - alone) / prompt_tokens)

    def tokens(self, most: int) -> int:
        """Of prompts, in the next step beside answers."""
        if not self.answer_seconds or not self.token_seconds:
            return most
        return max(
            min(FEWEST, most), min(most, int(STRETCH * self.answer_seconds / self.token_seconds))
        )


def average(before: float | None, value: float) -> float:
    return value if before is None else (1 - NEW) * before + NEW * value
