"""Keyword arguments that are checked by name, where signatures still tell what can be given.

A misspelt keyword must never vanish: it is an error that names the nearest known one.
`inspect.signature`, `help()` and editors must show the true list all the same, so nothing here
hides a signature behind `*args, **options`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flyweight.errors import FlyweightError, RequestError, unknown

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

NEAR = 0.75  # as near as a slip of the finger


def checked(what: str, error: type[FlyweightError]) -> Callable[[Kind], Kind]:
    """A class whose constructor refuses unknown keywords with the nearest known one."""

    def decorate(kind: Kind) -> Kind:
        construct = vars(kind)["__init__"]
        known = [name for name in inspect.signature(construct).parameters if name != "self"]

        @functools.wraps(construct)  # `inspect.signature` follows it to the true list
        def check(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    raise error(unknown(what, name, known))
            construct(self, *args, **options)

        setattr(kind, "__init__", check)  # noqa: B010 (assigning to a method is not typed)
        return kind

    return decorate


def takes_fields_of(kind: type) -> Callable[[Function], Function]:
    """A method whose `**options` stand for the fields of a dataclass: its signature lists them."""
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_of(field),
            annotation=field.type,
        )
        for field in dataclasses.fields(kind)
    ]

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        setattr(function, "__signature__", own.replace(parameters=[*named, *fields]))  # noqa: B010
        return function

    return decorate


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if callable(field.default_factory) else inspect.Parameter.empty


def refuse_unknown(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Of a call: the nearest name, or where an argument of the chat template belongs."""
    names = list(known)
    for name in options:
        if name in names:
            continue
        if difflib.get_close_matches(name, names, n=1, cutoff=NEAR):
            raise RequestError(unknown("keyword", name, names))
        raise RequestError(
            f"unknown keyword {name!r}; arguments of a chat template go into "
            f"chat_template_kwargs={{{name!r}: …}}, known keywords are: {', '.join(sorted(names))}"
        )
