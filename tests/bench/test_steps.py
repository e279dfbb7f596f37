"""The parts of a decode step add up to it, though launches overlap."""

import pytest
import torch
from tiny_preset import add_tiny

from flyweight import cli, machine
from flyweight.bench.profile import Profiler, Workload
from flyweight.bench.steps import Kernel, parts_of, split_steps, timed
from flyweight.engine.llm import LLM
from flyweight.report.performance import step_table
from flyweight.report.read import read
from flyweight.report.rows import Results

# Two layers: each kernel begins before the one before it ends, but for the gaps of 3 before
# `choose` and 5 after it.
STEP = [
    ("embed", 0, 2),
    ("qkv_attention", 1, 12),
    ("gemv", 4, 20),
    ("batch", 15, 30),
    ("batch_pack", 30, 31),
    ("batch", 31, 61),
    ("choose", 64, 66),
]
PERIOD = 71


def recorded(steps):
    return [
        Kernel(start + PERIOD * i, end + PERIOD * i, name)
        for i in range(steps)
        for name, start, end in STEP
    ]


def test_charges_and_gaps_are_the_step():
    steps = split_steps(reversed(recorded(4)))
    assert len(steps) == 3, "the last one has no end"
    for step in steps:
        parts = parts_of(step)
        assert sum(time for time, _ in parts.values()) == PERIOD
        assert (
            parts["qkv with attention"] == (10, 1)
            and parts["linears"] == (18, 2)
            and parts["attention"] == (0, 0)
        )
        assert parts["lm_head"] == (31, 2), "the last product, with the packing of its input"
        assert parts["gaps"] == (8, 2) and parts["other kernels"] == (4, 2)


def test_the_host_s_work_is_the_step_less_its_waiting(monkeypatch):
    add_tiny(monkeypatch)
    llm = LLM(
        "preset:tiny:fp32", device="cpu", max_model_len=32, max_num_seqs=2, prefix_cache=False
    )
    wall, host = timed(Profiler(llm, Workload(2, 4, 8)))
    assert 0 < host <= wall


def test_a_model_without_captured_steps_gives_the_reason(monkeypatch, tmp_path, capsys):
    add_tiny(monkeypatch)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 14)
    with pytest.raises(SystemExit):
        cli.main(
            [
                "bench",
                "step",
                "preset:tiny:fp32",
                "--batch",
                "2",
                "--input",
                "16",
                "--device",
                "cpu",
                "-o",
                str(tmp_path / "steps.jsonl"),
            ]
        )
    (row,) = read([tmp_path / "steps.jsonl"]).rows
    assert row["status"] == "skipped" and "CUDA graphs" in row["reason"] and row["batch"] == 2


def test_a_model_that_cannot_be_loaded_stops_no_other(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    add_tiny(monkeypatch)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr("flyweight.engine.llm.LLM", refuse)
    with pytest.raises(SystemExit):
        cli.main(
            [
                "bench",
                "step",
                "preset:tiny:fp32",
                "preset:tiny:w8a8",
                "--batch",
                "2",
                "--device",
                "cpu",
                "-o",
                str(tmp_path / "steps.jsonl"),
            ]
        )
    assert [(row["scheme"], row["status"]) for row in read([tmp_path / "steps.jsonl"]).rows] == [
        ("fp32", "oom"),
        ("w8a8", "oom"),
    ]


def test_the_table_has_a_line_for_each_variant_and_batch():
    def row(scheme, batch, operator, time, calls=1, kind="device"):
        return {
            "bench": "profile",
            "status": "ok",
            "environment": "e",
            "model": "m",
            "scheme": scheme,
            "batch": batch,
            "level": "part",
            "operator": operator,
            "self_us": time,
            "calls": calls,
            "kind": kind,
        }

    rows = [
        row(scheme, batch, *rest)
        for scheme in ("bf16", "int4")
        for batch in (1, 64)
        for rest in (
            ("step", 1700.0),
            ("linears", 1500.0, 108),
            ("gaps", 20.0, 3),
            ("host", 300.0, 1, "host"),
        )
    ]
    _, table, _ = step_table(Results(tuple(rows), {"e": {"device": "a GPU"}}))
    assert len(table.rows) == 4 and "a GPU" in table.title and "attention" not in table.headers
    assert dict(zip(table.headers, table.rows[0], strict=True)) | {} == {
        "Model": "m",
        "Variant": "bf16",
        "Batch": "1",
        "step": "1700",
        "linears": "1500",
        "lm_head": "0",
        "other kernels": "0",
        "gaps": "20",
        "kernels": "108",
        "host, beside them": "300",
    }
