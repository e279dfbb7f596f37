#!/usr/bin/env python3
r"""One row of VPTQ: the launches that vptq.cu can make of it, side by side and beside torch's bf16.

    FLYWEIGHT_OVERLAP=1 python benchmarks/workshop/vptq_launches.py --compile sm_80
    FLYWEIGHT_PRETEND=sm_80 python benchmarks/workshop/vptq_launches.py -o vptq-launches-h200.jsonl

Weights are not in the cache, and each launch is compared with float64 first. `now` is the one that
is chosen. FLYWEIGHT_OVERLAP=1 lets launches overlap; `one by one` is then what is chosen without,
with lookups ordered by main entries alone. `--compile` compiles all of it by all cores, into
FLYWEIGHT_CACHE; it needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, copied, reference, relative_error, torch_work
from flyweight.bench.shapes import BOOKS
from flyweight.kernels import dependent_launch, dispatch, jit, precompile
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.kernels.vptq import gather_plan
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq.gather_plan import Launch
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
# those that were slower than torch's bf16 with overlap, and some larger ones
SLOWER = [
    (1024, 4096),
    (1024, 8192),
    (1024, 14336),
    (1024, 28672),
    (2048, 4096),
    (2048, 8192),
    (4096, 1024),
    (8192, 1024),
    (16384, 1024),
    (4096, 8192),
    (4096, 4096),
    (8192, 4096),
]
LAUNCHES = {
    "8 copies": Launch("staged"),
    "4 copies": Launch("staged", copies=4),
    "8 copies, 32 warps": Launch("staged", warps=32),
    "8 copies, 8 warps": Launch("staged", warps=8),
    "half of the SMs": Launch("staged", share=2),
    "half of the SMs, 4 copies": Launch("staged", share=2, copies=4),
    "half of the SMs, 2 copies": Launch("staged", share=2, copies=2),
    "half of the SMs, 8 warps": Launch("staged", share=2, warps=8),
    "half of the SMs, 4 copies, 8 warps": Launch("staged", share=2, copies=4, warps=8),
    "half of the SMs, 2 copies, 8 warps": Launch("staged", share=2, copies=2, warps=8),
    "1 copy, two to an SM": Launch("staged", copies=1, resident=2),
    "2 copies, two to an SM": Launch("staged", copies=2, resident=2),
    "1 copy, two to an SM, 8 warps": Launch("staged", copies=1, resident=2, warps=8),
    "2 copies, two to an SM, 8 warps": Launch("staged", copies=2, resident=2, warps=8),
    "direct, 8 warps": Launch("direct", warps=8),
    "direct, 4 warps": Launch("direct", warps=4),
    "direct, 16 warps": Launch("direct", warps=16),
}


def sliced(linear: VptqLinear, device: gpu.Gpu) -> Iterator[tuple[str, Launch]]:
    """The chosen launch with its columns in so many slices, on all SMs."""
    chosen = gather_plan.choose(linear.parts, 1, device)
    if chosen is not None and chosen.launch.kernel == "staged":
        whole = replace(chosen.launch, share=1)
        for split in (1, 2, 4, 8):
            yield f"{split} slices", replace(whole, split=split)


def launches(linear: VptqLinear, device: gpu.Gpu) -> Iterator[tuple[str, Launch | None]]:
    """What fits; None: the one that is chosen."""
    yield "now", None
    for name, launch in sliced(linear, device):
        if gather_plan.choose(linear.parts, 1, device, launch) is not None:
            yield name, launch
    for name, launch in LAUNCHES.items():
        if launch.kernel == "direct" and not gather_plan.takes_direct(linear.parts, device):
            continue
        if launch.kernel == "direct" and launch.warps > linear.layout.chunks:
            continue
        if gather_plan.choose(linear.parts, 1, device, launch) is not None:
            yield name, launch


def before(case: Case, tensor: Any, device: gpu.Gpu) -> tuple[VptqLinear, Launch | None]:
    """Ordered by main entries alone, and the launch that is chosen where none overlap."""
    ops = dispatch.decoder_ops(tensor.device)
    with mock.patch.object(gather_plan, "residual_copies", lambda *_, **__: 8):
        linear = vptq.prepare(tensor, dtype=case.dtype, ops=ops)
    assert isinstance(linear, VptqLinear)
    with mock.patch.object(dependent_launch, "enabled", new=False):
        chosen = gather_plan.choose(linear.parts, 1, device)
    return linear, chosen and chosen.launch


def made(
    case: Case, device: torch.device, only: str | None
) -> tuple[Any, list[tuple[str, VptqLinear, Launch | None]]]:
    """A weight, and what is timed of it."""
    where = torch.device("cpu") if gpu.is_pretended() else device
    shape = (case.out_features, case.in_features)
    tensor = FORMATS["vptq"](case, shape, where).to(device)
    linear = dispatch.prepare(tensor, dtype=case.dtype)
    assert isinstance(linear, VptqLinear)
    here = gpu.of(device)
    works = [(name, linear, launch) for name, launch in launches(linear, here)]
    if only is not None:
        return tensor, [one for one in works if re.search(only, one[0])]
    if dependent_launch.enabled:
        works.append(("one by one", *before(case, tensor, here)))
    return tensor, works


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    tensor, tried = made(case, device, options.only)
    x = torch.randn(1, case.in_features, device=device).bfloat16()
    want = reference(tensor, x)
    count = replay.copies_for(tried[0][1].nbytes, device)
    works: dict[str, replay.Work] = {"torch": torch_work(case, device)}
    several: dict[int, list[VptqLinear]] = {}
    for name, linear, launch in tried:
        error = relative_error(linear(x, launch=launch), want)
        if not error < MOST_ERROR:
            print(f"WRONG by {error:.1e}: {case} {name}", flush=True)
        own = several.get(id(linear))
        if own is None:
            again = functools.partial(lambda one: one, linear)
            own = [linear, *(copied(linear, again) for _ in range(count - 1))]
            several[id(linear)] = own
        works[name] = replay.Work(lambda i, launch=launch, own=own: own[i](x, launch=launch), count)
    times = replay.measure(works, device, samples=options.samples)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def wanted_by(
    shape: tuple[int, int], books: tuple[int, int], name: str, only: str | None
) -> set[jit.Wanted]:
    """Of a dry run: the kernels of one case."""
    with dry_run(gpu.by_name(name)):
        case = Case("vptq", 1, *shape, torch.bfloat16, books=books)
        _, tried = made(case, DEVICE, only)
        x = torch.empty(1, case.in_features, dtype=torch.bfloat16, device=DEVICE)
        for _, linear, launch in tried:
            linear(x, launch=launch)
    return jit.wanted


def compile_all(
    name: str, cases: list[tuple[tuple[int, int], tuple[int, int]]], only: str | None
) -> None:
    runs = [functools.partial(wanted_by, shape, books, name, only) for shape, books in cases]
    code = gpu.by_name(name).virtual_architecture
    found = precompile.precompile(runs, code, listen=lambda *_: None)
    print(f"{found.kernels} kernels, {found.fresh} of them compiled now, {found.seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", metavar="ARCH", help="compile for it, time nothing")
    parser.add_argument("--slower", action="store_true", help="the shapes that torch was faster at")
    parser.add_argument("--shapes", nargs="+", metavar="INPUTSxOUTPUTS", help="others than those")
    parser.add_argument("--only", metavar="PATTERN", help="of launches' names")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after so many")
    parser.add_argument("-o", "--out", type=Path, help="rows (JSONL)")
    options = parser.parse_args()
    began = time.monotonic()
    shapes = SLOWER if options.slower else SHAPES
    if options.shapes:
        shapes = [(int(i), int(o)) for i, o in (one.split("x") for one in options.shapes)]
    cases = [(shape, books) for shape in shapes for books in BOOKS]
    if options.compile:
        return compile_all(options.compile, cases, options.only)
    imitated = gpu.imitated()
    name = torch.cuda.get_device_name(0)
    what = dict(
        bench="vptq_launches",
        device=name if imitated is None else f"{name} as {imitated.architecture}",
        processors=gpu.of(0).processors,
        overlap=dependent_launch.enabled,
    )
    for (inputs, outputs), books in cases:
        if time.monotonic() - began > options.seconds:
            return print(f"no time for {inputs} x {outputs}, {books}")
        case = Case("vptq", 1, inputs, outputs, torch.bfloat16, books=books)
        us = run_case(case, options)
        print(f"{inputs} x {outputs}, {books}: {us}", flush=True)
        if options.out:
            row = what | dict(in_features=inputs, out_features=outputs, books=books, us=us)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
