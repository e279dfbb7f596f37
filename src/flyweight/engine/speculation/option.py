"""`--speculate WHAT`: the words of the option, and the speculator that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flyweight.errors import OptionError, unknown

KINDS = ("off", "ngram", "model", "eagle3", "mtp", "auto")
NAMED = {  # kinds that need a name behind them, and what of
    "model": "a model that guesses, such as model:smollm2-135m",
    "eagle3": "a folder with a head, such as eagle3:./my-head",
}
BESIDE_AUTO = ("model", "eagle3", "mtp")  # who guesses where n-grams find nothing
# in a step, unless a number is given; others: as many as pay
GUESSES = {"model": 4, "eagle3": 3, "mtp": 3}
MOST_GUESSES = 15  # a step's rows of one sequence are 16 at most


@dataclass(frozen=True)
class Speculation:
    """What was asked for: `kind`, the drafter's folder where it has one, and guesses in a step
    (None: as it pays).
    """

    kind: str = "off"
    model: str | None = None
    guesses: int | None = None
    while_it_pays: bool = False  # where it does not, n-grams alone

    @classmethod
    def parse(cls, text: str | None) -> Speculation:
        """off, auto, ngram[:GUESSES], mtp[:GUESSES], model:NAME[:GUESSES], eagle3:NAME[:GUESSES],
        or auto: and one of the last three.
        """
        kind, _, rest = (text or "off").partition(":")
        if kind not in KINDS:
            raise OptionError(unknown("value of speculate", kind, KINDS))
        if kind == "auto" and rest.partition(":")[0] in BESIDE_AUTO:
            return replace(cls.parse(rest), while_it_pays=True)
        if kind in ("off", "auto") and rest:
            more = f" but {', '.join(BESIDE_AUTO)}" if kind == "auto" else ""
            raise OptionError(f"speculate: {kind} takes nothing behind it{more}, not {rest!r}")
        name, count = split_count(rest) if kind in NAMED else (None, rest)
        if kind in NAMED and not name:
            raise OptionError(f"speculate: {kind} needs {NAMED[kind]}")
        if count and not (count.isdigit() and 1 <= int(count) <= MOST_GUESSES):
            raise OptionError(f"speculate: a step takes 1 to {MOST_GUESSES} guesses, not {count}")
        return cls(kind, name, int(count) if count else GUESSES.get(kind))

    @property
    def is_head(self) -> bool:
        """Whether it reads the model's hidden states."""
        return self.kind in ("eagle3", "mtp")


def split_count(text: str) -> tuple[str, str]:
    """A name may have colons of its own (preset:NAME:SCHEME); only a last part of digits is a
    number of guesses.
    """
    name, colon, last = text.rpartition(":")
    return (name, last) if colon and last.isdigit() else (text, "")
