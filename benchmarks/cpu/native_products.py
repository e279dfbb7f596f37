"""The native CPU kernels, one product at a time: how fast each format is read, and at which number
of rows.

    python benchmarks/cpu/native_products.py [--threads 1,2] [--formats fp16,int4] [-o ROWS.jsonl]

Several copies of one weight, together larger than the caches, are gone through in turn, so that
every product reads its weight from memory. Formats take turns in every round, and the least time of
the rounds is kept: other programs can only add to it. `gb_s` is the bytes of the packed weight over
that time, and `share` compares it with a plain sum over as many bytes (`read`), measured in the
same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flyweight.kernels.native import library
from flyweight.kernels.native.linear import NativeLinear
from flyweight.tensors import (
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    VectorQuant,
)

OUTPUTS, INPUTS = 2048, 2048
CLOCK = time.perf_counter
LARGER_THAN_CACHES = 160 << 20
FORMATS: dict[str, Callable[[], QuantTensor]] = {
    "fp16": lambda: Plain.random((OUTPUTS, INPUTS), dtype=torch.float16),
    "bf16": lambda: Plain.random((OUTPUTS, INPUTS), dtype=torch.bfloat16),
    "int4": lambda: IntGroup.random((OUTPUTS, INPUTS), bits=4, group_size=64),
    "int4-sym-32": lambda: IntGroup.random(
        (OUTPUTS, INPUTS), bits=4, group_size=32, symmetric=True
    ),
    "int8": lambda: IntGroup.random((OUTPUTS, INPUTS), bits=8, group_size=64, symmetric=True),
    "w8a8": lambda: Int8Channel.random((OUTPUTS, INPUTS)),
    "fp8": lambda: Float8.random((OUTPUTS, INPUTS)),
    "fp8-weight-only": lambda: Float8.random((OUTPUTS, INPUTS), activation="none"),
    "vptq": lambda: VectorQuant.random((OUTPUTS, INPUTS)),
    "sparse-w8a8": lambda: Sparse24.random((OUTPUTS, INPUTS)),
}


def seconds_each(linears: list[NativeLinear], x: torch.Tensor) -> float:
    begin = CLOCK()
    for linear in linears:
        linear(x)
    return (CLOCK() - begin) / len(linears)


def reading(buffer: torch.Tensor) -> float:
    begin = CLOCK()
    buffer.sum()
    return CLOCK() - begin


def measure(names: list[str], counts: list[int], rounds: int) -> list[dict]:
    made = {name: FORMATS[name]() for name in names}
    copies = {}
    for name, tensor in made.items():
        first = NativeLinear(tensor)
        copies[name] = [first] + [
            NativeLinear(tensor) for _ in range(LARGER_THAN_CACHES // first.nbytes)
        ]
    buffer = torch.ones(LARGER_THAN_CACHES // 4)
    reads, times = [], {}
    for _ in range(rounds):
        reads.append(reading(buffer))
        for name in names:
            for rows in counts:
                few = (
                    copies[name] if rows == 1 else copies[name][: max(2, len(copies[name]) // rows)]
                )
                taken = seconds_each(few, torch.randn(rows, INPUTS))
                times[name, rows] = min(taken, times.get((name, rows), taken))
    read = buffer.nbytes / min(reads)
    return [
        dict(
            bench="native_products",
            format=name,
            rows=rows,
            threads=library.thread_count(),
            milliseconds=1e3 * taken,
            weight_bytes=copies[name][0].nbytes,
            gb_s=copies[name][0].nbytes / taken / 1e9,
            share=copies[name][0].nbytes / taken / read,
            read_gb_s=read / 1e9,
            why=copies[name][0].why,
        )
        for (name, rows), taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,2,3,4,8,64")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of the one thread, where other programs are running",
    )
    options = parser.parse_args()
    if options.cpu_time:
        global CLOCK
        CLOCK = time.thread_time
    rows = [
        dict(
            bench="environment",
            machine=platform.machine(),
            cores=os.cpu_count(),
            load_average=os.getloadavg()[0],
            cpu_time=options.cpu_time,
            instructions=library.load().instructions().decode(),
        )
    ]
    for threads in options.threads.split(","):
        os.environ["OMP_NUM_THREADS"] = threads
        torch.set_num_threads(int(threads))
        library.start_team(int(threads))
        rows += measure(
            options.formats.split(","),
            [int(count) for count in options.rows.split(",")],
            options.rounds,
        )
    for row in rows[1:]:
        print(
            f"{row['format']:16} {row['threads']:3} threads {row['rows']:4} rows "
            f"{row['milliseconds']:8.3f} ms {row['gb_s']:6.1f} GB/s {row['share']:5.0%}"
        )
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
