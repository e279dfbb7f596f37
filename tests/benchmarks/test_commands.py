"""Commands in processes that stood by: each runs alone, is ended when its time is over, and stops
none of the others.
"""

import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from flyweight import cli

COMMANDS = Path(__file__).parents[2] / "benchmarks" / "workshop" / "commands.py"


@pytest.fixture
def scripts(tmp_path):
    (tmp_path / "note.py").write_text(
        "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"
    )
    (tmp_path / "fail.py").write_text("print('the reason'); raise SystemExit(3)")
    (tmp_path / "hang.py").write_text("import signal; signal.pause()")
    return tmp_path


def start(folder, lines, **more):
    plan = folder / "plan"
    plan.write_text("\n".join(lines))
    environment = {"TMPDIR": str(folder), "PATH": "/usr/bin:/bin"} | more
    return subprocess.Popen(
        [sys.executable, COMMANDS, plan], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_every_command_runs_although_others_fail_or_hang(scripts):
    process = start(
        scripts,
        [
            f"first 60 {scripts}/note.py {scripts}/out 'two words'",
            f"bad 60 {scripts}/fail.py",
            f"slow 1 {scripts}/hang.py",
            f"last 60 {scripts}/note.py {scripts}/out last",
        ],
    )
    told, _ = process.communicate(timeout=100)
    assert (scripts / "out").read_text() == "two words\nlast\n"
    assert (
        "bad:" in told
        and "exit code 3\nthe reason" in told
        and "slow:" in told
        and "that was its time" in told
    )
    assert process.returncode == 1 and (scripts / "first.log").exists()


def test_a_process_that_ended_before_its_turn_fails_alone(scripts):
    (scripts / "torch.py").write_text("raise SystemExit(7)")  # what stands by imports it, and ends
    process = start(
        scripts,
        [f"{name} 60 {scripts}/note.py {scripts}/out {name}" for name in ("one", "two", "three")],
        PYTHONPATH=str(scripts),
    )
    told, _ = process.communicate(timeout=100)
    assert (
        told.count("exit code 7") == 3
        and process.returncode == 1
        and not (scripts / "out").exists()
    )
    commands = runpy.run_path(str(COMMANDS))
    gone = subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True)
    gone.wait()
    assert commands["tell"](gone, ["flyweight"]) is False


def test_ending_the_plan_ends_what_it_started(scripts):
    (scripts / "hang.py").write_text(
        f"import os, signal; open('{scripts}/pid', 'w').write(str(os.getpid())); signal.pause()"
    )
    process = start(
        scripts, [f"slow 60 {scripts}/hang.py", f"next 60 {scripts}/note.py {scripts}/out never"]
    )
    deadline = time.monotonic() + 60
    while not (scripts / "pid").exists() or not (scripts / "pid").read_text():
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert not Path("/proc", (scripts / "pid").read_text(), "cmdline").exists()
    assert not (scripts / "out").exists()


def test_every_piece_becomes_a_command_line_that_the_package_knows(tmp_path):
    """The plan of all pieces, parsed by the commands themselves: a wrong option would cost time on
    the machine with the GPU.
    """
    root = COMMANDS.parents[2]
    stub = tmp_path / "python3"
    stub.write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/plan\n')
    stub.chmod(0o755)
    for tried in ("", "1"):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "OUT": str(tmp_path / "out"),
            "TEXT": "text.txt",
            "TRY": tried,
        }
        pieces = (
            "all",
            "warm",
            "document-003",
            "document-004",
            "vllm-prefill",
            "cross-check",
            "options",
            "families",
            "warm-long",
        )
        subprocess.run(
            [root / "benchmarks/h200/measure.sh", *pieces], cwd=root, env=environment, check=True
        )
        check_lines((tmp_path / "plan").read_text().splitlines(), root)


def planned(tmp_path, *pieces, **more):
    """Lines of the plan of these pieces, and what was printed where there is none."""
    stub = tmp_path / "python3"
    stub.write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/plan\n')
    stub.chmod(0o755)
    root = COMMANDS.parents[2]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), **more}
    done = subprocess.run(
        [root / "benchmarks/h200/measure.sh", *pieces],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    return (tmp_path / "plan").read_text().splitlines() if done.returncode == 0 else done.stdout


def test_long_contexts_are_measured_in_parts(tmp_path):
    whole = planned(tmp_path, "long")
    assert len(whole) == 9 and planned(tmp_path, "long-bf16-model") == [
        line for line in whole if line.startswith("long-bf16-model ")
    ]
    (line,) = planned(tmp_path, "long-w8a8-fp8")
    words = shlex.split(line)
    assert "preset:qwen3-8b-yarn:w8a8" in words and words[words.index("--kv-dtype") + 1] == "fp8"
    assert (
        words[words.index("-o") + 1] == "options/long-contexts.jsonl"
        and words.count("--workload") == 3
    )
    (checked,) = planned(tmp_path, "long-w8a8-fp8", CHECK="1")
    assert checked == line.replace(" --no-check ", " --check ") != line
    assert planned(tmp_path, "long-bf16") == "no piece long-bf16\n"
    assert planned(tmp_path, "long-int3-model") == "no piece long-int3-model\n"


def check_lines(lines, root):
    assert len(lines) > 20
    for line in lines:
        name, seconds, command, *words = shlex.split(line)
        assert float(seconds) > 0 and "/" not in name
        if command != "flyweight":
            assert Path(command).is_file(), line
            continue
        group = cli.Verbs(name="flyweight")
        context = typer.Context(group)
        while isinstance(group, cli.Verbs):
            word, *words = words
            group = group.get_command(context, word)
        # raises where an option is unknown or a value does not fit
        group.make_context(group.name, words)
