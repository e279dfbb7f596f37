"""Errors that are the user's to solve. The CLI prints each in one line and exits with code 2.

Each message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlyweightError(Exception):
    """Base of every error that a user can cause and mend."""


class CheckpointError(FlyweightError):
    """A model folder or file cannot be read: it names the file and the tensor."""


class UnsupportedError(FlyweightError):
    """A model, format or option that Flyweight knows of but does not handle."""


class OptionError(FlyweightError):
    """An unknown or contradictory option."""


class RequestError(FlyweightError):
    """A prompt or sampling request that cannot be served (too long, bad parameter)."""


class ResourceError(FlyweightError):
    """Out of memory, disk or another resource; what was finished is kept."""


class ResultError(FlyweightError):
    """A result file cannot be read or joined: it names the file and the line."""


class MissingPackageError(FlyweightError):
    """An optional package is needed; the message holds the install command."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown scheme 'gptq-int5'; did you mean 'gptq-int4'?`, or the whole list where nothing is
    near.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"
