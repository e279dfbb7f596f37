import errno
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from flyweight import cli
from flyweight.__main__ import main as entry
from flyweight.commands.bench import BENCHES
from flyweight.models.random_folder import write_preset


@pytest.fixture
def folder(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.float16),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def flyweight(capsys):
    """Run a command line: exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main([str(argument) for argument in arguments])
        return exit.value.code, *capsys.readouterr()

    return run


def test_ctrl_c_while_the_program_loads_is_one_line(monkeypatch, capsys):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "flyweight.cli", Interrupted("flyweight.cli"))
    monkeypatch.setattr(sys, "argv", ["flyweight", "--help"])
    with pytest.raises(SystemExit) as exit:
        entry()
    assert exit.value.code == 130 and capsys.readouterr().err == "flyweight: interrupted\n"


def test_help_lists_every_verb_and_imports_nothing_slow():
    code = (
        "import sys\nfrom flyweight.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'numpy', 'rich.console', 'huggingface_hub')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {verb} " in done.stdout for verb in cli.VERBS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_terminal_that_knows_only_ascii_gets_all_of_the_answer(tmp_path):
    """And files of this package are UTF-8 whatever the locale says."""
    write_preset("preset:tiny:int4", tmp_path / "model")
    locale = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(
        [sys.executable, "-m", "flyweight", "info", tmp_path / "model"],
        capture_output=True,
        env=os.environ | locale,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("ascii")
    assert r"\xd7" in shown and "runs on" in shown


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "")],
)
def test_waiting_threads_sleep_soon_unless_one_says_otherwise(given, found):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    } | given
    code = "import os, flyweight; print(os.environ.get('GOMP_SPINCOUNT', ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == found


def test_no_arguments_show_the_help(flyweight):
    code, out, _ = flyweight()
    assert code == 0 and "pull" in out
    code, out, _ = flyweight("bench")
    assert code == 0 and "flyweight bench VERB" in out and "latency" in out


@pytest.mark.parametrize(
    "verb",
    [*(verb for verb in cli.VERBS if verb != "bench"), *(f"bench {what}" for what in BENCHES)],
)
def test_verbs_have_help_with_examples(flyweight, verb):
    code, out, _ = flyweight(*verb.split(), "--help")
    assert code == 0 and "Examples" in out and f"flyweight {verb} " in out.partition("Examples")[2]


def examples():
    """Every command line that a help text, the README or a document shows."""
    root = Path(cli.__file__).parents[2]
    texts = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("src/flyweight/commands/*.py")]
    for text in texts:
        # a help text's longer commands go on in the next line, four columns to the right
        whole = re.sub(r"(?<=\S)\n {12}(?=\S)", " ", text.read_text(encoding="utf-8"))
        for line in whole.splitlines():
            command = re.fullmatch(
                r"\s*(?:\$ |cat \S+ \| |\w+=\S+ )?(flyweight [a-z].*)",
                line.split("  #")[0].rstrip(),
            )
            if command and "`" not in line and "VERB" not in line:
                yield pytest.param(shlex.split(command[1])[1:], id=f"{text.name}: {command[1]}")


@pytest.mark.parametrize("arguments", list(examples()))
def test_examples_name_verbs_and_options_that_there_are(arguments):
    command, names = typer.main.get_command(cli.app), ["flyweight"]
    while hasattr(command, "table"):
        names.append(arguments[0])
        command, arguments = command.get_command(None, arguments[0]), arguments[1:]
        assert command is not None, names
    command.make_context(" ".join(names), list(arguments))  # parses and checks, and runs nothing


def test_version(flyweight):
    code, out, _ = flyweight("--version")
    assert code == 0 and out.startswith("flyweight ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench latncy", "unknown command 'latncy'; did you mean 'latency'?"),
        ("inof x", "unknown command 'inof'; did you mean 'info'?"),
        ("info x --jsn", "unknown option '--jsn'; did you mean '--json'?"),
        ("--vresion", "unknown option '--vresion'; did you mean '--version'?"),
        ("info", "missing argument 'model'; see `flyweight info --help`"),
        ("info a b", "(b); see `flyweight info --help`"),
        ("pull --output", "'--output' requires an argument; see `flyweight pull --help`"),
        ("bench latency m --text", "requires an argument; see `flyweight bench latency --help`"),
        ("info ./nowhere", "./nowhere: no such file or folder"),
        ("pull smolm2-135m", "did you mean 'smollm2-135m'?"),
        ("pull . --dtype half", "unknown dtype 'half'"),
        ("convert smolm2-135m -o x --format awq", "did you mean 'smollm2-135m'?"),
        ("convert x -o y --format awq --device cpuu", "unknown device 'cpuu'; did you mean 'cpu'?"),
        (
            "convert x -o y --format onnx",
            "unknown format 'onnx'; known: awq, compressed-tensors, fp8, gguf",
        ),
        ("generate x --prompt y --device cuda:99", "--device cuda:99: torch"),
        ("generate x --prompt y --max-model-len 0", "'--max-model-len'"),
        ("quantize x -o y --eval nowhere.txt", "--eval nowhere.txt: no such file"),
        ("quantize x -o y --samples 0", "'--samples'"),
        ("bench latency x -o .", ". is a folder; a file for result rows (JSONL) is wanted"),
        ("eval x -o .", ". is a folder; a file for result rows (JSONL) is wanted"),
        (
            "bench latency preset:smollm2-135m --device cpu --option sed=1",
            "the native engine 'sed'; did you mean 'seed'?",
        ),
    ],
)
def test_every_mistake_is_one_line_and_exit_code_2(flyweight, line, message):
    code, out, error = flyweight(*line.split())
    assert code == 2 and out == ""
    assert error.startswith("flyweight: ") and error.count("\n") == 1
    assert message.lower() in error.lower()


@pytest.mark.parametrize(
    "line", ["--debug info ./nowhere", "info --debug ./nowhere", "info ./nowhere --debug"]
)
def test_debug_shows_the_traceback_wherever_it_stands(flyweight, line):
    code, _, error = flyweight(*line.split())
    assert code == 2 and "Traceback" in error and "CheckpointError" in error


def raising(error):
    def broken(**_):
        raise error

    return broken


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shapes do not match")])
def test_a_fault_of_the_program_is_not_hidden(monkeypatch, error):
    monkeypatch.setattr(cli, "app", raising(error))
    with pytest.raises(type(error)):
        cli.main(["info", "x"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/a"),
            "out/a: No space left on device; make room",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "out/a"),
            "out/a: Permission denied; choose a place that is yours",
        ),
        (OSError("odd"), "odd; --debug shows where"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            "out of GPU memory: 2.15 GB more could not be had; shorter contexts",
        ),
    ],
)
def test_what_the_machine_refuses_is_one_line(flyweight, monkeypatch, error, message):
    monkeypatch.setattr(cli, "app", raising(error))
    code, _, said = flyweight("info", "x")
    assert code == 2 and said.startswith(f"flyweight: {message}") and said.count("\n") == 1
    with pytest.raises(type(error)):
        cli.main(["info", "x", "--debug"])


@pytest.mark.parametrize(
    ("line", "work", "message"),
    [
        ("info x", "flyweight.checkpoint.hub.resolve", "flyweight: interrupted"),
        (
            "quantize x -o y",
            "flyweight.quant.quantize.quantize",
            "flyweight: interrupted; finished blocks are kept, "
            "and the same command with --resume goes on from there",
        ),
        (
            "bench latency preset:smollm2-135m --device cpu -o y.jsonl",
            "flyweight.bench.sweep.Sweep.run",
            "flyweight: interrupted; finished rows are in y.jsonl, "
            "and the same command goes on from there",
        ),
    ],
)
def test_ctrl_c_is_one_line_that_says_how_to_go_on(
    flyweight, monkeypatch, tmp_path, line, work, message
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(work, interrupted)
    code, _, said = flyweight(*line.split())
    assert code == 130 and said.strip() == message


def test_a_bench_that_measures_nothing_says_so_and_fails(flyweight, tmp_path):
    line = (
        "bench latency preset:smollm2-135m --device cpu "
        "--batch 1 --input 99999 --output 2 --no-check"
    )
    code, out, said = flyweight(*line.split(), "-o", tmp_path / "rows.jsonl")
    assert code == 1 and out == "" and "are more than the model's context of 8192" in said
    assert said.endswith(
        f"flyweight: nothing could be measured; the reasons are in {tmp_path / 'rows.jsonl'}\n"
    )


def test_info_prints_a_table(flyweight, folder):
    code, out, _ = flyweight("info", folder)
    assert code == 0
    for part in (
        "LlamaForCausalLM, 1 layers",
        "float16 16.00",
        "mlp.down_proj",
        "4 × 8",
        "plain weight",
        str(folder),
    ):
        assert part in out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(num_hidden_layers=9), "the files have 1 layers, and config.json speaks of 9"),
        (dict(hidden_size=48), "config.json speaks of a hidden size of 48"),
    ],
)
def test_info_says_where_the_files_are_of_another_size_than_the_config(
    flyweight, tmp_path, change, why
):
    from flyweight.models.random_folder import write_preset

    folder = write_preset("preset:tiny:bf16", tmp_path / "model", layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    code, out, _ = flyweight("info", folder, "--json")
    facts = json.loads(out)
    assert code == 0 and not facts["runs"] and why in facts["why_not"]


def test_generate_and_chat_want_a_tokenizer_and_say_so_at_once(flyweight, tmp_path):
    from flyweight.models.random_folder import write_preset

    folder = write_preset("preset:tiny:bf16", tmp_path / "model", layers=1)
    for model, help in ((folder, "copy tokenizer.json"), ("preset:tiny:bf16", "flyweight bench")):
        for verb in (["chat", model], ["generate", model, "--prompt", "a"]):
            code, _, error = flyweight(*verb, "--device", "cpu")
            assert code == 2 and "there is no tokenizer" in error and help in error
            assert len(error.strip().splitlines()) == 1


def test_info_as_json(flyweight, folder):
    code, out, _ = flyweight("info", folder, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["parameters"] == 72 and facts["bits_per_weight"] == {"float16": 16.0}
    assert facts["groups"][-1]["module"] == "mlp.down_proj" and facts["groups"][-1]["kernel"]


def test_pull_prints_where_the_model_is(flyweight, folder):
    code, out, _ = flyweight("pull", folder)
    assert code == 0 and str(folder) in out and "bytes" in out
    _, out, _ = flyweight("pull", folder, "--json")
    assert json.loads(out)["folder"] == str(folder)


def test_pull_copies_to_output_and_never_over_something(flyweight, folder, tmp_path):
    target = tmp_path.parent / f"{tmp_path.name}-copy"
    assert flyweight("pull", folder, "--output", target)[0] == 0
    assert (target / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    code, _, error = flyweight("pull", folder, "--output", target)
    assert code == 2 and "exists already" in error


def test_pull_checks_what_it_got(flyweight, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-3])
    code, _, error = flyweight("pull", folder)
    assert code == 2 and "truncated" in error


def test_the_default_model_has_its_published_numbers(flyweight, smollm2):
    facts = json.loads(flyweight("info", smollm2, "--json")[1])
    assert (facts["layers"], facts["hidden_size"], facts["heads"], facts["kv_heads"]) == (
        30,
        576,
        9,
        3,
    )
    assert (
        facts["parameters"] == 134_515_008
        and facts["vocabulary"] == 49152
        and facts["tied_embeddings"]
    )


@pytest.mark.parametrize(
    "line",
    [
        "pull {model} --output {place}",
        "report {rows} -o {place}.md",
        "bench latency x -o {place}/r",
    ],
)
def test_what_cannot_be_written_is_named(flyweight, folder, tmp_path, line):
    (tmp_path / "taken").write_text("a file where a folder would have to be")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps(
            {
                "schema": 1,
                "bench": "quality",
                "run_id": "a",
                "time": None,
                "environment": None,
                "status": "ok",
                "model": "m",
                "scheme": "s",
                "checkpoint": None,
                "perplexity": 2.0,
            }
        )
        + "\n"
    )
    place = tmp_path / "taken" / "out"
    code, _, error = flyweight(*line.format(model=folder, rows=rows, place=place).split())
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"flyweight: {place}") and "cannot be written" in error
