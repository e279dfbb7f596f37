"""What a user types into a chat: edited, remembered, and in several lines where wanted.

Readline edits the line, keeps the history in a file and completes commands. Several lines are one
message when they are pasted together, or between lines of three quotes.
"""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

BLOCK = '"""'
HISTORY = 1000  # lines


def messages(hint: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a command) until Ctrl-D. Ctrl-C drops the line and shows the hint."""
    while True:
        try:
            text, block = read_message()
        except KeyboardInterrupt:
            typer.echo(f"\n{hint}", err=True)
            continue
        except EOFError:
            typer.echo()
            return
        if text:
            yield text, not block and text.startswith("/")


def read_message() -> tuple[str, bool]:
    """(text, whether it stood between quotes)"""
    lines = [input("> " if sys.stdin.isatty() else "")]
    if lines[0].lstrip().startswith(BLOCK):
        return read_block(lines[0].lstrip().removeprefix(BLOCK)), True
    while more_is_waiting():
        lines.append(input())
    return "\n".join(lines).strip(), False


def read_block(first: str) -> str:
    """Until three quotes end a line; Ctrl-D ends it too."""
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        try:
            lines.append(input("… " if sys.stdin.isatty() else ""))
        except EOFError:
            break
    return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")


def more_is_waiting() -> bool:
    """Whether a terminal has the next line already: nobody types that fast, so it was pasted."""
    if not sys.stdin.isatty() or sys.platform == "win32":  # where only sockets can be waited for
        return False
    return bool(select.select([sys.stdin], [], [], 0)[0])


@contextlib.contextmanager
def editing(history: Path, commands: Iterable[str]) -> Iterator[None]:
    """Line editing with a history on a terminal, where Python has readline; else nothing."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):  # no history yet
        readline.read_history_file(history)
    names = sorted(commands)

    def complete(text: str, number: int) -> str | None:
        found = [name for name in names if text.startswith("/") and name.startswith(text)]
        return found[number] if number < len(found) else None

    readline.set_history_length(HISTORY)
    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is edited as a whole
    try:
        yield
    finally:
        save_history(history)


def save_history(history: Path) -> None:
    import readline

    with contextlib.suppress(OSError):  # a chat must not end with an error because of its history
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)  # nobody else's business
        readline.write_history_file(history)
