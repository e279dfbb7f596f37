"""Commands one after the other, each in a fresh process that has done its imports while the one before it ran.

    benchmarks/commands.py FILE...      lines of `NAME SECONDS COMMAND ARGUMENTS…` in shell words; COMMAND is `flyweight` or a script

Importing torch takes longer than many a measurement, and a process for all of them would carry the memory of one into the
figures of the next. So the next process always stands by: imports done, no GPU touched, waiting for its command. What a command
prints goes to NAME.log under the temporary folder, its last words are shown if it fails, and one that takes longer than its
SECONDS is ended, so that the others still get their turn: rows are saved as they come.
"""

from __future__ import annotations

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

AHEAD = ("torch", "triton", "cuda.core", "typer", "rich.progress", "flyweight.engine.llm", "flyweight.bench.sweep",
         "flyweight.bench.serve", "flyweight.bench.steps", "flyweight.bench.attention", "flyweight.bench.chain",
         "flyweight.report.document", "flyweight.kernels.gemm", "flyweight.kernels.vptq", "flyweight.kernels.triton_attention")


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
    return subprocess.Popen([sys.executable, __file__, "--stand-by"], stdin=subprocess.PIPE, text=True, process_group=0)


def run(process: subprocess.Popen[str], command: list[str], log: Path, *, seconds: float) -> str:
    """How it ended."""
    assert process.stdin is not None
    process.stdin.write(json.dumps([command, str(log)]) + "\n")
    process.stdin.close()
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        return f"ended after {seconds:.0f} s"
    return "" if code == 0 else f"exit code {code}"


def end(process: subprocess.Popen[str]) -> None:
    """With everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    lines = [shlex.split(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines() if line.strip()]
    folder, begin = Path(tempfile.gettempdir()), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    following, current, failed = wait_for_one(), None, 0
    try:
        for name, seconds, *command in lines:
            current, following, started = following, wait_for_one(), time.monotonic()
            log = folder / f"{name}.log"
            fault = run(current, command, log, seconds=float(seconds))
            failed += bool(fault)
            print(f"{name}: {time.monotonic() - started:.0f} s, {time.monotonic() - begin:.0f} in all {fault}", flush=True)
            if fault:
                print("\n".join(log.read_text(errors="replace").splitlines()[-6:]), flush=True)
    finally:
        for process in (current, following):
            if process is not None:
                end(process)
    sys.exit(f"{failed} of {len(lines)} failed" if failed else 0)


if __name__ == "__main__":
    stand_by() if sys.argv[1:] == ["--stand-by"] else main()
