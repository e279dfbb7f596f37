"""quantize and the comparing eval from the command line; scoring for lm-eval."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import TEXT, make_tiny_model

from flyweight import cli
from flyweight.errors import MissingPackageError
from flyweight.quant.evaluate import compare, perplexity
from flyweight.quant.lm_eval import evaluate_tasks, score_continuation
from flyweight.quant.recipe import named


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flyweight", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return make_tiny_model(tmp_path / "model"), tmp_path / "text.txt", tmp_path


def test_the_list_explains_every_scheme(call):
    code, out, _ = call("quantize", "--list", "--json")
    rows = {row["scheme"]: row for row in json.loads(out)}
    assert code == 0 and set(rows) == {*named(), "vptq:v8-k65536-256"}
    assert all(row["summary"] and row["bits"] and row["engines"] for row in rows.values())
    lines = call("quantize", "--list")[1].splitlines()
    for row in rows.values():  # a line each, for grep
        assert any(all(text in line for text in row.values()) for line in lines), row


def test_quantize_then_compare(call, files):
    model, text, folder = files
    for scheme in ("gptq-int4", "gptq-int8"):
        code, out, err = call(
            "quantize",
            model,
            "--scheme",
            scheme,
            "-o",
            folder / scheme,
            "--calibration",
            text,
            "--samples",
            4,
            "--length",
            48,
            "--eval",
            text,
            "--eval-tokens",
            200,
            "--device",
            "cpu",
        )
        assert code == 0, err
        assert "bits per weight" in out and "perplexity" in out and "layer error, worst" in out
    code, out, _ = call(
        "eval",
        model,
        folder / "gptq-int4",
        folder / "gptq-int8",
        "--text",
        text,
        "--tokens",
        200,
        "--window",
        64,
        "--device",
        "cpu",
        "--json",
    )
    assert code == 0
    original, four, eight = [json.loads(line) for line in out.splitlines()][1:]
    assert (
        "kl" not in original
        and four["kl"] > 10 * eight["kl"] > 0
        and four["top1_agreement"] < eight["top1_agreement"]
    )
    assert four["bits_per_weight"] < 6 < eight["bits_per_weight"] < original["bits_per_weight"]
    assert math.isclose(
        four["perplexity"], original["perplexity"] * math.exp(four["log_ratio"]), rel_tol=1e-6
    )
    assert (
        "KL"
        in call(
            "eval", model, folder / "gptq-int8", "--text", text, "--window", 40, "--device", "cpu"
        )[1]
    )


def test_a_context_shorter_than_the_usual_window_is_measured_in_windows_of_its_own(call, tmp_path):
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=32)
    (tmp_path / "text.txt").write_text(TEXT)
    measured = ("--device", "cpu", "--json")
    code, out, err = call(
        "quantize",
        model,
        "--scheme",
        "rtn-int8",
        "-o",
        tmp_path / "int8",
        "--eval",
        tmp_path / "text.txt",
        "--eval-tokens",
        100,
        *measured,
    )
    assert code == 0, err
    code, out, err = call(
        "eval", tmp_path / "int8", "--text", tmp_path / "text.txt", "--tokens", 100, *measured
    )
    assert code == 0 and json.loads(out.splitlines()[-1])["window"] in (31, 32), err
    code, _, err = call(
        "eval",
        tmp_path / "int8",
        "--text",
        tmp_path / "text.txt",
        "--window",
        33,
        "--device",
        "cpu",
    )
    assert code == 2 and "at most 3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "quantize needs a model and an output folder"),
        (["nowhere/", "-o", "x"], "nowhere"),
        (["preset:smollm2-135m", "-o", "x", "--scheme", "gtpq-int4"], "did you mean 'gptq-int4'"),
    ],
)
def test_mistakes_are_one_line(call, arguments, message):
    code, _, err = call("quantize", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1


class Fixed:
    """Predicts from a table of logits by the last token."""

    device = torch.device("cpu")

    def __init__(self, table):
        self.table, self.config = table, type("Config", (), {"context_length": 64})

    def forward_whole(self, tokens):
        return self.table[tokens]


def test_agreement_with_oneself_is_perfect_and_kl_is_that_of_the_tables():
    generator = torch.Generator().manual_seed(0)
    one, other = (Fixed(torch.randn(9, 9, generator=generator)) for _ in range(2))
    tokens = torch.randint(9, (300,), generator=generator).tolist()
    result, same = compare(one, one, tokens, window=50)
    assert abs(same.kl) < 1e-7 and same.top1 == 1 and same.log_ratio == 0
    assert result.perplexity == pytest.approx(perplexity(one, tokens, window=50).perplexity)
    _, found = compare(one, other, tokens, window=50)
    p, q = one.table.log_softmax(-1), other.table.log_softmax(-1)
    rows = (p.exp() * (p - q)).sum(-1)
    seen = [token for i, token in enumerate(tokens) if i % 50 != 49]
    assert found.kl == pytest.approx(float(rows[seen].mean()), rel=1e-5)


def test_continuations_are_scored_for_lm_eval():
    model = Fixed(torch.eye(5) * 10)  # every token predicts itself
    likely, greedy = score_continuation(model, [1], [1, 1])
    unlikely, wrong = score_continuation(model, [1], [1, 2])
    assert greedy and not wrong and likely > unlikely + 9


def test_tasks_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        evaluate_tasks("model", ["arc_easy"])
