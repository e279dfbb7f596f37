"""`--install-completion [SHELL]` and `--show-completion [SHELL]`: Tab in bash, zsh and fish."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flyweight.errors import OptionError, unknown

OPTIONS = ("--install-completion", "--show-completion")
SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_FLYWEIGHT_COMPLETE"  # what the shell's function sets, and typer looks for


def complete(arguments: Sequence[str]) -> None:
    """Install the function of a shell, or show it to be put elsewhere."""
    from typer.completion import get_completion_script, install

    option, *rest = arguments
    shell = rest[0] if rest else this_shell()
    if shell not in SHELLS or len(rest) > 1:
        raise OptionError(f"{option}: {unknown('shell', ' '.join(rest) or str(shell), SHELLS)}")
    if option == "--show-completion":
        typer.echo(get_completion_script(prog_name="flyweight", complete_var=VARIABLE, shell=shell))
        return
    _, path = install(shell=shell, prog_name="flyweight", complete_var=VARIABLE)
    typer.echo(f"completion for {shell} is in {path}; it works in shells started from now on")


def this_shell() -> str:
    import shellingham

    try:
        return shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        raise OptionError(
            f"the shell cannot be told; name it: flyweight --install-completion {SHELLS[0]}"
        ) from None
