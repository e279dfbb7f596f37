"""`diff`: significance from raw samples, environment differences, exit codes."""

import itertools
import json
import random

import pytest
from typer.testing import CliRunner

from flyweight.cli import app
from flyweight.report import compare
from flyweight.report.compare import mann_whitney


def kernel(run_id: str, us: float, **fields) -> dict:
    return {
        "schema": 1,
        "bench": "kernel",
        "run_id": run_id,
        "time": None,
        "environment": "env",
        "status": "ok",
        "format": "w4a16",
        "rows": 1,
        "in_features": 4096,
        "out_features": 4096,
        "us": us,
        **fields,
    }


@pytest.fixture
def write(tmp_path):
    def writer(name: str, *rows, **facts):
        environment = {
            "schema": 1,
            "bench": "environment",
            "run_id": f"e-{name}",
            "time": None,
            "environment": "env",
            "status": "ok",
            "id": "env",
            "device": "H200",
            **facts,
        }
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in (environment, *rows)))
        return str(path)

    return writer


def run(*arguments: str):
    return CliRunner().invoke(app, ["diff", *arguments])


def samples(center: float, count: int = 12) -> list[float]:
    return [center * (1 + 0.01 * random.Random(index).uniform(-1, 1)) for index in range(count)]


def test_slower_beyond_the_tolerance_exits_1_and_within_it_0(write):
    before = write("a", kernel("1", 10.0, us_samples=samples(10.0)))
    after = write("b", kernel("2", 11.0, us_samples=samples(11.0)))
    worse = run(before, after)
    assert worse.exit_code == 1 and "| worse" in worse.stdout and "+10.0%" in worse.stdout
    assert run(before, after, "--tolerance", "0.2").exit_code == 0
    faster = run(after, before)
    assert faster.exit_code == 0 and "1 better" in faster.stdout


def test_a_rate_that_falls_is_slower(write):
    row = {
        "bench": "throughput",
        "model": "m",
        "checkpoint": "x",
        "scheme": "bf16",
        "backend": "native",
        "prompts": 10,
    }
    before = write(
        "a", *(kernel(f"a{i}", 1.0) | row | {"total_tok_s": 100.0 + i} for i in range(5))
    )
    after = write("b", *(kernel(f"b{i}", 1.0) | row | {"total_tok_s": 80.0 + i} for i in range(5)))
    result = json.loads(run(before, after, "--json").stdout)
    assert [(one["metric"], one["verdict"]) for one in result["changes"]] == [
        ("total_tok_s", "worse")
    ]


def test_noise_is_not_a_regression(write):
    spread = [8.0, 9.0, 10.0, 11.0, 12.0]
    after = write("b", kernel("2", 10.5, us_samples=[value + 0.5 for value in spread]))
    result = run(write("a", kernel("1", 10.0, us_samples=spread)), after)
    assert result.exit_code == 0 and "1 the same" in result.stdout


def test_requests_of_a_serve_run_are_its_samples(write, tmp_path):
    files = []
    for name, center in (("a", 30.0), ("b", 40.0)):
        raw = [{"ttft_ms": value, "tpot_ms": 5.0} for value in samples(center)]
        (tmp_path / f"{name}.requests.jsonl").write_text("\n".join(map(json.dumps, raw)))
        row = {
            "bench": "serve",
            "model": "m",
            "checkpoint": "x",
            "scheme": "bf16",
            "backend": "native",
            "rate": 2.0,
            "ttft_ms": {"p50": center},
            "tpot_ms": {"p50": 5.0},
            "samples": f"{name}.requests.jsonl",
        }
        files.append(write(name, kernel(name, 1.0) | row))
    changes = {one["metric"]: one for one in json.loads(run(*files, "--json").stdout)["changes"]}
    assert (changes["ttft_ms"]["verdict"], changes["ttft_ms"]["samples"]) == ("worse", [12, 12])
    assert changes["tpot_ms"]["verdict"] == "same"


def test_one_sample_is_shown_and_never_judged(write):
    result = run(write("a", kernel("1", 10.0)), write("b", kernel("2", 20.0)), "--all")
    assert result.exit_code == 0 and "one sample" in result.stdout and "+100.0%" in result.stdout


def test_environment_and_checkpoint_differences_are_listed(write):
    row = {
        "bench": "speed",
        "model": "m",
        "scheme": "bf16",
        "backend": "native",
        "input": 1,
        "output": 8,
        "output_tok_s": 5.0,
    }
    before = write(
        "a", kernel("1", 1.0) | row | {"checkpoint": "x"}, torch="2.11", packages={"vllm": "0.24"}
    )
    after = write(
        "b", kernel("2", 1.0) | row | {"checkpoint": "y"}, torch="2.12", packages={"vllm": "0.25"}
    )
    text = run(before, after).stdout
    assert (
        "Environment: torch: 2.11 → 2.12" in text
        and "Environment: packages vllm: 0.24 → 0.25" in text
    )
    assert "the checkpoint is x in A and y in B" in text


def test_files_with_nothing_in_common_are_an_error(write):
    result = run(write("a", kernel("1", 1.0)), write("b", kernel("2", 1.0, in_features=8)))
    assert result.exit_code != 0 and "no measurement in common" in str(result.exception)


def test_exact_mann_whitney_counts_all_arrangements():
    x, y = [1.0, 4.0, 4.0], [3.0, 4.0, 6.0, 7.0]
    values = x + y

    def wins(chosen):
        return sum(
            (values[i] > values[j]) + 0.5 * (values[i] == values[j])
            for i in chosen
            for j in range(7)
            if j not in chosen
        )

    every = list(itertools.combinations(range(7), 4))
    expected = sum(wins(chosen) >= wins((3, 4, 5, 6)) for chosen in every) / len(every)
    assert mann_whitney(x, y) == pytest.approx(expected)
    assert mann_whitney([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)


def test_normal_approximation_agrees_with_the_exact_tail(monkeypatch):
    draw = random.Random(3)
    x, y = (
        [round(draw.gauss(0, 1), 1) for _ in range(20)],
        [round(draw.gauss(0.5, 1), 1) for _ in range(20)],
    )
    exact = mann_whitney(x, y)
    monkeypatch.setattr(compare, "EXACT", 0)
    assert mann_whitney(x, y) == pytest.approx(exact, abs=0.005)
