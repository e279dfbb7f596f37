"""Result files: what is read, what is refused and how, and what is never joined."""

import json

import pytest

from flyweight.errors import ResultError
from flyweight.report.document import build
from flyweight.report.figures import pareto
from flyweight.report.read import read
from flyweight.report.render import markdown, terminal
from flyweight.report.rows import group
from flyweight.report.view import View

ENVIRONMENT = {
    "schema": 1,
    "bench": "environment",
    "run_id": "e0",
    "time": None,
    "environment": "env",
    "status": "ok",
    "id": "env",
    "device": "H200",
}


def make(bench: str, run_id: str, **fields) -> dict:
    return {
        "schema": 1,
        "bench": bench,
        "run_id": run_id,
        "time": "2026-01-01T00:00:00+00:00",
        "environment": "env",
        "status": "ok",
        **fields,
    }


def latency(run_id: str, scheme: str = "bf16", checkpoint: str | None = "aa", **fields) -> dict:
    return make(
        "latency",
        run_id,
        **{
            "model": "m",
            "checkpoint": checkpoint,
            "weights": "trained",
            "scheme": scheme,
            "backend": "native",
            "workload": "decode_bound",
            "batch": 1,
            "input": 256,
            "output": 512,
            "latency_s": 2.0,
            "decode_tok_s": 250.0,
            "overall_tok_s": 384.0,
            "size_gb": 8.0,
            **fields,
        },
    )


def quality(run_id: str, scheme: str, checkpoint: str, perplexity: float, **fields) -> dict:
    return make(
        "quality",
        run_id,
        model="m",
        checkpoint=checkpoint,
        scheme=scheme,
        perplexity=perplexity,
        text="wiki",
        **fields,
    )


@pytest.fixture
def write(tmp_path):
    def writer(*rows, name: str = "result.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in (ENVIRONMENT, *rows)))
        return path

    return writer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is not the one this version reads"),
        ({"bench": "latancy"}, "unknown bench 'latancy'; did you mean 'latency'?"),
        ({"status": "fine"}, "unknown status 'fine'"),
        ({"latency_s": "2.0"}, "latency_s must be a number, not '2.0'"),
        ({"scheme": 4}, "scheme must be text, not 4"),
        ({"environment": "other"}, "environment 'other' is not in this file"),
    ],
)
def test_a_wrong_row_is_one_line_with_file_and_line(write, change, message):
    path = write(latency("a"), latency("b") | change)
    with pytest.raises(ResultError) as caught:
        read([path])
    assert str(caught.value).startswith(f"{path}:3: {message}")
    assert "\n" not in str(caught.value)


def test_missing_fields_are_named(write):
    row = latency("a")
    del row["backend"], row["checkpoint"]
    with pytest.raises(ResultError, match="a latency row needs checkpoint, backend"):
        read([write(row)])


def test_a_last_row_that_was_cut_off_is_left_out_with_a_warning(write):
    path = write(latency("a"))
    whole = path.read_text()
    path.write_text(whole + '{"schema": 1, "ben')
    with pytest.warns(
        UserWarning, match=r"result\.jsonl:3: the last row is cut off; it is left out"
    ):
        assert [row["run_id"] for row in read([path]).rows] == ["a"]
    path.write_text(whole + '{"schema": 1, "ben\n')
    with pytest.raises(ResultError, match=r"result\.jsonl:3: not a JSON object"):
        read([path])


def test_the_same_row_in_two_files_counts_once_and_a_changed_one_is_an_error(write):
    first, second = (
        write(latency("a"), name="1.jsonl"),
        write(latency("a"), latency("b"), name="2.jsonl"),
    )
    results = read([first, second])
    assert [row["run_id"] for row in results.rows] == ["a", "b"]
    assert any("more than one of the files" in note for note in results.notes)
    with pytest.raises(ResultError, match="two different rows have the run_id 'a'"):
        read([first, write(latency("a", latency_s=3.0), name="3.jsonl")])


def test_repeats_are_averaged_and_checkpoints_stay_apart(write):
    results = read(
        [
            write(
                latency("a"),
                latency("b", decode_tok_s=252.0),
                latency("c", checkpoint="bb", decode_tok_s=100.0),
            )
        ]
    )
    groups = group(results, results.of("latency"))
    assert [(len(one.rows), one.mean("decode_tok_s")) for one in groups] == [(2, 251.0), (1, 100.0)]
    text = markdown(build(View(results)))
    assert "bf16 [aa]" in text and "bf16 [bb]" in text
    assert "m bf16 is here with 2 checkpoints (aa, bb); their rows stay apart" in text


