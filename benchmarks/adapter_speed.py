"""What LoRA adapters cost in decode steps: captured steps without adapters, with them loaded, and
with them used.

    python benchmarks/adapter_speed.py --out OUT.jsonl [--models qwen3-8b:int4,qwen3-8b:bf16]
        [--rows 1,8] [--rank 16]

Two adapters on every linear of a preset with random weights. The steps are captured and replayed by
turns; a row for each model, number of rows and variant: microseconds of a step, and their ratio to
a step of the model without adapters.

    none      no adapter is loaded
    unused    two are loaded, and no row has one
    used      every row has one, by turns
    apart     the same with launches of their own (delta.cu), as several rows have it
    by torch  the same without delta.cu: products by torch

`--compile` compiles what the same command will time and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from pathlib import Path

import torch

from flyweight import gpu
from flyweight.batch import NOBODY, KVStorage
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.timing import percentile, turns
from flyweight.checkpoint.adapter import Adapter, LowRank
from flyweight.engine import ahead
from flyweight.engine.graphs import Choice, DecodeGraphs
from flyweight.engine.rows import Rows
from flyweight.kernels import jit, precompile
from flyweight.kernels.dry_run import dry_run
from flyweight.kernels.linear.delta import Delta
from flyweight.models.adapters import Adapters, adapted_groups
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.plan import ModelPlan
from flyweight.models.presets import PresetWeights
from flyweight.models.standard import plan_of

ADAPTERS = 2
LENGTH = 300  # tokens of each sequence
PAGES = 32  # of each sequence
REPLAYS = 24  # of a sample


def random_adapters(plan: ModelPlan, rank: int) -> Adapters:
    made = torch.Generator().manual_seed(0)
    found = []
    for number in range(ADAPTERS):
        modules = {}
        for layer in plan.layers:
            for group in adapted_groups(layer):
                for name, size in zip(group.linears, group.sizes, strict=True):
                    a = torch.randn(rank, group.in_features, generator=made, dtype=torch.float32)
                    b = torch.randn(size, rank, generator=made, dtype=torch.float32)
                    modules[layer.prefix + name] = LowRank(a, b, 1e-3)
        found.append(Adapter(f"adapter {number}", Path(), modules))
    return Adapters(found, plan)


def load(
    model: str, device: torch.device, rank: int | None, layers: list[int] | None = None
) -> Decoder:
    name, scheme = model.split(":")
    weights = PresetWeights(name, scheme, **({} if gpu.is_pretended() else {"device": device}))
    plan = plan_of(ModelConfig.from_dict(weights.config))
    adapters = None if rank is None else random_adapters(plan, rank)
    return Decoder.load(
        weights, device=device, dtype=torch.bfloat16, adapters=adapters, layers=layers
    )


def caches_for(decoder: Decoder, rows: int) -> list[KVStorage]:
    config = decoder.config
    size = (rows * PAGES + 1, ahead.PAGE, config.kv_heads, config.head_dim)
    return [KVStorage.zeros(size, decoder.dtype, decoder.device) for _ in range(config.layers)]


def capture(
    decoder: Decoder, caches: list[KVStorage], rows: int, *, used: bool
) -> torch.cuda.CUDAGraph:
    table = Rows(
        rows,
        pages=PAGES,
        vocabulary=decoder.config.vocab_size,
        device=decoder.device,
        adapted=decoder.adapters is not None,
    )
    table.tables.copy_(
        torch.arange(table.capacity * PAGES, dtype=torch.int32).view(table.capacity, PAGES)
    )
    table.lengths.fill_(LENGTH)
    if table.adapters is not None:
        slots = [row % ADAPTERS if used else NOBODY for row in range(table.capacity)]
        table.adapters.copy_(torch.tensor(slots, dtype=torch.int32))
    graphs = DecodeGraphs(decoder, caches, table, sizes=(table.capacity,))
    kept.append(graphs)
    if graphs.unadapted is not None and not used:
        graphs = graphs.unadapted
    # which takes no token, so that every replay is the same step
    graphs.capture(table.capacity, Choice.NONE)
    return graphs.graphs[table.capacity, Choice.NONE]


kept: list[DecodeGraphs] = []  # whose buffers the graphs read


def sample(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a step."""
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(REPLAYS):
        graph.replay()
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last) / REPLAYS


