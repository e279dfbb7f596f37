"""Tests of a GPU in several processes at once: most of their time goes into compiling kernels,
which one process does one by one.

Where `pytest -m gpu` has collected many tests on a machine with a GPU, it starts a pytest for each
share of them and shows their reports as its own. Compiled kernels are shared through the cache on
disk. GPU_SHARDS=1 runs all of them here; reports are in GPU_SHARDS_FOLDER meanwhile, for a run that
may be cut off.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch

REPORTS = "GPU_SHARD_REPORTS"  # in a share's environment: where its reports go
# tests of a file that follow each other stay together: some share kernels, but long ones must not
# pile up
TOGETHER = 2
WORTH_IT = 24  # tests


def shares(ids: list[str], count: int) -> list[list[str]]:
    """Pieces of neighbouring tests, dealt out in turn."""
    files = defaultdict(list)
    for one in ids:
        files[one.partition("::")[0]].append(one)
    pieces = [
        members[i : i + TOGETHER]
        for members in files.values()
        for i in range(0, len(members), TOGETHER)
    ]
    return [
        dealt
        for dealt in ([one for piece in pieces[i::count] for one in piece] for i in range(count))
        if dealt
    ]


def wanted(session: pytest.Session) -> int:
    """How many processes; 1: this one does it all."""
    if REPORTS in os.environ or session.config.option.collectonly or not torch.cuda.is_available():
        return 1
    if len(session.items) < WORTH_IT or not all(
        item.get_closest_marker("gpu") for item in session.items
    ):
        return 1
    return int(os.environ.get("GPU_SHARDS", min(14, os.cpu_count() or 1)))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = wanted(session)
    if count == 1:
        return None
    config = session.config
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_SHARDS_FOLDER")) as folder:
        dealt = shares([item.nodeid for item in session.items], count)
        files = [Path(folder, f"{i}.jsonl") for i in range(len(dealt))]
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-m",
                    "gpu",
                    "--tb",
                    config.option.tbstyle,
                    *ids,
                ],
                cwd=config.rootpath,
                env=os.environ | {REPORTS: str(file), "OMP_NUM_THREADS": "1"},
                stdout=file.with_suffix(".txt").open("w"),
                stderr=subprocess.STDOUT,
            )
            for ids, file in zip(dealt, files, strict=True)
        ]
        for process, file, ids in zip(running, files, dealt, strict=True):
            process.wait()
            lines = file.read_text().splitlines() if file.exists() else []
            reports = [pytest.TestReport._from_json(json.loads(line)) for line in lines]
            for report in reports:
                if isinstance(report.longrepr, list):  # of a skipped test; JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                config.hook.pytest_runtest_logreport(report=report)
            if missing := set(ids) - {
                report.nodeid for report in reports if report.when == "teardown"
            }:
                session.testsfailed += len(missing)
                words = file.with_suffix(".txt").read_text()[-3000:]
                print(
                    f"\n{len(missing)} tests did not end (exit code {process.returncode}):",
                    *sorted(missing),
                    words,
                    sep="\n",
                )
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if path := os.environ.get(REPORTS):
        with open(path, "a") as file:
            file.write(json.dumps(report._to_json()) + "\n")
