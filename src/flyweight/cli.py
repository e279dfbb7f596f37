"""The command line: a table of verbs, each importing its own module only when it is used.

A verb is a function with typer annotations in `flyweight.commands.<module>`, named as the verb (`-`
as `_`); its docstring is the help text, examples included. A verb that is a dictionary is a group
with a table of its own. What the user got wrong, in a command line or a model, and what the machine
refused (a full disk, no permission) becomes one line on stderr and exit code 2; `--debug`,
anywhere, shows the traceback instead. Ctrl-C is one line and exit code 130.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

import flyweight
from flyweight import shortage
from flyweight.errors import FlyweightError, unknown

# of click, or of the copy of it inside newer typers
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

VERBS = {  # verb → (module:function, one line of help)
    "pull": ("flyweight.commands.pull:pull", "Get a model: a name, a hub id, or a GGUF file."),
    "models": (
        "flyweight.commands.models:models",
        "List the models on this machine; `list` does the same.",
    ),
    "list": ("flyweight.commands.models:list_models", "The same as `models`."),
    "rm": ("flyweight.commands.models:rm", "Delete models from the cache."),
    "info": (
        "flyweight.commands.info:info",
        "Show what a model is: layers, schemes, sizes, kernels.",
    ),
    "quantize": ("flyweight.commands.quantize:quantize", "Make a smaller copy of a model."),
    "convert": (
        "flyweight.commands.convert:convert",
        "Write a quantized model in another file format.",
    ),
    "compile": (
        "flyweight.commands.compile:compile",
        "Compile the CUDA kernels of models ahead of their first start.",
    ),
    "generate": ("flyweight.commands.generate:generate", "Complete a prompt."),
    "chat": ("flyweight.commands.chat:chat", "Talk with a model."),
    "serve": ("flyweight.commands.serve:serve", "Serve a model over HTTP, as the OpenAI API does."),
    "ps": ("flyweight.commands.models:ps", "Show the servers that run on this machine."),
    "eval": (
        "flyweight.commands.evaluate:evaluate",
        "Measure perplexity on a text, and how close models are.",
    ),
    "bench": (
        "flyweight.commands.bench:BENCHES",
        "Measure latency, speed, throughput, serving and kernels.",
    ),
    "doctor": (
        "flyweight.commands.doctor:doctor",
        "Check this machine: GPU, kernels, speed, exactness.",
    ),
    "profile": (
        "flyweight.commands.profile:profile",
        "Show which operators and kernels the time goes to.",
    ),
    "report": ("flyweight.commands.report:report", "Tables and figures from result files."),
    "diff": (
        "flyweight.commands.diff:diff",
        "Compare two result files; exit code 1 if something got slower.",
    ),
}


class Interrupted(Exception):
    """Ctrl-C, in a form that no version of typer turns into something else on its way here."""


SETTINGS = {"help_option_names": ["-h", "--help"]}


class Verbs(TyperGroup):
    """`flyweight VERB` and, with another table, `flyweight bench WHAT`."""

    table = VERBS
    about = "Make large language models small, fast and measured."

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx):
        return list(self.table)

    def get_command(self, ctx, name):
        if name not in self.table:
            return None
        module, function = self.table[name][0].split(":")
        target = getattr(importlib.import_module(module), function)
        if isinstance(target, dict):
            group = type("Group", (Verbs,), {"table": target, "about": self.table[name][1]})
            return group(name=name, context_settings=SETTINGS)
        from flyweight.commands.help_page import PlainHelp

        single = typer.Typer(
            add_completion=False,
            context_settings=SETTINGS,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )
        single.command(name, cls=PlainHelp)(target)
        command = typer.main.get_command(single)
        command.name = name
        return command

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.table and not args[0].startswith("-"):
            ctx.fail(unknown("command", args[0], self.table))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx, formatter):
        width = max(map(len, self.table))
        typer.echo(f"Usage: {ctx.command_path} VERB [OPTIONS]\n\n{self.about}\n")
        for verb, (_, text) in self.table.items():
            typer.echo(f"  {verb:<{width}}  {text}")
        typer.echo(f"\n`{ctx.command_path} VERB --help` has examples. --debug shows tracebacks.")
        if self.table is VERBS:
            typer.echo(
                "--version; --install-completion [bash, zsh or fish] lets Tab complete "
                "verbs and options."
            )


app = typer.Typer(
    cls=Verbs, add_completion=True, pretty_exceptions_enable=False, context_settings=SETTINGS
)


def show_version(value: bool) -> None:
    if value:
        typer.echo(f"flyweight {flyweight.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Make large language models small, fast and measured."""