def measure_model(model: str, options: argparse.Namespace) -> None:
    file = ResultFile(options.out)
    environment = environment_row("cuda")
    file.append([environment])
    device = torch.device("cuda", 0)
    plain = load(model, device, None)
    adapted = load(model, device, options.rank)
    takes = Delta.takes
    for rows in options.rows:
        caches = caches_for(plain, rows)
        graphs = {
            "none": capture(plain, caches, rows, used=False),
            "unused": capture(adapted, caches, rows, used=False),
            "used": capture(adapted, caches, rows, used=True),
        }
        alone = Delta.in_the_linear
        Delta.in_the_linear = lambda self, slots: None  # type: ignore[method-assign]
        graphs["apart"] = capture(adapted, caches, rows, used=True)
        Delta.takes = lambda self, x: False  # type: ignore[method-assign]
        graphs["by torch"] = capture(adapted, caches, rows, used=True)
        Delta.takes = takes  # type: ignore[method-assign]
        Delta.in_the_linear = alone  # type: ignore[method-assign]
        times: dict[str, list[float]] = {variant: [] for variant in graphs}
        for _, variant in turns(list(graphs), options.samples):
            times[variant].append(sample(graphs[variant]))
        medians = {variant: percentile(found, 50) for variant, found in times.items()}
        name, scheme = model.split(":")
        for variant, median in medians.items():
            row = dict(
                model=name,
                scheme=scheme,
                rows=rows,
                rank=options.rank,
                variant=variant,
                us=median,
                ratio=median / medians["none"],
            )
            file.append([make_row("adapters", environment["id"], **rounded(row))])
            print(
                f"{model}, {rows} rows, {variant}: {median:.1f} us, {row['ratio']:.3f}", flush=True
            )


def wanted_by(
    model: str, rank: int | None, sizes: list[int], target: ahead.Target
) -> set[jit.Wanted]:
    """What these steps ask for; a process that ran this is good for nothing else."""
    with dry_run(target.gpu):
        decoder = load(model, ahead.DEVICE, rank, layers=[0])
        decoder.blocks = decoder.blocks * 2  # neighbours hand over to each other
        for rows in sizes:
            table = Rows(
                rows,
                pages=PAGES,
                vocabulary=decoder.config.vocab_size,
                device=decoder.device,
                adapted=rank is not None,
            )
            steps = DecodeGraphs(
                decoder, ahead.make_caches(decoder), table, sizes=(table.capacity,)
            )
            with decoder.active():
                steps.step(table.capacity).launch()
                if steps.unadapted is not None:
                    steps.unadapted.step(table.capacity).launch()
    return jit.wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("adapters.jsonl"))
    parser.add_argument(
        "--models", default="qwen3-8b:int4,qwen3-8b:bf16", help="PRESET:SCHEME, several with commas"
    )
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.rows = [int(rows) for rows in options.rows.split(",")]
    models = options.models.split(",")
    if options.compile:
        target = ahead.Target(gpu.GPUS["sm_90a"], sequences=max(options.rows))
        runs = [
            functools.partial(wanted_by, model, rank, options.rows, target)
            for model in models
            for rank in (None, options.rank)
        ]
        done = precompile.precompile(runs, target.gpu.architecture, listen=lambda *_: None)
        print(f"{done.kernels} kernels, {done.fresh} of them compiled now, {done.seconds:.1f} s")
        return
    for model in models:  # in a process of its own, which gives its memory back
        worker = multiprocessing.get_context("spawn").Process(
            target=measure_model, args=(model, options)
        )
        worker.start()
        worker.join()


if __name__ == "__main__":
    main()
