#!/usr/bin/env python3
r"""What a kernel could do otherwise, before it becomes the rule: linears cut in other ways, or
decode steps with other constants.

    python benchmarks/workshop/trials.py cuts w8a8 6144x4096 --rows 16 32 \
        --try "separate_exchange=False" "tokens=32, warpgroups=2, split=2"
    python benchmarks/workshop/trials.py steps preset:qwen3-8b:w8a8 --rows 16 32 --try
        "formats.w8a8.gemm_team_tokens=(0, 64)" \
        "gemm_shape.RESERVED_BESIDE=8192"

    FLYWEIGHT_PRETEND=sm_80 python benchmarks/workshop/trials.py chain w4a16 qwen3-8b --rows 1 --try
        "gemv.stage_bytes=4096"

`chain` times the linears of a layer, one after the other as decoding runs them. `cuts` (FORMAT
OUTPUTSxINPUTS) forces parts of the cut (`gemm_shape.Forced`) and prints each one's relative error;
`steps` sets numbers of kernels/tuned (`formats.FORMAT.NAME`, `steps.NAME`, `gemv.NAME`) or
constants of modules (one that a module has imported is that module's own). What is chosen now comes
first. All take turns; medians in microseconds. A linear that is faster by itself often makes steps
slower: what runs beside it counts.

`--compile` runs nothing: it compiles what the same command will time (not its prompts), on a
machine without a GPU, into FLYWEIGHT_CACHE.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.chain import EPSILON, fused_step, lay_out, run_layers
from flyweight.bench.kernels import FORMATS, Case, copied, reference, relative_error
from flyweight.bench.profile import Profiler, Workload
from flyweight.bench.shapes import linears
from flyweight.bench.steps import timed
from flyweight.bench.timing import turns
from flyweight.engine import ahead
from flyweight.engine.llm import LLM
from flyweight.kernels import dispatch, jit, precompile, tuned
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.kernels.linear import gemm
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import Forced
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight
from flyweight.machine import copy_bandwidth

LINEAR = (
    *("choose", "gemm", "gemm_shape", "gemm_small"),
    *("gemv", "gemv_cluster", "gemv_plan", "gemv_splitk"),
)
MODULES = {name: f"linear.{name}" for name in LINEAR} | {
    "rows": "vptq.rows",
    "gather": "vptq.gather_plan",
    "linear": "vptq.linear",
    "qkv": "attention.qkv",
    "dependent_launch": "dependent_launch",
}
TABLES = ("steps", "gemv", "formats")  # of tuned numbers
INPUT, OUTPUT = 256, 66
LAYERS = 12  # of a chain
DOTTED = re.compile(r"\.(?=[\w.]+\s*=)")


def assignments(text: str) -> dict[str, Any]:
    """ "a=1, b.c=(2, 3)" → {"a": 1, "b.c": (2, 3)}."""
    try:
        call = ast.parse(f"f({DOTTED.sub('__', text)})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or call.args:
        raise SystemExit(f"{text!r} is no list of NAME=VALUE")
    return {str(one.arg).replace("__", "."): ast.literal_eval(one.value) for one in call.keywords}


class Constants:
    """Sets constants of modules, and back; whatever was kept by shape is forgotten."""

    def __init__(self) -> None:
        self.modules = {
            name: importlib.import_module(f"flyweight.kernels.{path}")
            for name, path in MODULES.items()
        }
        self.before: dict[str, Any] = {}
        self.measured = tuned.of

    def is_number(self, name: str) -> bool:
        """Of kernels/tuned; a table and a module may have one name."""
        table, _, constant = name.partition(".")
        return table in TABLES and not hasattr(self.modules.get(table), constant)

    def set(self, wanted: dict[str, Any]) -> None:
        numbers = {name: value for name, value in wanted.items() if self.is_number(name)}
        tuned.of = functools.partial(retuned, self.measured, numbers) if numbers else self.measured
        for name, value in (self.before | wanted).items():
            if name in numbers:
                continue
            module, _, constant = name.partition(".")
            if not hasattr(self.modules.get(module), constant):
                raise SystemExit(
                    f"there is no constant {name}; modules are {', '.join([*MODULES, *TABLES])}"
                )
            self.before.setdefault(name, getattr(self.modules[module], constant))
            setattr(self.modules[module], constant, value)
        for module in self.modules.values():
            for thing in list(vars(module).values()):
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()
        for thing in gc.get_objects():
            if type(thing) is TiledWeight:
                thing.calls.clear()


def retuned(
    measured: Callable[[gpu.Gpu], tuned.Tuning], numbers: dict[str, Any], device: gpu.Gpu
) -> tuned.Tuning:
    """The tuned numbers of a GPU with some of them otherwise: "steps.packed_ahead",
    "formats.int4.ticket_rows".
    """
    found = measured(device)
    for name, value in numbers.items():
        table, *place, number = name.split(".")
        try:
            if table != "formats":
                found = dataclasses.replace(
                    found, **{table: dataclasses.replace(getattr(found, table), **{number: value})}
                )
            else:
                changed = dataclasses.replace(found.formats[place[0]], **{number: value})
                found = dataclasses.replace(found, formats=found.formats | {place[0]: changed})
        except (KeyError, IndexError, TypeError):
            raise SystemExit(f"there is no number {name} in kernels/tuned") from None
    return found


def cut_linear(options: argparse.Namespace, device: torch.device) -> tuple[Any, TiledLinear]:
    outputs, inputs = map(int, options.shape.split("x"))
    case = Case(
        options.format, 1, inputs, outputs, torch.bfloat16, zero_points=not options.symmetric
    )
    tensor = FORMATS[case.format](
        case, (outputs, inputs), torch.device("cpu") if gpu.is_pretended() else device
    ).to(device)
    return tensor, TiledLinear(tensor, dtype=case.dtype, ops=dispatch.decoder_ops(device))


def multiplied(linear: TiledLinear, cut: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(gemm.multiply, linear.weight, forced=Forced(**cut)) if cut else linear


def cuts(options: argparse.Namespace) -> None:
    device = torch.device("cuda")
    tensor, linear = cut_linear(options, device)
    count = replay.copies_for(linear.weight.nbytes, device)
    copies = [linear, *(copied(linear, lambda: linear) for _ in range(count - 1))]
    for rows in options.rows:
        x = torch.randn(rows, tensor.matrix_shape[1], device=device).bfloat16()
        want, works, errors = reference(tensor, x), {}, {}
        for text in ("", *options.tries):
            runs = [multiplied(one, assignments(text)) for one in copies]
            errors[text] = relative_error(runs[0](x), want)
            works[text] = replay.Work(lambda i, runs=runs, x=x: runs[i](x), count)
        for text, times in replay.measure(works, device, samples=options.samples).items():
            print(
                f"{rows} rows  {statistics.median(times):9.2f} us  error {errors[text]:.1e}  "
                f"{text or 'now'}",
                flush=True,
            )


def steps(options: argparse.Namespace) -> None:
    most, pages = max(options.rows), -(-(INPUT + OUTPUT) // ahead.PAGE)
    llm = LLM(
        options.model,
        max_num_seqs=most,
        max_model_len=pages * ahead.PAGE,
        blocks=most * pages,
        block_size=ahead.PAGE,
        prefix_cache=False,
    )
    constants, graphs, runner = Constants(), {}, llm.engine.runner
    for text in ("", *options.tries):
        constants.set(assignments(text))
        vars(runner).pop("steps", None)  # to be captured anew
        graphs[text] = runner.steps
        for rows in options.rows:
            Profiler(llm, Workload(rows, INPUT, 12)).decode(contextlib.nullcontext)
    for rows in options.rows:
        profiler, found = (
            Profiler(llm, Workload(rows, INPUT, OUTPUT)),
            {text: [] for text in graphs},
        )
        for _, text in turns(list(graphs), options.samples):
            runner.steps = graphs[text]
            found[text].append(timed(profiler)[0])
        for text, times in found.items():
            print(f"{rows} rows  {statistics.median(times):9.1f} us  {text or 'now'}", flush=True)


def replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        found.append(run())
    graph.replay()
    torch.cuda.synchronize()
    return found[0].clone()


def chain(options: argparse.Namespace) -> None:
    device, constants = torch.device("cuda"), Constants()
    bandwidth = copy_bandwidth(device)
    for name in options.formats.split(","):
        for rows in options.rows:
            constants.set({})
            chain_of(
                Case(name, rows, 1, 1, torch.bfloat16, zero_points=not options.symmetric),
                options,
                constants,
                bandwidth,
            )


def chain_of(
    case: Case, options: argparse.Namespace, constants: Constants, bandwidth: float
) -> None:
    """What is replayed must give the bits of what is run one by one."""
    device, shapes, make = torch.device("cuda"), linears(options.model), FORMATS[case.format]
    layers = [
        lay_out({name: make(case, shape, device) for name, shape in shapes.items()}, case)
        for _ in range(LAYERS)
    ]
    nbytes = sum(one.nbytes for one in layers[0].values())
    norm = Norm(torch.ones(shapes["o"][0], device=device, dtype=torch.bfloat16), EPSILON)
    x, samplers, results = torch.randn(case.rows, shapes["o"][0], device=device).bfloat16(), {}, {}
    runs = []  # graphs write into their buffers
    for text in ("", *options.tries):
        constants.set(assignments(text))
        run = functools.partial(run_layers, fused_step(case, shapes, norm=norm), layers, x)
        runs.append(run)
        results[text] = run().clone()
        samplers[text] = replay.graph_sampler(run, LAYERS)
        again = replayed(run)
        if not torch.equal(again, results[text]):
            print(
                f"replayed differs: {relative_error(again, results[text].double()):.1e}  "
                f"{text or 'now'}",
                flush=True,
            )
    times: dict[str, list[float]] = {text: [] for text in samplers}
    for _, text in turns(list(samplers), options.samples):
        times[text].append(samplers[text]())
    for text, found in times.items():
        us, error = statistics.median(found), relative_error(results[text], results[""].double())
        share = 100 * nbytes / us / 1e3 / bandwidth
        if options.out:
            row = dict(bench="chain_trial", device=pretended_name(), model=options.model)
            row |= dict(format=case.format, rows=case.rows, variant=text or "now")
            row |= dict(us_a_layer=round(us, 2), share_of_copies=round(share / 100, 4), error=error)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            f"{case.format} {case.rows} rows  {us:9.2f} us a layer  {share:5.1f} % of copies  "
            f"error {error:.1e}  {text or 'now'}",
            flush=True,
        )


def pretended_name() -> str:
    here = gpu.of(0)
    return f"{torch.cuda.get_device_name(0)} as {here.architecture} ({here.processors} SMs)"


def wanted_by(options: argparse.Namespace) -> set[jit.Wanted]:
    target = ahead.Target(gpu.GPUS["sm_90a"], sequences=max(options.rows))
    with dry_run(target.gpu):
        if options.what == "cuts":
            _, linear = cut_linear(options, DEVICE)
            for rows in options.rows:
                x = torch.empty(
                    rows, linear.weight.in_features, dtype=torch.bfloat16, device=DEVICE
                )
                for text in ("", *options.tries):
                    multiplied(linear, assignments(text))(x)
        else:
            decoder, constants = ahead.load(options.model, None), Constants()
            for text in ("", *options.tries):
                constants.set(assignments(text))
                ahead.run_steps(decoder, target)
    return jit.wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    cut, step, linked = (commands.add_parser(name) for name in ("cuts", "steps", "chain"))
    cut.add_argument("format", choices=FORMATS)
    cut.add_argument("shape")
    cut.add_argument("--symmetric", action="store_true", help="without zero points")
    step.add_argument("model")
    linked.add_argument("formats", help="with commas")
    linked.add_argument("model", help="a preset's name: its four linears, one after the other")
    linked.add_argument("--symmetric", action="store_true", help="without zero points")
    for one in (cut, step, linked):
        one.add_argument("--rows", type=int, nargs="+", default=[16])
        one.add_argument("--try", dest="tries", nargs="+", default=[], metavar="NAME=VALUE,…")
        one.add_argument("--samples", type=int, default=7)
        one.add_argument("--compile", action="store_true")
        one.add_argument("-o", "--out", type=Path, help="rows (JSONL) of a chain")
    options = parser.parse_args()
    if options.compile:
        found = precompile.precompile(
            [functools.partial(wanted_by, options)], "sm_90a", listen=lambda *_: None
        )
        print(f"{found.kernels} kernels, {found.fresh} of them compiled now")
    else:
        {"cuts": cuts, "steps": steps, "chain": chain}[options.what](options)


if __name__ == "__main__":
    main()
