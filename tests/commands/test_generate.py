"""`flyweight generate`: text as it is made, wherever it goes, and kept when a signal ends it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import Scripted

from flyweight import cli

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import flyweight.commands.generate as verb
from scripted import Scripted

class Waiting(Scripted):
    def stream(self, *arguments, **options):
        stream = super().stream(*arguments, **options)
        class Slow(type(stream)):
            def __iter__(self):
                for chunk in super().__iter__():
                    yield chunk
                    sys.stdin.readline()  # the test lets it go on
        stream.__class__ = Slow
        return stream

verb.load = lambda *_, **__: Waiting()
from flyweight.cli import main
main(["generate", "any", "--prompt", "x"])
"""


@pytest.fixture
def generate(monkeypatch, capsys):
    """Run the verb on a scripted model: exit code, stdout, stderr."""

    def run(model, *arguments):
        monkeypatch.setattr("flyweight.commands.generate.load", lambda *_, **__: model)
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", "any", "--prompt", "x", *arguments])
        return end.value.code or 0, *capsys.readouterr()

    return run


def test_a_reader_of_a_pipe_sees_each_piece_when_it_is_made():
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert os.read(process.stdout.fileno(), 100) == b"one "  # while the program waits for us
    rest, _ = process.communicate(b"\n\n\n\n")
    assert rest == b"two three four\n" and process.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_made(generate, number, code):
    before = signal.getsignal(number)
    model = Scripted(interrupt_at=1, signal=number)
    found, out, error = generate(model)
    assert (found, out) == (code, "one two \n")
    assert model.closed and signal.getsignal(number) is before
    assert f"stopped by {number.name}" in error


def test_a_signal_keeps_the_json_whole(generate):
    code, out, _ = generate(Scripted(interrupt_at=2), "--json")
    assert code == 130
    assert json.loads(out)["completions"][0] | {"timing": 0} == {
        "index": 0,
        "text": "one two three ",
        "token_ids": [0, 1, 2],
        "finish_reason": "cancelled",
        "stop_reason": None,
        "logprobs": None,
        "timing": 0,
        "cached_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_without_max_tokens_the_length_is_left_to_the_model(generate):
    model = Scripted()
    assert generate(model)[0] == 0
    assert "max_tokens" not in model.seen[0][1]
    generate(model, "--max-tokens", "7")
    assert model.seen[1][1]["max_tokens"] == 7


def test_a_reader_that_has_seen_enough_is_no_error():
    program = (
        "from flyweight import cli\nimport typer\n"
        "cli.app = lambda **_: [typer.echo('x' * 100) for _ in range(9999)]\ncli.main([])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
