"""`flyweight generate` from the command line to the first token on the terminal, as a user waits.

    python benchmarks/cpu/first_token.py [MODEL] [--rounds 5] [-o ROWS.jsonl]

A process of its own for each round: imports, reading and packing of the weights, the prompt. The
model's files, the compiled kernels and the page cache are warm (one round before warms them).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def wait_for_text(model: str) -> float:
    """Seconds until the answer begins on standard output."""
    command = [sys.executable, "-m", "flyweight", "generate", model]
    command += ["--prompt", "The capital of France is", "--max-tokens", "4", "--temperature", "0"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    if process.wait() or not first:
        raise SystemExit(f"`{' '.join(command)}` has failed")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", default=str(HERE / "first_token.jsonl"))
    options = parser.parse_args()
    wait_for_text(options.model)
    seconds = [wait_for_text(options.model) for _ in range(options.rounds)]
    row = dict(
        bench="first_token",
        model=options.model,
        rounds=options.rounds,
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        cores=os.cpu_count(),
        load_average=os.getloadavg()[0],
    )
    print(json.dumps(row))
    with open(options.output, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
