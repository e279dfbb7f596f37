#!/usr/bin/env python3
r"""One row of VPTQ: the launches that vptq.cu can make of it, side by side and beside torch's bf16.

    FLYWEIGHT_PRETEND=sm_80 python benchmarks/workshop/vptq_launches.py --compile
    FLYWEIGHT_PRETEND=sm_80 python benchmarks/workshop/vptq_launches.py -o vptq-launches-h200.jsonl

Weights are not in the cache, and each launch is compared with float64 first. `now` is the one that
is chosen. FLYWEIGHT_OVERLAP=1 lets launches overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, copied, reference, relative_error, torch_work
from flyweight.bench.shapes import BOOKS
from flyweight.kernels import dependent_launch, dispatch
from flyweight.kernels.vptq import gather
from flyweight.kernels.vptq.gather import Launch
from flyweight.kernels.vptq.linear import VptqLinear

MOST_ERROR = 6e-3
SHAPES = [
    (1024, 4096),
    (1024, 8192),
    (1024, 14336),
    (1024, 28672),
    (2048, 1024),
    (2048, 4096),
    (2048, 8192),
    (2048, 14336),
    (4096, 1024),
    (4096, 4096),
    (8192, 1024),
    (8192, 4096),
    (16384, 1024),
]
LAUNCHES = {
    "8 copies": Launch("staged"),
    "4 copies": Launch("staged", copies=4),
    "8 copies, 32 warps": Launch("staged", warps=32),
    "8 copies, 8 warps": Launch("staged", warps=8),
    "8 copies, even": Launch("staged", even=True),
    "4 copies, even": Launch("staged", copies=4, even=True),
    "half of the SMs": Launch("staged", share=2),
    "1 copy, two to an SM": Launch("staged", copies=1, resident=2),
    "2 copies, two to an SM": Launch("staged", copies=2, resident=2),
    "direct, 8 warps": Launch("direct", warps=8),
    "direct, 4 warps": Launch("direct", warps=4),
    "direct, 16 warps": Launch("direct", warps=16),
}


def launches(linear: VptqLinear, device: gpu.Gpu) -> Iterator[tuple[str, Launch | None]]:
    """What fits; None: the one that is chosen."""
    yield "now", None
    for name, launch in LAUNCHES.items():
        if launch.kernel == "direct" and not gather.takes_direct(linear.parts, device):
            continue
        if launch.kernel == "direct" and launch.warps > linear.layout.chunks:
            continue
        if gather.choose(linear.parts, 1, device, launch) is not None:
            yield name, launch


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    tensor = FORMATS["vptq"](case, (case.out_features, case.in_features), device)
    x = torch.randn(1, case.in_features, device=device).bfloat16()
    linear = dispatch.prepare(tensor, dtype=torch.bfloat16)
    want = reference(tensor, x)
    count = 1 if options.compile else replay.copies_for(linear.nbytes, device)
    copies = [linear, *(copied(linear, lambda: linear) for _ in range(count - 1))]
    works: dict[str, replay.Work] = {} if options.compile else {"torch": torch_work(case, device)}
    for name, launch in launches(linear, gpu.of(device)):
        error = relative_error(linear(x, launch=launch), want)
        if not error < MOST_ERROR:
            print(f"WRONG by {error:.1e}: {case} {name}", flush=True)
        works[name] = replay.Work(lambda i, launch=launch: copies[i](x, launch=launch), count)
    if options.compile:
        return {}
    times = replay.measure(works, device, samples=options.samples)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile and compare, time nothing")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after so many")
    parser.add_argument("-o", "--out", type=Path, help="rows (JSONL)")
    options = parser.parse_args()
    began = time.monotonic()
    imitated = gpu.imitated()
    name = torch.cuda.get_device_name(0)
    what = dict(
        bench="vptq_launches",
        device=name if imitated is None else f"{name} as {imitated.architecture}",
        processors=gpu.of(0).processors,
        overlap=dependent_launch.enabled,
    )
    shapes = SHAPES[2:3] if options.compile else SHAPES
    for inputs, outputs in shapes:
        for books in BOOKS:
            if time.monotonic() - began > options.seconds:
                return print(f"no time for {inputs} x {outputs}")
            case = Case("vptq", 1, inputs, outputs, torch.bfloat16, books=books)
            us = run_case(case, options)
            print(f"{inputs} x {outputs}, {books}: {us}", flush=True)
            if options.out and us:
                row = what | dict(in_features=inputs, out_features=outputs, books=books, us=us)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
