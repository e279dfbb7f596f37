"""How many of a thing a request may hold, checked before anything is done with them.

A body of a megabyte can hold 400,000 prompts, stop strings or wrong values: each costs more to look
at than to send. Lists end at their first wrong entry, because the report of a wrong entry takes a
kilobyte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BeforeValidator, FailFast
from pydantic_core import PydanticCustomError

MOST_PROMPTS = 2048  # the queue's own limit comes later, with better words
MOST_TOKENS = 1 << 20
MOST_MESSAGES = 10_000
MOST_PARTS = 10_000  # of one message
MOST_TOOLS = 512
MOST_STOPS = 64
LONGEST_STOP = 512  # characters
MOST_STOP_TOKENS = 256
MOST_BIAS = 300
MOST_TEMPLATE_ARGUMENTS = 64
MOST_SHOWN = 8  # unknown fields that are named
LONGEST_NAME = 80  # characters of an unknown field's name that are repeated


class EndAtFirstError(FailFast):
    __hash__ = object.__hash__  # it has none, which no union of types takes


FIRST_ERROR = EndAtFirstError()


def ignored_fields(names: Iterable[str], kind: str = "field") -> list[str]:
    """Warnings about unknown fields: the first few by their names, the others by their number."""
    strangers = list(names)
    warnings = [
        f"unknown {kind} {name[:LONGEST_NAME]!r} (ignored)" for name in strangers[:MOST_SHOWN]
    ]
    if len(strangers) > MOST_SHOWN:
        warnings.append(f"{len(strangers) - MOST_SHOWN} more unknown {kind}s (ignored)")
    return warnings


def check_count(value: Any, count: int) -> Any:
    if isinstance(value, (list, dict)) and len(value) > count:
        raise PydanticCustomError(
            "too_many", f"{len(value)} are too many; at most {count} can be given"
        )
    return value


def at_most(count: int) -> BeforeValidator:
    return BeforeValidator(lambda value: check_count(value, count))


def check_stop(value: Any) -> Any:
    check_count(value, MOST_STOPS)
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if long := next(
        (item for item in given if isinstance(item, str) and len(item) > LONGEST_STOP), None
    ):
        raise PydanticCustomError(
            "too_long",
            f"a stop string of {len(long)} characters is too long; {LONGEST_STOP} are taken",
        )
    return value


def check_prompt(value: Any) -> Any:
    """Token ids are many; texts and lists of ids are as few as the answers a server can hold."""
    if isinstance(value, list) and value:
        check_count(value, MOST_TOKENS if isinstance(value[0], int) else MOST_PROMPTS)
        if (
            isinstance(value[0], list)
            and sum(len(item) for item in value if isinstance(item, list)) > MOST_TOKENS
        ):
            raise PydanticCustomError(
                "too_many", f"the prompts have more than {MOST_TOKENS} tokens"
            )
    return value
