"""What a terminal of 80 columns shows: help, lists, progress; completion; options by name."""

import io
import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from flyweight import cli
from flyweight.commands import scheme_list
from flyweight.commands.bench import BENCHES
from flyweight.commands.progress_line import progress_line
from flyweight.errors import RequestError
from flyweight.quant.recipe import named

VERBS = [*(verb for verb in cli.VERBS if verb != "bench"), *(f"bench {what}" for what in BENCHES)]


@pytest.fixture
def flyweight(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("verb", VERBS)
def test_help_at_80_columns_names_every_option_whole(flyweight, verb):
    command = cli.Verbs(name="flyweight")
    for name in verb.split():
        command = command.get_command(None, name)
    _, out, _ = flyweight(*verb.split(), "--help")
    for parameter in command.params:
        for option in (
            (*parameter.opts, *parameter.secondary_opts)
            if parameter.opts[0].startswith("-")
            else ()
        ):
            assert re.search(rf"^  (.*[ /,])?{option}(?![\w-])", out, re.MULTILINE), option
    examples = [line for line in out.splitlines() if "flyweight " in line]
    assert examples and all(len(line) <= 80 for line in out.splitlines() if line not in examples)


def test_the_list_of_schemes_says_what_the_recipes_are_without_loading_torch():
    code = (
        "import sys\nfrom flyweight.cli import main\n"
        "try: main(['quantize', '--list'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    rows = {row["scheme"]: row for row in scheme_list.schemes()[:-1]}
    assert list(rows) == list(named())
    for name, recipe in named().items():
        layer = recipe.layer
        told = {
            "solver": layer.solver,
            "bits": layer.bits,
            "group_size": layer.group_size,
            "symmetric": layer.symmetric,
            "activations": layer.activations,
        }
        assert rows[name]["bits"] == scheme_list.bits_of(told), name
        assert (rows[name]["summary"], rows[name]["engines"]) == (recipe.summary, recipe.engines)


def test_the_list_of_schemes_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", type("Tty", (io.StringIO,), {"isatty": lambda _: True})())
    text = scheme_list.shown(scheme_list.schemes())
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "gptq-int4: 4, group 128 bits\n    fast to make" in text


@pytest.mark.parametrize("scheme", ["gptq-int4", "w8a8-sparse-smooth-gptq"])
def test_progress_at_80_columns_keeps_the_time_left(scheme):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    progress = progress_line(console, scheme, "blocks")
    task = progress.add_task("x", total=30)
    progress.update(
        task, completed=3, description="11.4 GB  layers.3.self_attn.q_proj error 1.23e-03 and more"
    )
    console.print(progress.get_renderable())
    line = console.file.getvalue().rstrip("\n")
    assert "\n" not in line and len(line) <= 80
    assert (
        re.search(r"3/30 +blocks +(-|\d+):[-\d]+:[-\d]+ +left", line)
        and "11.4 GB" in line
        and "…" in line
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate x --prompt y", "lower --max-model-len"),
        ("chat x", "lower --max-model-len"),
        ("eval x", "lower max_model_len"),  # has no such option
    ],
)
def test_errors_name_the_option_of_the_verb_in_use(flyweight, monkeypatch, line, said):
    def fail(**_):
        raise RequestError("needs 2 GB; lower max_model_len")

    monkeypatch.setattr(cli.Verbs, "invoke", lambda self, ctx: fail())
    code, _, error = flyweight(*line.split())
    assert code == 2 and error == f"flyweight: needs 2 GB; {said}\n"


def completions(words, current):
    environment = os.environ | {
        "COMP_WORDS": words,
        "COMP_CWORD": str(current),
        "_FLYWEIGHT_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-m", "flyweight"], capture_output=True, text=True, env=environment
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "current", "found"),
    [
        ("flyweight gen", 1, ["generate"]),
        ("flyweight bench l", 2, ["latency"]),
        ("flyweight generate --max", 2, ["--max-tokens", "--max-model-len"]),
        ("flyweight quantize --scheme gptq", 3, ["gptq-int3", "gptq-int4", "gptq-int8"]),
    ],
)
def test_tab_completes_verbs_options_and_schemes(words, current, found):
    assert completions(words, current) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_the_shell_that_is_named(
    flyweight, monkeypatch, tmp_path, shell
):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, error = flyweight("--install-completion", shell)
    assert code == 0, error
    path = next(word.rstrip(";") for word in out.split() if word.startswith(str(tmp_path)))
    with open(path) as file:
        script = file.read()
    assert "_FLYWEIGHT_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", path], check=True)  # reads it, runs nothing
    assert flyweight("--show-completion", shell)[1].strip() == script.strip()


def test_an_unknown_shell_is_named(flyweight):
    code, _, error = flyweight("--install-completion", "fisch")
    assert (
        code == 2
        and error
        == "flyweight: --install-completion: unknown shell 'fisch'; did you mean 'fish'?\n"
    )
