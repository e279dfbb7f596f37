"""Which kernel is the fastest, by format and number of rows: the borders of kernels/tuned/*.toml,
measured.

    python benchmarks/crossovers.py OUT.jsonl [--formats w8a8,w8a8-2:4,fp8] [--shapes 4096x6144]
        [--rows 1,4,8,16,64,4096]

Every kernel that takes a weight is timed as `flyweight bench kernel` does it (cold, by graph
replay, the quantization of x included), torch's own bf16 product beside them. One row for each;
what is printed is the fastest of each format and number of rows, what `choose` takes, and how a 2:4
weight compares with the dense one. Kernels are compiled first, by all cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, reference, relative_error
from flyweight.bench.rows import ResultFile, Row, environment_row, make_row, rounded
from flyweight.bench.timing import percentile
from flyweight.kernels import compiler, dependent_launch, dispatch, jit
from flyweight.kernels.linear import (
    gemm,
    gemm_mma,
    gemm_small,
    gemv_cluster,
    gemv_plan,
    gemv_splitk,
)
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight
from flyweight.tensors import QuantTensor

CHECKED = 256  # rows of a result that are compared with float64
DEVICE = torch.device("cuda", 0)


def kernels_for(weight: TiledWeight, rows: int) -> Iterator[str]:
    matrix = weight.matrix
    device = gpu.of(DEVICE)
    if rows in gemv_plan.ROWS and gemv_plan.fits(matrix, rows, device):
        yield "gemv"
    if gemv_splitk.choose(matrix, rows, device) is not None:
        yield "gemv_splitk"
    if gemv_cluster.unsupported_reason(weight, rows, device) is None:
        yield "gemv_cluster"
    if gemm_small.choose(matrix, rows, device) is not None:
        yield "gemm_small"
    if gemm.unsupported_reason(matrix, rows, device) is None:
        yield "gemm"
    if gemm_mma.unsupported_reason(matrix, rows, device) is None:
        yield "gemm_mma"
    if rows > 8:
        yield "cublas"


class Recorder:
    """Stands for jit.load: keeps what would be compiled, launches nothing."""

    def __init__(self) -> None:
        self.wanted: set[tuple] = set()

    def __call__(
        self, file: str, *, defines: dict | None = None, registers: int | None = None
    ) -> Recorder:
        flags = {**(defines or {}), **dependent_launch.defines(file, gpu.of(DEVICE))}
        self.wanted.add((file, tuple(sorted(flags.items())), registers, jit.current_architecture()))
        return self

    def kernel(self, name: str) -> Recorder:
        return self

    def launch(self, *args: Any, **options: Any) -> None:
        pass


def compile_one(job: tuple) -> None:
    file, defines, registers, architecture = job
    compiler.compile_cubin(file, dict(defines), architecture, registers)


def compile_all(linears: list[tuple[TiledLinear, list[int]]]) -> int:
    load, jit.load = jit.load, (record := Recorder())
    for linear, counts in linears:
        for rows in counts:
            x = torch.empty(rows, linear.weight.in_features, dtype=torch.bfloat16, device=DEVICE)
            for kernel in kernels_for(linear.weight, rows):
                linear.multiply(x, kernel=kernel)
        linear.weight.calls.clear()  # of kernels that launch nothing
    jit.load = load
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, sorted(record.wanted, key=str), chunksize=4))
    return len(record.wanted)


def linear_of(case: Case, tensor: QuantTensor | None = None) -> TiledLinear:
    tensor = tensor or FORMATS[case.format](case, (case.out_features, case.in_features), DEVICE)
    return TiledLinear(tensor, dtype=case.dtype, ops=dispatch.decoder_ops(DEVICE))


def measure(case: Case, counts: list[int], samples: int) -> Iterator[Row]:
    tensor = FORMATS[case.format](case, (case.out_features, case.in_features), DEVICE)
    first = linear_of(case, tensor)
    count = replay.copies_for(first.nbytes, DEVICE)
    copies = [first, *(linear_of(case, tensor) for _ in range(count - 1))]
    plain = [
        torch.randn(case.out_features, case.in_features, device=DEVICE).to(case.dtype)
        for _ in range(replay.copies_for(2 * case.out_features * case.in_features, DEVICE))
    ]
    for rows in counts:
        x = torch.randn(rows, case.in_features, device=DEVICE).to(case.dtype)
        want = reference(tensor, x[:CHECKED])
        works = {
            kernel: replay.Work(
                lambda i, kernel=kernel, x=x: copies[i].multiply(x, kernel=kernel), count
            )
            for kernel in kernels_for(first.weight, rows)
        }
        errors = {
            kernel: relative_error(first.multiply(x, kernel=kernel)[:CHECKED], want)
            for kernel in works
        }
        works["torch"] = replay.Work(
            lambda i, x=x: torch.nn.functional.linear(x, plain[i]), len(plain)
        )
        measured = replay.measure(works, DEVICE, samples=samples)
        times = {name: percentile(found, 50) for name, found in measured.items()}
        chosen = first.kernel_for(rows)
        for kernel in errors:
            yield {
                "format": case.format,
                "kernel": kernel,
                "rows": rows,
                "in_features": case.in_features,
                "out_features": case.out_features,
                "dtype": "bfloat16",
                "zero_points": case.fields()["zero_points"],
                "us": times[kernel],
                "torch_us": times["torch"],
                "ratio": times[kernel] / times["torch"],
                "relative_error": errors[kernel],
                "chosen": kernel == chosen,
                "nbytes": first.nbytes,
            }


def show(rows: list[Row]) -> None:
    """One line for each format, shape and number of rows."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(
            (row["in_features"], row["out_features"], row["rows"], row["format"]), []
        ).append(row)
    best = {key: min(found, key=lambda row: row["us"]) for key, found in groups.items()}
    for (*shape, name), found in groups.items():
        one, dense = best[*shape, name], best.get((*shape, name.removesuffix("-2:4")))
        chosen = next((row for row in found if row["chosen"]), one)
        words = [
            f"{shape[0]} × {shape[1]}, {shape[2]} rows, {name}: {one['kernel']} {one['us']:.1f} us",
            f"{1 / one['ratio']:.2f} × torch's speed",
            *([f"{dense['us'] / one['us']:.2f} × dense"] if dense else []),
            f"chosen {chosen['kernel']} {chosen['us']:.1f}",
        ]
        print(", ".join(words) + (" <<<" if chosen["us"] > 1.03 * one["us"] else ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("crossovers.jsonl"))
    parser.add_argument("--formats", default="w8a8,w8a8-2:4,w8a16,w8a16-2:4,w4a16,w4a16-2:4,fp8")
    parser.add_argument(
        "--shapes", default="4096x6144,4096x24576,12288x4096", help="inputs x outputs"
    )
    parser.add_argument("--rows", default="1,4,8,16,64,256,4096")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument(
        "--symmetric", action="store_true", help="integer weights without zero points"
    )
    options = parser.parse_args()
    begin, counts = time.monotonic(), [int(rows) for rows in options.rows.split(",")]
    cases = [
        Case(
            name, 1, *map(int, shape.split("x")), torch.bfloat16, zero_points=not options.symmetric
        )
        for shape in options.shapes.split(",")
        for name in options.formats.split(",")
    ]
    count = compile_all([(linear_of(case), counts) for case in cases])
    print(f"{count} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    file, environment, found = ResultFile(options.out), environment_row("cuda"), []
    file.append([environment])
    for case in cases:
        rows = list(measure(case, counts, options.samples))
        file.append(make_row("kernel", environment["id"], **rounded(row)) for row in rows)
        found += rows
    show(found)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
