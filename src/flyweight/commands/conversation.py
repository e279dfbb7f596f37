"""A conversation in the terminal: its messages, its settings, and the commands that change them.

Every command answers with a line that says what it did: a setting that was quietly ignored is
worse than none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyweight.engine.request import SamplingParams
from flyweight.errors import FlyweightError, OptionError, unknown
from flyweight.saving import write_text

COMMANDS = {  # name → (arguments, what it does)
    "/help": ("", "show this"),
    "/reset": ("", "forget the conversation; the system message and settings stay"),
    "/system": ("[TEXT]", "tell the model TEXT before the conversation, or nothing"),
    "/set": ("[NAME VALUE]", "such as /set temperature 0.2; alone: show all settings"),
    "/save": ("FILE", "write conversation and settings to FILE (JSON)"),
    "/load": ("FILE", "go on with a conversation that /save wrote"),
    "/exit": ("", "leave; so does Ctrl-D"),
}
SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)
ROLES = ("system", "user", "assistant")

Message = dict[str, str]


class Conversation:
    """Messages so far, the first of them perhaps a system message."""

    def __init__(self, params: SamplingParams, *, system: str | None = None):
        self.params = params
        self.system = system or None
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.turns]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def command(self, line: str) -> str:
        """Carry out `/NAME …`; what it says back. Mistakes are told, not raised."""
        name, *rest = line.split(maxsplit=1)
        if name not in COMMANDS:
            hint = 'a message that begins with / goes between """ and """'
            return f"{unknown('command', name, COMMANDS)} ({hint})"
        act = getattr(self, f"do_{name[1:]}")
        try:
            return act(rest[0].strip() if rest else "")
        except FlyweightError as error:
            return str(error)

    def do_help(self, _: str) -> str:
        width = max(len(f"{name} {arguments}") for name, (arguments, _) in COMMANDS.items())
        lines = [
            f"{f'{name} {arguments}':<{width}}  {text}"
            for name, (arguments, text) in COMMANDS.items()
        ]
        return "\n".join(
            [*lines, 'Ctrl-C stops an answer. """ begins and ends a message of several lines.']
        )

    def do_exit(self, _: str) -> str:
        return ""

    def do_reset(self, _: str) -> str:
        count = len(self.turns)
        self.turns.clear()
        return f"{count} messages forgotten"

    def do_system(self, text: str) -> str:
        self.system = text or None
        said = (
            f"the model is now told: {text}"
            if text
            else "the model is told nothing before the conversation"
        )
        return f"{said}{' (the conversation goes on; /reset starts over)' if self.turns else ''}"

    def do_set(self, rest: str) -> str:
        if not rest:
            return "\n".join(f"{name} = {shown(getattr(self.params, name))}" for name in SETTINGS)
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if name not in SETTINGS:
            raise OptionError(unknown("setting", name, SETTINGS))
        if not text.strip():
            return f"{name} = {shown(getattr(self.params, name))}"
        self.params = dataclasses.replace(self.params, **{name: value_of(name, text.strip())})
        return f"{name} is now {shown(getattr(self.params, name))}"

    def do_save(self, name: str) -> str:
        path = file_named(name, "/save")
        settings = {field: getattr(self.params, field) for field in SETTINGS}
        data = {"messages": self.messages, "settings": settings}
        write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
        return f"{len(self.messages)} messages written to {path}"

    def do_load(self, name: str) -> str:
        path = file_named(name, "/load")
        messages, settings = read_saved(path)
        self.params = dataclasses.replace(self.params, **settings)
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        self.system = first["content"] if first else None
        self.turns = messages[1:] if first else messages
        return f"{len(messages)} messages read from {path}"


def value_of(name: str, text: str) -> Any:
    """What SamplingParams takes; `none` leaves it open."""
    if text.lower() in ("none", "off"):
        return () if name == "stop" else None
    if name == "stop":
        return (text.encode().decode("unicode_escape") if text.isascii() else text,)
    try:
        return json.loads(text)
    except ValueError:
        return text  # SamplingParams says what is wrong with it


def shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def file_named(name: str, command: str) -> Path:
    if not name:
        raise OptionError(f"{command} needs a file, such as {command} talk.json")
    return Path(name).expanduser()


def read_saved(path: Path) -> tuple[list[Message], dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: not a saved conversation ({error})") from None
    messages = data.get("messages") if isinstance(data, Mapping) else None
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        raise OptionError(
            f'{path}: not a saved conversation: "messages" must be a list of {{role, content}}'
        )
    settings = data.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise OptionError(f'{path}: "settings" must be an object')
    return messages, {name: value for name, value in settings.items() if name in SETTINGS}


def is_message(item: Any) -> bool:
    return (
        isinstance(item, Mapping)
        and item.get("role") in ROLES
        and isinstance(item.get("content"), str)
    )
