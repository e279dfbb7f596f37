"""generate and eval on a real model; tests/commands/ has what needs none."""

import io
import json

import pytest

from flyweight.cli import main
from flyweight.commands.evaluate import read_text
from flyweight.quant import calibration
from flyweight.quant.subject import encode


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["flyweight", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


def test_generate_prints_the_text_on_stdout_and_the_speed_on_stderr(monkeypatch, capsys, smollm2):
    options = [
        "generate",
        smollm2,
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    ]
    assert call(monkeypatch, *options) == 0
    captured = capsys.readouterr()
    assert (
        captured.out.startswith(" Paris")
        and "tok/s" in captured.err
        and "memory: weights 0." in captured.err
    )
    assert call(monkeypatch, *options, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert (
        row["completions"][0]["text"].startswith(" Paris")
        and row["completions"][0]["finish_reason"] == "length"
    )
    assert row["prompt_tokens"] == 5 and row["completions"][0]["timing"]["ttft_s"] > 0


def test_eval_prints_rows_that_say_how_it_was_measured(monkeypatch, capsys, smollm2, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 6)
    assert (
        call(
            monkeypatch,
            "eval",
            smollm2,
            "--text",
            text,
            "--window",
            "24",
            "--tokens",
            "40",
            "--json",
        )
        == 0
    )
    environment, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert (
        row["environment"] == environment["id"]
        and row["bench"] == "quality"
        and row["status"] == "ok"
    )
    assert (row["window"], row["stride"], row["bos"], row["tokens"]) == (24, 24, False, 38)
    assert (
        row["perplexity"] > 1
        and row["perplexity_error"] > 0
        and row["scheme"] == "fp16"
        and row["bits_per_weight"] == 16
    )


def test_eval_has_a_text_of_its_own_and_writes_the_rows_it_shows(
    monkeypatch, capsys, smollm2, tmp_path
):
    assert (
        call(monkeypatch, "eval", smollm2, "--tokens", "20", "-o", tmp_path / "quality.jsonl") == 0
    )
    assert "window 512, stride 512, no BOS" in capsys.readouterr().out
    environment, row = map(json.loads, (tmp_path / "quality.jsonl").read_text().splitlines())
    assert row["environment"] == environment["id"] and (row["text"], row["tokens"]) == (
        "built-in",
        19,
    )


def test_the_built_in_text_of_eval_is_not_calibrated_on():
    calibrated = calibration.read_text(calibration.BUILT_IN)
    sentences = [
        part for part in read_text("built-in").replace("\n", " ").split(". ") if len(part) > 20
    ]
    assert len(sentences) > 50 and not [part for part in sentences if part in calibrated]


def test_a_prompt_on_standard_input_must_be_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 is"), encoding="utf-8"))
    assert call(monkeypatch, "generate", "m", "--prompt", "-") == 2
    assert (
        capsys.readouterr().err
        == "flyweight: standard input is not utf-8 text (invalid continuation byte at byte 4)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "m", "--text", "nowhere.txt"], "--text nowhere.txt: no such file"),
        (["generate", "m", "--prompt", ""], "the prompt is empty"),
        (["generate", "m", "--prompt", "x", "--top-p", "2"], "--top-p must lie between"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_a_tokenizer_that_begins_texts_with_bos_gets_one_per_window():
    class WithBos:
        bos_token_id = 1

        def encode(self, text, add_special_tokens=True, **_):
            return [1] * add_special_tokens + [ord(letter) for letter in text]

    assert encode(WithBos(), "hi") == ([104, 105], 1)


def test_a_prompt_beyond_the_context_is_one_line_and_exit_code_2(monkeypatch, capsys, smollm2):
    prompt = "one two three four five six seven eight nine ten"
    assert call(monkeypatch, "generate", smollm2, "--prompt", prompt, "--max-model-len", "8") == 2
    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if line.startswith("flyweight: ")]
    assert "the prompt has 10 tokens, but the context holds 8" in told and "--max-model-len" in told
