import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from flyweight import cli


@pytest.fixture
def folder(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.float16),
               "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 8, dtype=torch.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "torch_dtype": "float16"}
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


def test_help_lists_every_verb_and_imports_nothing_slow():
    code = ("import sys\nfrom flyweight.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'transformers', 'numpy', 'rich.console', 'huggingface_hub') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {verb} " in done.stdout for verb in cli.VERBS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_arguments_show_the_help(flyweight):
    code, out, _ = flyweight()
    assert code == 0 and "pull" in out
    code, out, _ = flyweight("bench")
    assert code == 0 and "flyweight bench VERB" in out and "latency" in out


@pytest.mark.parametrize("verb", ["pull", "info"])
def test_verbs_have_help_with_examples(flyweight, verb):
    code, out, _ = flyweight(verb, "--help")
    assert code == 0 and "Examples" in out and f"flyweight {verb} smollm2-135m" in out


def test_version(flyweight):
    code, out, _ = flyweight("--version")
    assert code == 0 and out.startswith("flyweight ")


@pytest.mark.parametrize(("line", "message"), [
    ("bench latncy", "unknown command 'latncy'; did you mean 'latency'?"),
    ("inof x", "unknown command 'inof'; did you mean 'info'?"),
    ("info x --jsn", "unknown option '--jsn'; did you mean '--json'?"),
    ("--vresion", "unknown option '--vresion'; did you mean '--version'?"),
    ("info", "missing argument 'model'; see `flyweight info --help`"), ("info a b", "(b); see `flyweight info --help`"),
    ("pull --output", "'--output' requires an argument"), ("info ./nowhere", "./nowhere: no such file or folder"),
    ("pull smolm2-135m", "did you mean 'smollm2-135m'?"), ("pull . --dtype half", "unknown dtype 'half'"),
])
def test_every_mistake_is_one_line_and_exit_code_2(flyweight, line, message):
    code, out, error = flyweight(*line.split())
    assert code == 2 and out == ""
    assert error.startswith("flyweight: ") and error.count("\n") == 1
    assert message.lower() in error.lower()


@pytest.mark.parametrize("line", ["--debug info ./nowhere", "info --debug ./nowhere", "info ./nowhere --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(flyweight, line):
    code, _, error = flyweight(*line.split())
    assert code == 2 and "Traceback" in error and "CheckpointError" in error


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def broken(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["info", "x"])


def test_info_prints_a_table(flyweight, folder):
    code, out, _ = flyweight("info", folder)
    assert code == 0
    for part in ("LlamaForCausalLM, 1 layers", "float16 16.00", "mlp.down_proj", "4 × 8", "plain weight", str(folder)):
        assert part in out


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
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    code, _, error = flyweight("pull", folder, "--output", target)
    assert code == 2 and "exists already" in error


def test_pull_checks_what_it_got(flyweight, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-3])
    code, _, error = flyweight("pull", folder)
    assert code == 2 and "truncated" in error


def test_the_default_model_has_its_published_numbers(flyweight, smollm2):
    facts = json.loads(flyweight("info", smollm2, "--json")[1])
    assert (facts["layers"], facts["hidden_size"], facts["heads"], facts["kv_heads"]) == (30, 576, 9, 3)
    assert facts["parameters"] == 134_515_008 and facts["vocabulary"] == 49152 and facts["tied_embeddings"]
