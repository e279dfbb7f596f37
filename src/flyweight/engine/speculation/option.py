"""`--speculate WHAT`: the words of the option, and the speculator that they ask for."""

from __future__ import annotations

from dataclasses import dataclass

from flyweight.errors import OptionError, unknown

KINDS = ("off", "ngram", "model", "auto")
GUESSES = {"ngram": 7, "model": 4}  # in a step, unless a number is given
MOST_GUESSES = 15  # a step's rows of one sequence are 16 at most


@dataclass(frozen=True)
class Speculation:
    """What was asked for: `kind`, the drafter's folder where it is a model, and guesses in a step (None: as it pays)."""

    kind: str = "off"
    model: str | None = None
    guesses: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> Speculation:
        """off, auto, ngram[:GUESSES] or model:NAME[:GUESSES]."""
        kind, _, rest = (text or "off").partition(":")
        if kind == "eagle3":
            raise OptionError("speculate: eagle3 heads cannot be run yet; use ngram, model:NAME or auto")
        if kind not in KINDS:
            raise OptionError(unknown("value of speculate", kind, KINDS))
        if kind in ("off", "auto") and rest:
            raise OptionError(f"speculate: {kind} takes nothing behind it, not {rest!r}")
        name, count = split_count(rest) if kind == "model" else (None, rest)
        if kind == "model" and not name:
            raise OptionError("speculate: model needs a model that guesses, such as model:smollm2-135m")
        if count and not (count.isdigit() and 1 <= int(count) <= MOST_GUESSES):
            raise OptionError(f"speculate: a step takes 1 to {MOST_GUESSES} guesses, not {count}")
        return cls(kind, name, int(count) if count else GUESSES.get(kind))


def split_count(text: str) -> tuple[str, str]:
    """A name may have colons of its own (preset:NAME:SCHEME); only a last part of digits is a number of guesses."""
    name, colon, last = text.rpartition(":")
    return (name, last) if colon and last.isdigit() else (text, "")
