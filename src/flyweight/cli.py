"""The command line: a table of verbs, each importing its own module only when it is used.

A verb is a function with typer annotations in `flyweight.commands.<module>`, named as the verb (`-` as `_`); its
docstring is the help text, examples included. User errors become one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys

import typer
from typer.core import TyperGroup

from flyweight.errors import FlyweightError

VERBS = {  # verb → (module:function, one line of help)
    "pull": ("flyweight.commands.pull:pull", "Get a model: a name, a hub id, or a GGUF file."),
    "info": ("flyweight.commands.info:info", "Show what a model is: layers, schemes, sizes, kernels."),
    "convert": ("flyweight.commands.convert:convert", "Write a quantized model in another file format."),
    "generate": ("flyweight.commands.generate:generate", "Complete a prompt."),
    "chat": ("flyweight.commands.chat:chat", "Talk with a model."),
    "eval": ("flyweight.commands.evaluate:evaluate", "Measure perplexity on a text."),
}


class Verbs(TyperGroup):
    def list_commands(self, ctx):
        return list(VERBS)

    def get_command(self, ctx, name):
        if name not in VERBS:
            return None
        module, function = VERBS[name][0].split(":")
        single = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]},
                             rich_markup_mode="markdown", pretty_exceptions_enable=False)
        single.command(name)(getattr(importlib.import_module(module), function))
        command = typer.main.get_command(single)
        command.name = name
        return command

    def resolve_command(self, ctx, args):
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from flyweight.errors import unknown

            ctx.fail(unknown("command", args[0], VERBS))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx, formatter):
        width = max(map(len, VERBS))
        typer.echo("Usage: flyweight VERB [OPTIONS]\n\nMake large language models small, fast and measured.\n")
        for verb, (_, text) in VERBS.items():
            typer.echo(f"  {verb:<{width}}  {text}")
        typer.echo("\nOptions: --debug shows tracebacks, --version, --help. `flyweight VERB --help` has examples.")


app = typer.Typer(cls=Verbs, add_completion=False, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


def show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"flyweight {version('flyweight')}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors."),
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Make large language models small, fast and measured."""
    if debug:
        os.environ["FLYWEIGHT_DEBUG"] = "1"


def main() -> None:
    try:
        app()
    except FlyweightError as error:
        if os.environ.get("FLYWEIGHT_DEBUG"):
            raise
        print(f"flyweight: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
