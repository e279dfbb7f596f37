"""`flyweight generate` from the command line to the first token on the terminal, as a user waits.

    python benchmarks/cpu/first_token.py [MODEL] [--rounds 5] [-o ROWS.jsonl]

A process of its own for each round: imports, reading of the weights, the prompt. The model's files,
the compiled kernels, packed weights and the page cache are warm (two rounds before warm them).

A second row has the seconds in which a process that has imported everything loads the model, and
the most memory that a process has had after answers in a context of 2,048 tokens, all of it used.
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
from typing import Any

HERE = Path(__file__).parent
CONTEXT = 2048
IN_ONE_PROCESS = f"""
import json, resource, sys, time
from flyweight import LLM
begin = time.perf_counter()
llm = LLM(sys.argv[1], max_model_len={CONTEXT}, max_num_seqs=1, blocks={CONTEXT} // 16 + 1)
load = time.perf_counter() - begin
llm.generate(list(range(5, {CONTEXT} - 3)), max_tokens=8, temperature=0, ignore_eos=True)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(dict(load_s=load, peak_bytes=peak, runs_on=llm.executor)))
"""


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


def load(model: str) -> dict[str, Any]:
    """What the program above prints."""
    command = [sys.executable, "-c", IN_ONE_PROCESS, model]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", default=str(HERE / "first_token.jsonl"))
    options = parser.parse_args()
    for _ in range(2):  # weights are kept when they are packed for the second time
        wait_for_text(options.model)
    seconds = [wait_for_text(options.model) for _ in range(options.rounds)]
    loads = [load(options.model) for _ in range(options.rounds)]
    about = dict(model=options.model, rounds=options.rounds, cores=os.cpu_count())
    rows: list[dict[str, Any]] = [
        dict(
            bench="first_token",
            **about,
            seconds=statistics.median(seconds),
            all_seconds=seconds,
        ),
        dict(
            bench="load",
            **about,
            seconds=statistics.median(one["load_s"] for one in loads),
            all_seconds=[one["load_s"] for one in loads],
            context=CONTEXT,
            peak_bytes=max(one["peak_bytes"] for one in loads),
            runs_on=loads[0]["runs_on"],
        ),
    ]
    with open(options.output, "a") as file:
        for row in rows:
            row["load_average"] = os.getloadavg()[0]
            print(json.dumps(row))
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
