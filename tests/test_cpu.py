"""Threads and types of numbers on a CPU: what it has, and no more."""

import os
import subprocess
import sys

import pytest
import torch

from flyweight import cli, cpu
from flyweight.commands.bench import BENCHES
from flyweight.engine.loading import choose_dtype

VERBS = [*(verb for verb in cli.VERBS if verb != "bench"), *(f"bench {what}" for what in BENCHES)]
CPU = torch.device("cpu")


def options_of(verb):
    command = cli.Verbs(name="flyweight")
    for name in verb.split():
        command = command.get_command(None, name)
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_computes_takes_a_number_of_threads(verb):
    options = options_of(verb)
    assert (
        "--threads" in options or "--device" not in options or verb == "convert"
    )  # which only moves bits


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A process that may run on so many cores of eight, in a container with a quota."""

    def set_up(cores, quota):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(cpu, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.delenv(cpu.VARIABLE, raising=False)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    return set_up


@pytest.mark.parametrize(
    ("cores", "quota", "usable"),
    [
        (8, "max 100000", 8),
        (3, "max 100000", 3),
        (8, "200000 100000", 2),
        (8, "50000 100000", 1),
        (8, "nonsense", 8),
    ],
)
def test_cores_are_those_that_the_process_may_use(machine, cores, quota, usable):
    machine(cores, quota)
    assert cpu.usable_cores() == usable


@pytest.mark.parametrize(
    ("asked", "quota", "given", "found"),
    [
        (None, "max 100000", None, None),  # all cores: as torch chooses
        (None, "200000 100000", None, "2"),
        (None, "200000 100000", "6", "6"),
        (2, "200000 100000", "6", "2"),
    ],
)
def test_threads_are_as_asked_else_no_more_than_cores(
    machine, monkeypatch, asked, quota, given, found
):
    machine(8, quota)
    if given:
        monkeypatch.setenv(cpu.VARIABLE, given)
    cpu.use_threads(asked)
    assert os.environ.get(cpu.VARIABLE) == found


def test_more_threads_than_cores_are_taken_with_a_word(machine, monkeypatch):
    machine(8, "200000 100000")
    monkeypatch.setenv(cpu.VARIABLE, "6")
    with pytest.warns(UserWarning, match="--threads 5: this process has 2 cores"):
        cpu.use_threads(5)
    assert os.environ.get(cpu.VARIABLE) == "5"


def test_the_option_reaches_torch():
    """One thread: of more than there are cores torch takes fewer on some machines."""
    code = (
        "import sys\nfrom flyweight import cli\nimport flyweight.commands.generate as verb\n"
        "def load(*_, **__):\n    import torch\n"
        "    print(torch.get_num_threads())\n    sys.exit(0)\n"
        "verb.load = load\ncli.main(['generate', 'x', '--prompt', 'y', '--threads', '1'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != cpu.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "1\n", done.stderr


def test_a_type_without_arithmetic_is_computed_in_float32_and_told(monkeypatch):
    monkeypatch.setattr(cpu, "slowdown", lambda dtype: 35.2)
    with pytest.warns(
        UserWarning,
        match=r"no bfloat16 arithmetic \(a product takes 35 times as long as in float32\)",
    ):
        assert choose_dtype("bfloat16", {}, CPU) is torch.float32
    assert choose_dtype("bfloat16", {}, torch.device("cuda")) is torch.bfloat16


def test_a_type_with_arithmetic_is_left_as_it_is(monkeypatch, recwarn):
    monkeypatch.setattr(cpu, "slowdown", lambda dtype: 0.7)
    assert choose_dtype("float16", {}, CPU) is torch.float16
    assert choose_dtype("float32", {}, CPU) is torch.float32
    assert not recwarn


def test_the_probe_compares_with_float32():
    assert cpu.slowdown(torch.bfloat16) > 0
