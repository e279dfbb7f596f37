"""The help of a verb, plain enough for 80 columns: no option's name is cut, no example broken."""

from __future__ import annotations

import inspect
import textwrap
import typing
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

KINDS: dict[Any, str] = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
NAMES = 26  # columns for names; a longer one has a line of its own


class PlainHelp(TyperCommand):
    """A command whose `--help` is text in two columns, without frames."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        needed = [
            one.name.upper() + ("…" if one.nargs != 1 else "")
            for one in self.params
            if one.param_type_name == "argument"
        ]
        formatter.write(f"Usage: {' '.join([ctx.command_path, '[OPTIONS]', *needed])}\n\n")
        formatter.write(described(self.help or "", formatter.width))
        kinds = kinds_of(self.callback)
        for title, wanted in (("Arguments", "argument"), ("Options", "option")):
            rows = [
                row_of(parameter, kinds.get(parameter.name, "TEXT"))
                for parameter in self.get_params(ctx)
                if parameter.param_type_name == wanted and not getattr(parameter, "hidden", False)
            ]
            if rows:
                formatter.write(f"\n{title}:\n")
                for name, text in rows:
                    formatter.write(two_columns(name, text, formatter.width))


def described(text: str, width: int) -> str:
    """Paragraphs filled to the width; indented ones are commands to be copied, and stay so."""
    shown = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith(" "):
            shown.append(textwrap.indent(textwrap.dedent(paragraph), "  "))
        else:
            shown.append(textwrap.fill(" ".join(paragraph.split()), width))
    return "\n\n".join(shown) + "\n"


def kinds_of(function: Any) -> dict[str, str]:
    """What each parameter of a verb takes: TEXT, N (whole), X (a number) or PATH."""
    hints = typing.get_type_hints(inspect.unwrap(function))
    kinds = {}
    for name, hint in hints.items():
        inner = [hint]
        while typing.get_args(inner[0]):  # int | None, list[str]
            inner = [part for part in typing.get_args(inner[0]) if part is not type(None)]
        kinds[name] = KINDS.get(inner[0], "TEXT")
    return kinds


def row_of(parameter: Any, kind: str) -> tuple[str, str]:
    """(names with the kind of value, help with the default), from what every typer has."""
    text = getattr(parameter, "help", None) or ""
    if parameter.param_type_name == "argument":
        return parameter.name.upper(), text
    short, long = (sorted(names, key=len) for names in (parameter.opts, parameter.secondary_opts))
    names = ", ".join(short) + (f" / {', '.join(long)}" if long else "")
    value = "" if parameter.is_flag else f" {kind}"
    notes = []
    if parameter.required:
        notes.append("required")
    elif worth_showing(parameter):
        notes.append(f"default: {parameter.default}")
    return names + value, f"{text} [{', '.join(notes)}]" if notes else text


def worth_showing(parameter: Any) -> bool:
    default = parameter.default
    return not parameter.is_flag and isinstance(default, (str, int, float, Path)) and default != ""


def two_columns(name: str, text: str, width: int) -> str:
    indent = " " * (NAMES + 4)
    lines = textwrap.wrap(" ".join(text.split()), max(20, width - len(indent)))
    if len(name) > NAMES or not lines:
        return f"  {name}\n" + "".join(f"{indent}{line}\n" for line in lines)
    first, *rest = lines
    return f"  {name:<{NAMES}}  {first}\n" + "".join(f"{indent}{line}\n" for line in rest)
