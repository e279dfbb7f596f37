#!/usr/bin/env python3
r"""Linears of 4 to 2,048 rows without wgmma: tiles of gemm_mma.cu and the kernels for few rows.

They run side by side, with weights that are not in the cache:

    FLYWEIGHT_PRETEND=sm_80:132 python benchmarks/workshop/mma_tiles.py --compile
    FLYWEIGHT_PRETEND=sm_80:132 python benchmarks/workshop/mma_tiles.py -o mma-tiles-h200.jsonl

A tile is warps along outputs and tokens, 16 outputs and 8 tokens of a warp, thread blocks on an SM;
`beside`: one to an SM, with room for the next kernel's. W: whole tiles, L: all work cut evenly, by
as many thread blocks as end with tiles, or by all.
Each variant is compared with float64 first. FLYWEIGHT_OVERLAP=1 lets launches overlap.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.bench import peers, replay
from flyweight.bench.kernels import FORMATS, Case, reference, relative_error
from flyweight.kernels import dependent_launch
from flyweight.kernels.compiler import KernelError
from flyweight.kernels.linear import choose, gemm_mma, gemv, gemv_plan, gemv_splitk, tiles
from flyweight.kernels.linear.format import FORMATS as WEIGHT_FORMATS
from flyweight.kernels.linear.tiles import TiledWeight
from flyweight.kernels.tuned import MmaTile

CHECKED = 32  # rows
MOST_ERROR = 6e-3
SHAPES = {"o": (4096, 4096), "qkv": (6144, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
RAGGED = {"ragged": (1000, 576), "narrow": (192, 1536), "long": (1000, 7392)}
BESIDE = (2, 1)
TILES: dict[int, list[tuple[int, ...]]] = {
    4: [],
    8: [(8, 1, 1, 1, 2), (8, 1, 1, 1, *BESIDE)],
    16: [(8, 1, 1, 2, 2), (8, 1, 1, 2, *BESIDE), (8, 1, 2, 2, *BESIDE)],
    32: [(8, 1, 1, 4, 2), (8, 1, 1, 4, *BESIDE), (8, 1, 2, 4, *BESIDE)],
    64: [(4, 1, 2, 8, 2), (8, 1, 1, 8, *BESIDE), (8, 1, 2, 8, 1)],
    2048: [(2, 2, 4, 8, 2), (4, 2, 4, 8, 1), (8, 1, 2, 16, 1)],
}
# Two to an SM and one beside the next kernel's; more warps, or fewer reads of x for each product.
FEW: dict[int, list[tuple[int, ...]]] = {
    64: [
        (4, 1, 2, 8, 2),
        (4, 2, 2, 4, 2),
        (8, 1, 1, 8, 2),
        (4, 2, 2, 4, *BESIDE),
        (8, 1, 1, 8, *BESIDE),
    ],
    32: [
        (8, 1, 1, 4, 2),
        (8, 1, 2, 4, 2),
        (4, 1, 2, 4, 3),
        (8, 1, 1, 4, *BESIDE),
        (8, 1, 2, 4, *BESIDE),
    ],
    16: [(8, 1, 1, 2, 2), (8, 1, 1, 2, *BESIDE)],
    4: [(8, 1, 1, 1, 2), (8, 1, 1, 1, *BESIDE)],
}
Run = Callable[[TiledWeight, Tensor], Tensor]


class Trial(NamedTuple):
    """A linear of so many rows, the tiles that are tried, and how they are shared out."""

    format: str
    shape: str
    rows: int
    tiles: list[tuple[int, ...]]
    splits: str = "L"

    @property
    def size(self) -> tuple[int, int]:
        return (SHAPES | RAGGED)[self.shape]


def few_trials() -> Iterator[Trial]:
    """Rows up to 64 of every linear, where Marlin is near."""
    for rows, several in FEW.items():
        for name in ("w4a16", "w8a16"):
            for shape in ("gate_up", "o", "down", "qkv"):
                yield Trial(name, shape, rows, several)


def trials(*, ragged: bool) -> Iterator[Trial]:
    if ragged:
        yield Trial("w4a16", "ragged", 33, TILES[32][:1], "WL")
        yield Trial("w8a8", "narrow", 65, TILES[64][:1])
        yield Trial("bf16", "long", 17, TILES[32][1:2])
    yield Trial("w4a16", "gate_up", 2048, TILES[2048], "W")
    for rows in (16, 64, 8, 32):
        for shape in ("o", "gate_up", "down"):
            yield Trial("w4a16", shape, rows, TILES[rows])
    for rows in (16, 64):
        for shape in ("o", "gate_up"):
            yield Trial("w8a16", shape, rows, TILES[rows][:2])
    for name in ("w8a16", "bf16", "w8a8"):
        yield Trial(name, "gate_up", 2048, TILES[2048][:2], "W")
    yield Trial("w4a16", "gate_up", 16, TILES[16][:1], "W")
    yield Trial("w4a16", "down", 4, TILES[4])
    yield Trial("w4a16", "qkv", 16, TILES[16][:2])


def variants(trial: Trial, weight: TiledWeight, device: gpu.Gpu) -> dict[str, Run]:
    """What multiplies such rows, by name; what does not fit is left out."""
    matrix = weight.matrix
    rows = trial.rows
    kinds: dict[str, Any] = {"gemm_mma": gemm_mma, "gemv": gemv, "gemv_splitk": gemv_splitk}
    found: dict[str, Run] = {}
    now = kinds.get(choose.choose(weight, rows, device).kernel)
    if now is not None and (now is not gemm_mma or rows > 64):  # else it is one of the tiles
        found["now"] = now.multiply
    if rows == 8 and gemv_plan.fits(matrix, rows, device):
        found["gemv"] = gemv.multiply
    for slices in (3, 6) if rows in (4, 8) and trial.shape == "down" else ():
        if gemv_splitk.choose(matrix, rows, device, slices):
            found[f"splitk {slices}"] = lambda w, x, n=slices: gemv_splitk.multiply(w, x, slices=n)
    for sizes in trial.tiles:
        tile = MmaTile(*sizes[:5], 1.0, len(sizes) > 5)
        for letter in trial.splits:
            split = gemm_mma.LINE if letter == "L" else gemm_mma.WHOLE
            padded = gemm_mma.padded_rows(rows)
            cut = gemm_mma.plan(matrix, padded, device, tile=tile, split=split)
            name = ".".join(map(str, sizes[:5])) + (" beside" if tile.beside else "")
            if cut is None:
                continue
            found[f"{name} {letter}"] = lambda w, x, c=cut: gemm_mma.multiply(w, x, cut=c)
            everyone = replace(cut, working=cut.grid(device.processors))
            if split == gemm_mma.LINE and cut != everyone:
                found[f"{name} {letter} all"] = lambda w, x, c=everyone: gemm_mma.multiply(
                    w, x, cut=c
                )
    return found


def run_trial(trial: Trial, options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    outputs, inputs = trial.size
    case = Case(trial.format, 1, inputs, outputs, torch.bfloat16, zero_points=False)
    tensor = FORMATS[trial.format](case, trial.size, device)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(trial.rows, inputs, device=device).bfloat16()
    want = reference(tensor, x[:CHECKED])
    once = options.compile or trial.rows > 64
    count = 1 if once else replay.copies_for(weight.nbytes, device)
    shared = {id(one): one for one in WEIGHT_FORMATS.values()}
    copies = [weight, *(copy.deepcopy(weight, shared) for _ in range(count - 1))]
    errors: dict[str, float] = {}
    works: dict[str, replay.Work] = {}
    for name, run in variants(trial, weight, gpu.of(device)).items():
        try:
            errors[name] = relative_error(run(weight, x)[:CHECKED], want)
        except KernelError as error:
            print(f"{trial} {name}: {error}"[:300], flush=True)
            continue
        if not errors[name] < MOST_ERROR:
            print(f"WRONG by {errors[name]:.1e}: {trial} {name}", flush=True)
        works[name] = replay.Work(lambda i, run=run: run(copies[i], x), count)
    if options.vllm_library:
        runs = [peers.marlin(tensor, rows=trial.rows, dtype=x.dtype) for _ in range(count)]
        errors["marlin"] = relative_error(runs[0](x)[:CHECKED], want)
        works["marlin"] = replay.Work(lambda i: runs[i](x), count)
    if options.compile:
        return []
    times = replay.measure(works, device, samples=options.samples)
    what = dict(format=trial.format, shape=trial.shape, rows=trial.rows)
    return [
        what | dict(variant=name, us=round(statistics.median(found), 2), error=errors[name])
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile and compare, time nothing")
    parser.add_argument("--few", action="store_true", help="the tiles of FEW alone")
    parser.add_argument("--vllm-library", type=Path, help="of vLLM's wheel: Marlin takes its turns")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after so many")
    parser.add_argument("-o", "--out", type=Path, help="rows (JSONL)")
    options = parser.parse_args()
    began = time.monotonic()
    name = torch.cuda.get_device_name(0)
    imitated = gpu.imitated()
    what = dict(
        bench="mma_tiles",
        device=name if imitated is None else f"{name} as {imitated.architecture}",
        processors=gpu.of(0).processors,
        overlap=dependent_launch.enabled,
    )
    if options.vllm_library:
        peers.load_library(options.vllm_library)
    for trial in few_trials() if options.few else trials(ragged=options.compile):
        if time.monotonic() - began > options.seconds:
            print(f"no time for {trial}")
            break
        rows = run_trial(trial, options)
        rows.sort(key=lambda row: row["us"])
        told = "  ".join(f"{row['variant']} {row['us']}" for row in rows)
        print(f"{trial.format} {trial.shape} {trial.rows} rows: {told}", flush=True)
        if options.out and rows:
            with options.out.open("a") as file:
                file.writelines(json.dumps(what | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