def test_checkpoints_that_are_named_by_tool_and_seed_are_not_called_confusing(write):
    def made(run_id, checkpoint, tool, seed):
        return quality(
            run_id,
            "gptq-int4",
            checkpoint,
            9.0,
            tool=tool,
            seed=seed,
            job=f"{tool}/{seed}",
            weights="trained",
        )

    rows = [
        made("a", "aa", "flyweight", 0),
        made("b", "bb", "flyweight", 1),
        made("c", "cc", "other", 0),
    ]
    text = markdown(build(View(read([write(*rows)]))))
    assert "stay apart" not in text and "m [aa]" not in text and "| Seed" in text
    text = markdown(build(View(read([write(*rows, made("d", "dd", "other", 0))]))))
    assert "m gptq-int4 is here with 2 checkpoints (cc, dd)" in text


def test_speedup_is_over_the_baseline_of_the_same_backend(write):
    rows = [
        latency("a"),
        latency("b", scheme="awq-int4", checkpoint="bb", decode_tok_s=500.0),
        latency("c", scheme="awq-int4", checkpoint="bb", backend="vllm", decode_tok_s=100.0),
    ]
    text = terminal(build(View(read([write(*rows)]), sections=("latency",))))
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| awq-int4")]
    assert {(line[2].strip(), line[-2].strip()) for line in lines} == {
        ("native", "2.00"),
        ("vllm", "–"),
    }


def test_no_speedup_over_a_baseline_with_two_checkpoints(write):
    rows = [
        latency("a"),
        latency("b", checkpoint="zz", decode_tok_s=100.0),
        latency("c", scheme="int4", checkpoint="bb"),
    ]
    assert "Speed-up" not in terminal(build(View(read([write(*rows)]))))


def test_failed_rows_are_listed_with_their_reason(write):
    text = markdown(
        build(
            View(
                read(
                    [
                        write(
                            latency("a"),
                            make("speed", "b", model="m", status="oom", reason="needs 90 GB"),
                        )
                    ]
                )
            )
        )
    )
    assert "needs 90 GB" in text[text.index("## Not measured") :]


def pareto_points(write, *rows) -> dict:
    figures = pareto(read([write(*rows)]))
    return {series.name: series.points[0] for figure in figures for series in figure.series}


def test_pareto_joins_equal_checkpoints_only_and_marks_the_front(write):
    points = pareto_points(
        write,
        latency("a"),
        latency("b", scheme="int4", checkpoint="bb", decode_tok_s=500.0, size_gb=3.0),
        latency("c", scheme="bad", checkpoint="cc", decode_tok_s=240.0, size_gb=9.0),
        latency(
            "d",
            scheme="rand",
            checkpoint="random:0",
            weights="random",
            decode_tok_s=900.0,
            size_gb=1.0,
        ),
        latency("e", scheme="unknown", checkpoint=None, decode_tok_s=900.0),
        quality("q1", "bf16", "aa", 10.0),
        quality("q2", "int4", "bb", 10.5),
        quality("q3", "bad", "cc", 12.0),
        quality("q4", "rand", "random:0", 9.0),
        quality("q5", "unknown", None, 9.0),
        quality("q6", "other", "zz", 9.0),
    )
    assert {name: point.marked for name, point in points.items()} == {
        "bf16": True,
        "int4": True,
        "bad": False,
    }
    assert (points["int4"].x, points["int4"].y, points["int4"].size) == (500.0, 10.5, 3.0)


def test_pareto_compares_one_workload_only(write):
    other = {"workload": "interactive", "input": 128, "output": 64}
    points = pareto_points(
        write,
        latency("a"),
        latency("b", scheme="int4", checkpoint="bb", decode_tok_s=500.0),
        latency("c", scheme="int3", checkpoint="cc", decode_tok_s=700.0, **other),
        quality("q1", "bf16", "aa", 10.0),
        quality("q2", "int4", "bb", 10.5),
        quality("q3", "int3", "cc", 12.0),
    )
    assert set(points) == {"bf16", "int4"}
