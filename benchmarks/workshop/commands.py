"""Commands one after the other, each in a fresh process that has done its imports while the one
before it ran.

    benchmarks/workshop/commands.py FILE      lines of `NAME SECONDS COMMAND ARGUMENTS…` in shell
                                              words; COMMAND is `flyweight` or a script

Importing torch takes longer than many a measurement, and a process for all of them would carry the
memory of one into the figures of the next. So the next process always stands by: imports done, no
GPU touched, waiting for its command. What a command prints goes to NAME.log under the temporary
folder, its last words are shown if it fails, and one that takes longer than its SECONDS is ended,
so that the others still get their turn: rows are saved as they come.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AHEAD = (
    "torch",
    "triton",
    "cuda.core",
    "typer",
    "rich.progress",
    "flyweight.engine.llm",
    "flyweight.bench.sweep",
    "flyweight.bench.serve",
    "flyweight.bench.steps",
    "flyweight.bench.attention",
    "flyweight.bench.chain",
    "flyweight.report.document",
    "flyweight.kernels.linear.gemm",
    "flyweight.kernels.vptq.linear",
    "flyweight.kernels.attention.triton",
)


def stand_by() -> None:
    """The process that waits: one line with its command, or none if it is not needed any more."""
    for name in AHEAD:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # whoever needs it will say so
    line = sys.stdin.readline()
    if not line:
        return
    command, log = json.loads(line)
    with open(log, "w") as file, open(os.devnull) as nothing:
        for stream, number in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), number)
    sys.argv = command
    if command[0] == "flyweight":
        from flyweight.cli import main

        return main()
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def wait_for_one() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--stand-by"], stdin=subprocess.PIPE, text=True, process_group=0
    )


def tell(process: subprocess.Popen[str], command: list[object]) -> bool:
    """Whether a process that stands by got its command: it may have ended in the meantime."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.close()
    except BrokenPipeError:
        return False
    return True


def end(process: subprocess.Popen[str]) -> None:
    """With everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Plan:
    def __init__(self, lines: list[list[str]]):
        self.lines = lines
        self.begin = time.monotonic()
        self.processes: list[subprocess.Popen[str]] = []

    def run(self) -> int:
        """How many failed."""
        if self.lines:
            self.processes.append(wait_for_one())
        return sum(map(self.run_one, self.lines))

    def run_one(self, line: list[str]) -> bool:
        name, seconds, *command = line
        process = self.processes[-1]
        log = Path(tempfile.gettempdir(), f"{name}.log")
        started = time.monotonic()
        if len(self.processes) < len(self.lines):
            self.processes.append(wait_for_one())
        log.unlink(missing_ok=True)
        told = tell(process, [command, str(log)])
        try:
            code = process.wait(float(seconds))
            fault = f", exit code {code}" if code else "" if told else ", ended before its turn"
        except subprocess.TimeoutExpired:
            end(process)
            fault = ", ended: that was its time"
        now = time.monotonic()
        text = f"{name}: {now - started:.0f} s, {now - self.begin:.0f} in all{fault}"
        if fault and log.exists():
            text = "\n".join([text, *log.read_text(errors="replace").splitlines()[-6:]])
        print(text, flush=True)
        return bool(fault)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    options = parser.parse_args()
    plan = Plan(
        [shlex.split(line) for line in options.plan.read_text().splitlines() if line.strip()]
    )

    def stop(*_: object) -> None:
        for process in plan.processes:
            end(process)
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    failed = plan.run()
    sys.exit(f"{failed} of {len(plan.lines)} failed" if failed else 0)


if __name__ == "__main__":
    stand_by() if sys.argv[1:] == ["--stand-by"] else main()
