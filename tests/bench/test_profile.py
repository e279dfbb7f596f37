"""`flyweight profile` on a CPU: phases apart, every operator a row, layers marked, traces
written."""

import gzip
import json

import pytest
from tiny_preset import add_tiny

from flyweight import cli
from flyweight.bench.profile import LAYER, Event, Profiler, Workload, marked_layers, rows_of
from flyweight.engine.llm import LLM
from flyweight.report.read import read


@pytest.fixture
def tiny(monkeypatch):
    add_tiny(monkeypatch)
    return "preset:tiny:fp32"


def run(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["profile", *map(str, arguments)])
    return exit.value.code, *capsys.readouterr()


def test_both_phases_with_their_operators_layers_and_traces(tiny, tmp_path, capsys):
    code, out, err = run(
        tiny,
        "--input",
        12,
        "--output",
        5,
        "--batch",
        2,
        "--device",
        "cpu",
        "-o",
        tmp_path / "p",
        capsys=capsys,
    )
    assert (
        code == 0
        and "Operators of prefill" in out
        and "Operators of decode" in out
        and "by host time" in out
    )
    rows = read([tmp_path / "p" / "result.jsonl"]).rows
    for phase, steps in (("prefill", 1), ("decode", 3)):
        mine = [row for row in rows if row["phase"] == phase]
        layers = {row["operator"]: row["calls"] for row in mine if row["level"] == "layer"}
        assert layers == {"layer 0": steps, "layer 1": steps}, (
            phase
        )  # a step of the other phase would be one more
        operators = [row for row in mine if row["level"] == "operator"]
        assert any(row["operator"].startswith("aten::") for row in operators)
        assert 0.9 <= sum(row["share"] for row in operators) <= 1.0001
        assert all(
            row["self_us"] <= row["total_us"] + 1e-3 and row["kind"] == "host" for row in operators
        )
        assert {"model", "checkpoint", "scheme", "backend", "input", "output"} <= set(mine[0])
        with gzip.open(tmp_path / "p" / f"{phase}.trace.json.gz") as file:
            assert any(event.get("name") == "layer 1" for event in json.load(file)["traceEvents"])
    assert list((tmp_path / "p").glob("*.png")) and "plot" in err


def test_the_seed_layout_has_the_columns_of_the_profiler(tiny, tmp_path, capsys):
    code, out, _ = run(
        tiny,
        "--input",
        4,
        "--output",
        1,
        "--layout",
        "seed",
        "--top",
        3,
        "--device",
        "cpu",
        "-o",
        tmp_path,
        capsys=capsys,
    )
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert (
        code == 0
        and "| Self CPU %" in lines[0]
        and "# of Calls" in lines[0]
        and len(lines) == 2 + 3
    )
    assert "Operators of decode" not in out


def test_cold_profiles_the_first_run(tiny, monkeypatch):
    llm = LLM(
        tiny, device="cpu", native=False, max_model_len=32, max_num_seqs=1, prefix_cache=False
    )
    profiler, runs = Profiler(llm, Workload(1, 4, 3)), []
    prefill = profiler.prefill
    monkeypatch.setattr(profiler, "prefill", lambda around: runs.append(around) or prefill(around))
    profiler.record("prefill", cold=True)
    assert len(runs) == 1
    profiler.record("prefill")
    assert len(runs) >= 1 + 2 + 1


def test_layers_are_unmarked_again(tiny):
    llm = LLM(tiny, device="cpu", native=False, max_model_len=32, max_num_seqs=1)
    with marked_layers(llm.decoder.blocks):
        assert "run" in vars(llm.decoder.blocks[0])
    assert "run" not in vars(llm.decoder.blocks[0])


class Averages:
    def __init__(self, *events):
        self.events = events

    def key_averages(self):
        return self.events


def test_a_kernel_is_told_on_the_device_and_an_operator_on_both(monkeypatch):
    def event(name, on_device, host, device):
        return Event(name, on_device, 2, host, host, device, device, 0, 0, 8, 8)

    events = (
        event("aten::mm", False, 10.0, 30.0),
        event("gemv", True, 0.0, 90.0),
        event("kernel of mm", True, 0.0, 30.0),
        event(f"{LAYER}0", False, 5.0, 120.0),
        event(f"{LAYER}0", True, 0.0, 0.0),
    )
    monkeypatch.setattr(Event, "of", classmethod(lambda cls, one: one))
    rows = rows_of(Averages(*events), "decode")
    device = {
        row["operator"]: row["share"]
        for row in rows
        if row["kind"] == "device" and row["level"] != "layer"
    }
    assert device == {"gemv": 0.75, "kernel of mm": 0.25, "aten::mm": 0.25}
    host = {
        row["operator"]: row["share"]
        for row in rows
        if row["kind"] == "host" and row["level"] == "operator"
    }
    assert host == {"aten::mm": 1.0}
    assert [
        row["total_us"] for row in rows if row["level"] == "layer" and row["kind"] == "device"
    ] == [120.0]


def test_wrong_options_are_one_line(tiny, capsys):
    assert run(tiny, "--layout", "seeds", capsys=capsys)[0] == 2
    assert run("no-such-model", capsys=capsys)[0] == 2