def describe(error, arguments: Sequence[str] = ()) -> str:
    """A usage error in one line, with the nearest option or where to read on."""
    context = error.ctx
    if (
        context is not None
        and (name := getattr(error, "option_name", None))
        and error.__class__.__name__ == "NoSuchOption"
    ):
        known = [
            option
            for parameter in context.command.params
            for option in parameter.opts
            if option.startswith("-")
        ]
        return unknown("option", name, [*known, "--help"])
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    if "did you mean" in message or "known:" in message:
        return message
    where = context.command_path if context else " ".join(["flyweight", *verbs_of(arguments)])
    return f"{message}; see `{where} --help`"


def verbs_of(arguments: Sequence[str]) -> list[str]:
    """The first words, as far as they name a command."""
    command: Any = typer.main.get_command(app)
    found: list[str] = []
    for word in arguments:
        if not hasattr(command, "table") or (command := command.get_command(None, word)) is None:
            break
        found.append(word)
    return found


def by_option(text: str, arguments: Sequence[str]) -> str:
    """What Python calls max_model_len is --max-model-len to whoever typed a verb that has it."""
    command: Any = typer.main.get_command(app)
    for word in arguments:
        if not hasattr(command, "table") or (command := command.get_command(None, word)) is None:
            break
    for parameter in getattr(command, "params", ()):
        option = f"--{parameter.name.replace('_', '-')}"
        if "_" in parameter.name and option in parameter.opts:
            text = re.sub(rf"(?<![\w-]){parameter.name}(?!\w)", option, text)
    return text


def refused(error: OSError | MemoryError | RuntimeError) -> str:
    """What the machine would not do, in one line, and what helps."""
    if text := shortage.describe(error):
        return text
    if not isinstance(error, OSError):
        return (
            f"out of memory ({str(error).split('.')[0] or 'no more to be had'}); use a smaller "
            f"model, scheme, batch or context"
        )
    hints = {
        errno.ENOSPC: "make room",
        errno.EDQUOT: "make room",
        errno.EFBIG: "raise the limit (`ulimit -f`)",
        errno.EACCES: "choose a place that is yours",
        errno.EPERM: "choose a place that is yours",
        errno.EROFS: "choose another place",
        errno.EMFILE: "raise the limit (`ulimit -n`)",
    }
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; {hints.get(error.errno or 0, '--debug shows where')}"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if debug := "--debug" in arguments:
        arguments.remove("--debug")
    warnings.formatwarning = lambda message, *_, **__: f"flyweight: {message}\n"  # no line of code
    try:
        if arguments and arguments[0] in ("--install-completion", "--show-completion"):
            importlib.import_module("flyweight.commands.completion").complete(arguments)
            sys.exit(0)
        code = app(args=arguments, prog_name="flyweight", standalone_mode=False)
    except (FlyweightError, UsageError) as error:
        if debug:
            traceback.print_exc()
        else:
            text = (
                by_option(str(error), arguments)
                if isinstance(error, FlyweightError)
                else describe(error, arguments)
            )
            print(f"flyweight: {text}", file=sys.stderr)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        print(f"flyweight: interrupted{f'; {error}' if str(error) else ''}", file=sys.stderr)
        sys.exit(130)
    except (
        BrokenPipeError
    ):  # `| head` has seen enough; nothing can be told on a pipe that nobody reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as the shell says of a program that SIGPIPE ended
    except (OSError, MemoryError, RuntimeError) as error:
        if debug or (
            isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError"
        ):
            raise
        print(f"flyweight: {refused(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
