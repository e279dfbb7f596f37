#!/usr/bin/env python3
r"""Linears of prompts without wgmma: tiles of gemm_mma.cu and ways to share them out, by turns.

    FLYWEIGHT_PRETEND=sm_80:132 python benchmarks/workshop/mma_prompts.py --compile
    FLYWEIGHT_PRETEND=sm_80:132 python benchmarks/workshop/mma_prompts.py -o mma-prompts.jsonl

A variant is a tile (as in mma_tiles.py) or `now`, W for whole tiles or L for work cut evenly, and
`waits` for the loop that loads nothing ahead of its barriers. cuBLAS takes its turns with the same
numbers in 16 bits. Of few rows weights are not in the cache.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.kernels import FORMATS, Case, reference, relative_error
from flyweight.kernels.compiler import KernelError
from flyweight.kernels.linear import gemm_mma, tiles
from flyweight.kernels.linear.format import FORMATS as WEIGHT_FORMATS
from flyweight.kernels.tuned import MmaTile

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "gate_up 7b": (37888, 3584),
    "down 7b": (3584, 18944),
    "gate_up 3b": (22016, 2048),
    "down 3b": (2048, 11008),
    "gate_up .5b": (9728, 896),
    "down .5b": (896, 4864),
    "ragged": (1000, 7392),
    "narrow": (1000, 600),
}
SPLITS = {"W": gemm_mma.WHOLE, "L": gemm_mma.LINE}
MOST_ERROR = 6e-3
FEW = 64
CHECKED = 48  # rows: the first, the last and some between


def cuts(
    matrix: tiles.Matrix, rows: int, device: gpu.Gpu, variants: list[str]
) -> Iterator[tuple[str, gemm_mma.Cut]]:
    """What of the variants fits: `2.4.4.8.1 W`, `4.2.4.8.1 L waits`, `now`."""
    padded = gemm_mma.padded_rows(rows)
    for variant in variants:
        name, *words = variant.split()
        sizes = () if name == "now" else tuple(map(int, name.split(".")))
        tile = MmaTile(*sizes[:5], 1.0) if sizes else None
        split = next((SPLITS[word] for word in words if word in SPLITS), None)
        cut = gemm_mma.plan(matrix, padded, device, tile=tile, split=split)
        if cut is not None:
            yield variant, replace(cut, ahead=False) if "waits" in words else cut


def run_trial(
    name: str, shape: str, rows: int, variants: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    outputs, inputs = SHAPES[shape]
    case = Case(name, 1, inputs, outputs, torch.bfloat16, zero_points=False)
    tensor = FORMATS[name](case, (outputs, inputs), device)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    count = 1 if options.compile or rows > FEW else replay.copies_for(weight.nbytes, device)
    shared = {id(one): one for one in WEIGHT_FORMATS.values()}
    copies = [weight, *(copy.deepcopy(weight, shared) for _ in range(count - 1))]
    x = torch.randn(rows, inputs, device=device).bfloat16()
    picked = torch.randperm(rows, device=device)[:CHECKED]
    picked[0] = rows - 1
    want = reference(tensor, x[picked])
    errors: dict[str, float] = {}
    works: dict[str, replay.Work] = {}
    found = list(cuts(weight.matrix, rows, gpu.of(device), variants))
    told = {label: (cut.stage_blocks, cut.stages) for label, cut in found}
    for label, cut in found:
        out = torch.full((rows, outputs), float("nan"), device=device).bfloat16()
        try:
            gemm_mma.multiply(weight, x, out, cut=cut)
            torch.cuda.synchronize()
        except KernelError as error:
            print(f"{name} {shape} {rows} {label}: {error}"[:300], flush=True)
            continue
        errors[label] = relative_error(out[picked], want)
        if not (errors[label] < MOST_ERROR and out.isfinite().all()):
            print(f"WRONG by {errors[label]:.1e}: {name} {shape} {rows} {label}", flush=True)
        works[label] = replay.Work(functools.partial(multiply, copies, x, cut), count)
    if options.compile:
        return []
    if rows > FEW:
        dense = tensor.dequantize(torch.bfloat16)
        works["cublas"] = replay.Work(lambda i: x @ dense.T)
    if options.zeros:
        zeros = torch.zeros_like(x)
        best = found[-1][1]
        works["zeros " + found[-1][0]] = replay.Work(
            lambda i: gemm_mma.multiply(weight, zeros, cut=best)
        )
        works["zeros cublas"] = replay.Work(lambda i: zeros @ dense.T)
    if weight.format.quantizes_input and rows > FEW:
        cut = found[-1][1]
        works["pack of " + found[-1][0]] = replay.Work(lambda i: pack_alone(weight, x, cut))
    times = replay.measure(works, device, samples=options.samples)
    what = dict(format=name, shape=shape, rows=rows, outputs=outputs, inputs=inputs)
    return [
        what
        | dict(
            variant=label,
            us=round(statistics.median(sampled), 2),
            tflops=round(2e-6 * rows * outputs * inputs / statistics.median(sampled), 1),
            samples=[round(one, 1) for one in sampled],
            stages=told.get(label),
            error=errors.get(label),
            at=round(time.time(), 2),
        )
        for label, sampled in times.items()
    ]


def multiply(
    copies: list[tiles.TiledWeight], x: torch.Tensor, cut: gemm_mma.Cut, i: int
) -> torch.Tensor:
    return gemm_mma.multiply(copies[i], x, cut=cut)


def pack_alone(weight: tiles.TiledWeight, x: torch.Tensor, cut: gemm_mma.Cut) -> None:
    most = gemm_mma.padded_rows(x.shape[0])
    ends = gemm_mma.Ends(False, weight.epilogue(None), False, True)
    call = gemm_mma.make_call(weight, most, cut, ends)
    padded = call.padded(most)
    packed = torch.empty(gemm_mma.packed_size(weight, padded), dtype=torch.uint8, device=x.device)
    scale = torch.empty(padded, device=x.device)
    gemm_mma._pack(weight, call, x, packed, scale, norm=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile and compare, time nothing")
    parser.add_argument("--formats", default="bf16,w8a8")
    parser.add_argument("--shapes", default="o,qkv,down,gate_up")
    parser.add_argument("--rows", default="2048,8192")
    parser.add_argument("--variants", required=True, help="parted by commas")
    parser.add_argument("--zeros", action="store_true", help="the last one also with x of zeros")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after so many")
    parser.add_argument("-o", "--out", type=Path, help="rows (JSONL)")
    options = parser.parse_args()
    began = time.monotonic()
    imitated = gpu.imitated()
    name = torch.cuda.get_device_name(0)
    what = dict(
        bench="mma_prompts",
        device=name if imitated is None else f"{name} as {imitated.architecture}",
        processors=gpu.of(0).processors,
    )
    variants = options.variants.split(",")
    for rows in map(int, options.rows.split(",")):
        for shape in options.shapes.split(","):
            for name in options.formats.split(","):
                if time.monotonic() - began > options.seconds:
                    print(f"no time for {name} {shape} {rows}")
                    continue
                found = run_trial(name, shape, rows, variants, options)
                torch.cuda.empty_cache()
                for row in sorted(found, key=lambda row: row["us"]):
                    print(
                        f"{name} {shape} {rows}: {row['us']:9.1f} us {row['tflops']:6.1f} T  "
                        f"{row['variant']} {row['stages'] or ''}",
                        flush=True,
                    )
                if options.out and found:
                    with options.out.open("a") as file:
                        file.writelines(json.dumps(what | row) + "\n" for row in found)


if __name__ == "__main__":
    main()
