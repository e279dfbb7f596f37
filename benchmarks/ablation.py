"""Does every kernel earn its place? Whole captured decode steps, timed with kernels left out.

    python benchmarks/ablation.py OUT.jsonl [--models qwen3-8b:int4,qwen3-8b:w8a8] [--rows
        1,8,32,64]
        [--without gemv_splitk,gemv_cluster,gemv_splitk+gemm_small]

A kernel that is left out is taken from every weight format, so the choice goes to the next one that
takes the weight. The steps of all variants are captured over the same weights and replayed by
turns; one that launches the same kernels as another is not timed. A row for each model, number of
rows and variant: microseconds of a step, and their ratio to a step with all kernels.

`--compile` measures nothing: it compiles what the same command will time, on a machine without a
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.bench.kernels import chosen
from flyweight.bench.rows import ResultFile, Row, environment_row, make_row, rounded
from flyweight.bench.timing import percentile, turns
from flyweight.engine import ahead
from flyweight.engine.graphs import Choice, DecodeGraphs
from flyweight.engine.rows import Rows
from flyweight.kernels import jit, precompile
from flyweight.kernels.attention import qkv
from flyweight.kernels.dry_run import dry_run
from flyweight.kernels.linear import (
    choose,
    gemm,
    gemm_shape,
    gemm_small,
    gemv,
    gemv_cluster,
    gemv_splitk,
)
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

MODELS = (
    "qwen3-8b:bf16,qwen3-8b:int4,qwen3-8b:w8a8,qwen3-8b:w8a16,qwen3-8b:fp8,"
    "qwen3-4b:int4,qwen2-57b-a14b:int4"
)
KERNELS = ("gemv_splitk", "gemv_cluster", "gemm_small", "gemm_int16", "gemv_registers")
MODULES: tuple[ModuleType, ...] = (
    choose,
    gemm,
    gemm_shape,
    gemm_small,
    gemv,
    gemv_cluster,
    gemv_splitk,
    qkv,
)
# linears behind a norm; the others add their result to the hidden state
NORMED = ("qkv", "gate_up")
LENGTH = 300  # tokens of each sequence
PAGES = 32  # of each sequence
REPLAYS = 24  # of a sample
Variant = tuple[str, ...]  # kernels that are left out


@contextlib.contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """No format is taken by these kernels in here; what was chosen before is chosen anew."""
    before = {one: one.kernels for one in FORMATS.values()}
    try:
        for one, kernels in before.items():
            object.__setattr__(one, "kernels", kernels - set(names))
        forget_choices()
        yield
    finally:
        for one, kernels in before.items():
            object.__setattr__(one, "kernels", kernels)
        forget_choices()


def forget_choices() -> None:
    for module in MODULES:
        for thing in list(vars(module).values()):
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()


def forget_calls(decoder: Decoder) -> None:
    """Launches of gemm.cu are kept with the weights."""
    linears = [linear.fused for block in decoder.blocks for linear in block.linears.values()]
    for linear in (*linears, decoder.head.fused):
        if isinstance(linear, TiledLinear):
            linear.weight.calls.clear()


def kernels_of(decoder: Decoder, rows: int) -> dict[str, str]:
    """group → the kernel that multiplies it in a step; experts have kernels of their own."""
    groups = {
        name: one
        for name, one in decoder.blocks[-1].linears.items()
        if not name.startswith("experts.")
    }
    return {
        name: chosen(one.fused, rows, norm=name in NORMED, residual=name not in NORMED).kernel
        for name, one in groups.items()
    }


def variants_of(text: str) -> list[Variant]:
    """ "a,b+c" → nothing left out, a, then b and c together."""
    found = [tuple(one.split("+")) for one in text.split(",") if one]
    unknown = sorted({name for one in found for name in one} - set(KERNELS))
    if unknown:
        raise SystemExit(
            f"no kernel {', '.join(unknown)} can be left out; those that can: {', '.join(KERNELS)}"
        )
    return [(), *found]


@dataclass(frozen=True)
class Captured:
    """A step of one variant."""

    graphs: DecodeGraphs
    kernels: dict[str, str]
    files: frozenset[jit.Wanted]  # what it launches

    def replay(self, size: int) -> None:
        self.graphs.graphs[size, Choice.GREEDY].replay()


@contextlib.contextmanager
def listening() -> Iterator[set[jit.Wanted]]:
    """The kernels that are asked for in here."""
    found: set[jit.Wanted] = set()
    load = jit.load

    def heard(file: str, *, defines: dict | None = None, registers: int | None = None) -> object:
        found.add(jit.Wanted(file, tuple(sorted((defines or {}).items())), registers))
        return load(file, defines=defines, registers=registers)

    jit.load = heard
    try:
        yield found
    finally:
        jit.load = load


def load_model(model: str, device: torch.device) -> tuple[Decoder, list[KVStorage]]:
    name, scheme = model.split(":")
    decoder = Decoder.load(
        PresetWeights(name, scheme, device=device), device=device, dtype=torch.bfloat16
    )
    config = decoder.config
    return decoder, [
        KVStorage(
            *(
                torch.randn(
                    64 * PAGES + 1,
                    ahead.PAGE,
                    config.kv_heads,
                    config.head_dim,
                    device=device,
                    dtype=decoder.dtype,
                )
                for _ in range(2)
            )
        )
        for _ in range(config.layers)
    ]


def rows_for(decoder: Decoder, most: int) -> Rows:
    rows = Rows(most, pages=PAGES, vocabulary=decoder.config.vocab_size, device=decoder.device)
    rows.tables.copy_(
        torch.arange(most * PAGES, dtype=torch.int32, device=decoder.device).view(most, PAGES)
    )
    return rows


def capture(
    decoder: Decoder, caches: list[KVStorage], rows: Rows, size: int, variant: Variant
) -> Captured:
    with without(variant), listening() as files:
        forget_calls(decoder)
        graphs = DecodeGraphs(decoder, caches, rows, sizes=(size,))
        graphs.capture(size)
        return Captured(graphs, kernels_of(decoder, size), frozenset(files))


def begin(rows: Rows, size: int) -> None:
    rows.lengths.zero_()
    rows.lengths[:size] = LENGTH


def sample(one: Captured, rows: Rows, size: int) -> float:
    """Microseconds of a step."""
    begin(rows, size)
    one.replay(size)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(REPLAYS):
        one.replay(size)
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last) / REPLAYS


def measure(
    model: str,
    size: int,
    variants: Sequence[Variant],
    *,
    decoder: Decoder,
    caches: list[KVStorage],
    samples: int,
) -> list[Row]:
    rows = rows_for(decoder, size)
    begin(rows, size)
    captured: dict[Variant, Captured] = {}
    for variant in variants:
        one = capture(decoder, caches, rows, size, variant)
        if all(one.files != other.files for other in captured.values()):
            captured[variant] = one
    times: dict[Variant, list[float]] = {variant: [] for variant in captured}
    for _, variant in turns(list(captured), samples):
        times[variant].append(sample(captured[variant], rows, size))
    return result_rows(
        model, size, times, {variant: one.kernels for variant, one in captured.items()}
    )


def result_rows(
    model: str, size: int, times: dict[Variant, list[float]], kernels: dict[Variant, dict[str, str]]
) -> list[Row]:
    """The first of `times` has all kernels: what the others are compared with."""
    name, scheme = model.split(":")
    medians = {variant: percentile(found, 50) for variant, found in times.items()}
    base = medians[()]
    return [
        {
            "model": name,
            "scheme": scheme,
            "rows": size,
            "without": "+".join(variant) or None,
            "us": median,
            "ratio": median / base,
            "kernels": kernels[variant],
        }
        for variant, median in medians.items()
    ]


def measure_model(model: str, options: argparse.Namespace) -> None:
    file = ResultFile(options.out)
    environment = environment_row("cuda")
    file.append([environment])
    decoder, caches = load_model(model, torch.device("cuda", 0))
    for size in options.rows:
        found = measure(
            model, size, options.variants, decoder=decoder, caches=caches, samples=options.samples
        )
        file.append(make_row("ablation", environment["id"], **rounded(row)) for row in found)
        for row in found[1:]:
            print(
                f"{model}, {size} rows, without {row['without']}: {row['ratio']:.3f} × "
                f"{found[0]['us']:.1f} us",
                flush=True,
            )


def wanted_by(model: str, variants: Sequence[Variant], target: ahead.Target) -> set[jit.Wanted]:
    """What steps of all variants ask for; a process that ran this is good for nothing else."""
    with dry_run(target.gpu):
        decoder = ahead.load(f"preset:{model}", None)
        for variant in variants:
            with without(variant):
                forget_calls(decoder)
                ahead.run_steps(decoder, target)
    return jit.wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("ablation.jsonl"))
    parser.add_argument("--models", default=MODELS, help="PRESET:SCHEME, several with commas")
    parser.add_argument("--rows", default="1,2,4,8,16,24,32,48,64")
    parser.add_argument(
        "--without",
        default=",".join([*KERNELS, "+".join(KERNELS)]),
        help="kernels; + for several at once",
    )
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.rows = [int(rows) for rows in options.rows.split(",")]
    options.variants = variants_of(options.without)
    models = options.models.split(",")
    if options.compile:
        target = ahead.Target(gpu.GPUS["sm_90a"], sequences=max(options.rows))
        runs = [functools.partial(wanted_by, model, options.variants, target) for model in models]
        done = precompile.precompile(runs, target.gpu.architecture, listen=lambda *_: None)
        print(f"{done.kernels} kernels, {done.fresh} of them compiled now")
        return
    for model in models:  # in a process of its own, which gives its memory back
        worker = multiprocessing.get_context("spawn").Process(
            target=measure_model, args=(model, options)
        )
        worker.start()
        worker.join()


if __name__ == "__main__":
    main()
