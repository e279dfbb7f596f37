"""What the rows of a folder cover: missing pieces are counted, later code replaces earlier, changed
code is named.
"""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "workshop"))

import covered
from ran import FAST

from flyweight.report.rows import Results


def kernel(number, *, environment="old", time="2026-01-01T00:00:00", us=1.0, status="ok"):
    return {
        "schema": 1,
        "bench": "kernel",
        "run_id": f"{environment}{number}",
        "time": time,
        "environment": environment,
        "status": status,
        "format": "vptq",
        "kernel": "vptq",
        "shape": "seed-000",
        "in_features": number,
        "us": us,
    }


def results(rows, **commits):
    return Results(
        tuple(rows),
        {
            name: {"id": name, "device": "a GPU", "commit": commit}
            for name, commit in commits.items()
        },
    )


def test_a_piece_of_which_rows_are_missing_is_told_with_how_many_there_are():
    *_, table = covered.missing(results([kernel(number) for number in range(12)]))
    lines = {line[0]: line[2:] for line in table.rows}
    assert lines["000"] == ("12", "30") and lines["001"] == ("0", "120")
    *_, table = covered.missing(results([kernel(number) for number in range(30)]))
    assert "000" not in {line[0] for line in table.rows}


def test_what_later_code_measured_again_is_left_out_and_told():
    old = [kernel(1), kernel(2)]
    new = kernel(1, environment="new", time="2026-02-01T00:00:00", us=0.5)
    found = covered.latest(results([*old, new], old="aaa", new="bbb"))
    assert [row["run_id"] for row in found.rows] == ["old2", "new1"]
    (note,) = found.notes
    assert note.startswith("1 rows were measured again")


def test_a_failure_that_went_well_later_is_left_out_and_another_is_not():
    failed = [kernel(number, status="failed") for number in (1, 2)]
    good = kernel(1, environment="new", time="2026-02-01T00:00:00")
    assert covered.latest(results([*failed, good], old="aaa", new="bbb")).rows == (failed[1], good)


def test_repeats_of_one_commit_stay_together_though_their_processes_differ():
    rows = [kernel(1), kernel(1, environment="again", time="2026-02-01T00:00:00")]
    assert covered.latest(results(rows, old="aaa", again="aaa")).rows == tuple(rows)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*words):
        return subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    for folder in ("kernels", "report"):
        Path("src/flyweight", folder).mkdir(parents=True)
        Path("src/flyweight", folder, "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    return git


def test_code_that_changed_since_a_row_is_named(repository):
    first = repository("rev-parse", "HEAD")
    Path("src/flyweight/report/a.py").write_text("2")
    repository("commit", "-qam", "second")
    assert covered.changed(first, FAST) == "the same"
    Path("src/flyweight/kernels/a.py").write_text("2")
    repository("commit", "-qam", "third")
    assert covered.changed(f"{first[:12]}-dirty", FAST) == "changed: kernels"
    assert covered.changed("0" * 12, FAST) == "unknown: no such commit here"
    assert covered.changed(None, FAST) == "unknown: these rows name no commit"
