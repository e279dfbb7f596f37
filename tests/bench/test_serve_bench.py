"""`flyweight bench serve` from the command line: in process, and over HTTP with a server in another
thread."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from tiny_preset import add_tiny
from virtual_server import Script

from flyweight import cli
from flyweight.report.rows import read_jsonl


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    add_tiny(monkeypatch)
    out = tmp_path / "result.jsonl"

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main(["bench", "serve", *map(str, arguments), "--out", str(out)])
        error = capsys.readouterr().err
        return exit.value.code, list(read_jsonl(out).rows) if out.exists() else [], error

    run.out = out
    return run


@pytest.fixture
def url():
    """A mock server that answers at once, on real time, in a thread of its own."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(Script(first=0.0, gap=0.0).handle, "127.0.0.1", 0)
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


SHAPE = ("--input", 8, "--output", 4, "--warm-up", 1)


def test_the_engine_in_process_under_a_closed_loop(bench):
    code, rows, _ = bench(
        "preset:tiny:fp32",
        "--concurrency",
        2,
        "--requests",
        5,
        *SHAPE,
        "--slo",
        "ttft=100000",
        "--option",
        "blocks=64",
        "--device",
        "cpu",
    )
    row = rows[0]
    assert (
        code == 0
        and row["completed"] == 5
        and row["arrivals"] == "closed"
        and row["concurrency"] == 2
    )
    assert (
        row["count_source"] == "token_ids"
        and row["output_tokens"] == 20
        and row["input_tokens"] == 40
    )
    assert row["ttft_ms"]["p50"] > 0 and row["tpot_ms"]["p50"] > 0 and row["attained"] == 1.0
    samples = [json.loads(line) for line in Path(row["samples"]).read_text().splitlines()]
    assert len(samples) == 5 and all(one["output"] == 4 for one in samples)


def test_a_sampled_load_says_how_its_tokens_were_chosen(bench):
    code, rows, _ = bench(
        "preset:tiny:fp32",
        "--concurrency",
        2,
        "--requests",
        3,
        *SHAPE,
        "--option",
        "blocks=64",
        "--device",
        "cpu",
        "--sampling",
        "temperature=0.7,min_p=0.1,seed=3",
        "--no-samples",
    )
    assert (
        code == 0
        and rows[0]["completed"] == 3
        and "samples" not in rows[0]
        and rows[0]["sampling"] == "temperature=0.7,min_p=0.1,seed=3"
    )


def test_requests_beyond_the_context_are_left_out_and_counted(bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 0, "input_length": length, "output_length": 4})
        for length in (8, 900)
    ]
    trace.write_text("\n".join(lines))
    _, rows, _ = bench(
        "preset:tiny:fp32",
        "--trace",
        trace,
        "--warm-up",
        0,
        "--option",
        "blocks=64",
        "--device",
        "cpu",
    )
    assert (
        rows[0]["completed"] == 1
        and "1 requests are longer than the model's context" in rows[0]["flags"][0]
    )
    code, _, error = bench("preset:tiny:fp32", "--input", 500, "--device", "cpu")
    assert code == 2 and "every request is longer than the model's context of 128" in error


def test_transformers_answers_one_at_a_time(bench):
    code, rows, _ = bench(
        "preset:tiny:fp32",
        "--backend",
        "transformers",
        "--concurrency",
        2,
        "--requests",
        3,
        *SHAPE,
        "--device",
        "cpu",
    )
    assert code == 0 and rows[0]["completed"] == 3 and rows[0]["output_tokens"] == 12


def test_a_server_over_http_and_a_finished_run_is_not_run_again(bench, url):
    arguments = (
        "mock",
        "--backend",
        "openai",
        "--url",
        url,
        "--rate",
        500,
        "--requests",
        6,
        *SHAPE,
    )
    code, rows, _ = bench(*arguments)
    assert (
        code == 0
        and len(rows) == 1
        and rows[0]["completed"] == 6
        and rows[0]["arrivals"] == "poisson"
    )
    assert (
        rows[0]["checkpoint"] is None and rows[0]["rate"] == 500 and rows[0]["client_lag_ms"] >= 0
    )
    assert rows[0]["agreement"] is None and rows[0]["agreement_with"] == "it is the baseline"
    assert bench(*arguments)[1] == rows


def test_client_processes_share_the_load(bench, url, monkeypatch):
    monkeypatch.setattr("flyweight.bench.load.START_UP", 0.0)
    _, rows, _ = bench(
        "mock", "--url", url, "--requests", 6, "--concurrency", 2, "--processes", 2, *SHAPE
    )
    assert rows[0]["completed"] == 6 and rows[0]["backend"] == "openai"


def test_the_search_for_the_highest_rate_leaves_a_row_a_try(bench, url, monkeypatch):
    from flyweight.bench import serving

    monkeypatch.setattr(serving.Objective, "met", lambda self, record: False)
    code, rows, error = bench(
        "mock",
        "--url",
        url,
        "--requests",
        2,
        *SHAPE,
        "--find-max-rate",
        "--slo",
        "ttft=5",
        "--rate",
        2e7,
    )
    assert code == 0 and len(rows) == 16 and "none was found" in error
    assert rows[1]["rate"] == rows[0]["rate"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mock", "--backend", "openai"], "needs --url"),
        (["preset:tiny", "--find-max-rate"], "needs an objective"),
        (["preset:tiny", "--trace", "x.csv", "--rate", "1"], "brings its own arrivals"),
        (["preset:tiny", "--slo", "speed=1"], "unknown objective"),
    ],
)
def test_mistakes_are_named(bench, arguments, message):
    code, rows, error = bench(*arguments)
    assert code == 2 and rows == [] and message in error
