"""W4A16 at 8, 16 and 32 rows: stream.cu against what choices.py takes now, and one row beside them.

    FLYWEIGHT_CACHE=few-cache PYTHONPATH=src python3 few_gpu.py OUTDIR     (on the H200, from the worktree's root)
    ... few_gpu.py --compile                                                               (without a GPU: fills the cache)

Every variant is first compared with float64 (poisoned outputs, also 5, 11 and 27 rows, two runs bit for bit, a chain of dependent
launches against the same one by one), then timed as benchmarks/crossovers.py does: cold, by graph replay. `layer`: the four linears
of a layer one after the other, eight layers. `block`: o with the residual, gate/up with norm and silu, down with the residual, as the
decoder calls them, each feeding the next.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from flyweight.bench.kernels import FORMATS, Case, reference, relative_error
from flyweight.kernels import choices, gemv, jit, stream
from flyweight.kernels.cuda_linear import CudaLinear

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
ROWS, PROCESSORS, SAMPLES = (8, 16, 32), 132, 7
GOAL = {8: 1.15, 16: 1.3, 32: 1.6}
DEVICE = torch.device("cuda", 0)
ALONE = 118 * 1024  # one kernel to an SM: what overlap is worth


def variants(weight: gemv.Gemv, rows: int) -> dict[str, stream.Choice]:
    cut = (weight.kind, weight.out_features, weight.in_features, weight.group, rows, PROCESSORS)
    best = stream.choose(*cut)
    found = {f"stream/{count}": stream.choose(*cut, count) for count in (1, 2)}
    found |= {"stream": best, "stream, none held": dataclasses.replace(best, held=0),
              "stream, alone": dataclasses.replace(best, shared=ALONE)}
    before, stream.SPANS = stream.SPANS, stream.SPANS[-1:]
    found["stream, short copies"] = stream.choose.__wrapped__(*cut, best.cluster)
    stream.SPANS = before
    return {name: one for name, one in found.items() if one is not None and (name == "stream" or one != best)}


def block(o: CudaLinear, gated: CudaLinear, down: CudaLinear, attended, hidden, norm):
    """The second half of a layer, as models/decoder.py has it; decode attention would write o's packed x."""
    x = o.fused(attended, residual=hidden)
    packed = down.packed_input(len(x), x.device, before=gated)
    y = gated.fused(x, norm=norm, to=packed)
    return down.fused(packed or y, residual=x)


def case_of(name: str) -> Case:
    return Case("w4a16", 1, *SHAPES[name], torch.bfloat16)


def out_of_turn(weight: gemv.Gemv, x) -> None:
    before, stream.turns = stream.turns, lambda kind, device: None
    stream.multiply(weight, x)
    stream.turns = before


def compile_only() -> None:
    from flyweight import gpu
    from flyweight.kernels.dry_run import DEVICE, dry_run

    with dry_run(gpu.GPUS["sm_90a"]):
        linears = {name: CudaLinear(FORMATS["w4a16"](case_of(name), SHAPES[name][::-1], torch.device("cpu")).to(DEVICE),
                                    dtype=torch.bfloat16, gated=name == "gate_up") for name in ("o", "gate_up", "down")}
        for rows in (1, *ROWS):
            hidden = torch.empty(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
            for choices.STREAMED in ((0, 0), (5, 32)):
                packed = linears["o"].packed_input(rows, DEVICE)
                for attended in (hidden, packed or hidden):
                    block(*linears.values(), attended, hidden, hidden[0])
        choices.STREAMED = 0, 0
        for name in SHAPES:
            case = case_of(name)
            tensor = FORMATS["w4a16"](case, (case.out_features, case.in_features), torch.device("cpu")).to(DEVICE)
            linear = CudaLinear(tensor, dtype=torch.bfloat16)
            for rows in (1, *ROWS):
                x = torch.empty(rows, case.in_features, dtype=torch.bfloat16, device=DEVICE)
                linear.fused(x)
                for chosen in (variants(linear.weight, rows) if rows > 1 else {}).values():
                    stream.multiply(linear.weight, x, chosen=chosen)
    wanted = sorted(jit.wanted, key=str)
    for i, one in enumerate(wanted):
        jit.compile_cubin(one.file, dict(one.defines), "sm_90a", one.registers)
        print(f"{i + 1} of {len(wanted)}", one.file, flush=True)


def check(linear: CudaLinear, tensor, rows: int) -> dict[str, float]:
    """Errors of every variant for so many rows; says what is wrong."""
    device, weight = DEVICE, linear.weight
    x = torch.randn(rows, weight.in_features, device=device).bfloat16()
    want, errors = reference(tensor, x), {}
    runs = {"main": lambda out: linear.fused(x, out)}
    runs |= {name: lambda out, chosen=chosen: stream.multiply(weight, x, out, chosen=chosen)
             for name, chosen in variants(weight, rows).items()}
    for name, run in runs.items():
        outs = [torch.full((rows + 1, weight.out_features), float("nan"), device=device).bfloat16() for _ in range(2)]
        for out in outs:
            run(out[:rows])
        torch.cuda.synchronize()
        errors[name] = relative_error(outs[0][:rows], want)
        same, outside = torch.equal(outs[0][:rows], outs[1][:rows]), outs[0][rows:].isnan().all().item()
        if not errors[name] < 4e-3 or not same or not outside:
            print(f"WRONG: {name}, {rows} rows of {weight.in_features} × {weight.out_features}: error {errors[name]:.2e}, "
                  f"same bits {same}, nothing written beyond {outside}", flush=True)
            errors[name] = float("inf")
    return errors


def check_chain(linear: CudaLinear, rows: int, chosen: stream.Choice) -> bool:
    """Launches that feed each other, overlapping in a graph, give the bits of launches one by one."""
    first = torch.randn(rows, linear.weight.in_features, device=DEVICE).bfloat16()
    outs = [torch.empty_like(first) for _ in range(12)]

    def run(pdl: bool) -> None:
        x = first
        for out in outs:
            x = stream.multiply(linear.weight, x, out, chosen=chosen, pdl=pdl)
            if not pdl:
                torch.cuda.synchronize()

    run(False)
    want = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    good = True
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        good &= all(torch.equal(out, one) for out, one in zip(outs, want, strict=True))
    return good


def main() -> None:
    if sys.argv[1] == "--compile":
        return compile_only()
    from flyweight.bench import replay
    from flyweight.bench.timing import percentile

    begin, device, folder = time.monotonic(), DEVICE, Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    assert gemv.processors(0) == PROCESSORS, "kernels were compiled for 132 SMs"
    out = (folder / "few.jsonl").open("a")

    def keep(**row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    linears, layer_times = {}, {}
    for name in SHAPES:
        case = case_of(name)
        tensor = FORMATS["w4a16"](case, (case.out_features, case.in_features), device)
        first = CudaLinear(tensor, dtype=torch.bfloat16)
        copies = [first, *(CudaLinear(tensor, dtype=torch.bfloat16) for _ in range(
            max(8, replay.copies_for(first.weight.nbytes, device)) - 1))]
        linears[name] = copies
        for rows in (5, 11, 27):
            check(first, tensor, rows)
        errors = {rows: check(first, tensor, rows) for rows in ROWS}
        if name == "o":
            for rows in ROWS:
                for label, chosen in variants(first.weight, rows).items():
                    good = check_chain(first, rows, chosen)
                    keep(check="chain", rows=rows, kernel=label, good=good)
                    if not good:
                        print(f"WRONG: chain of {label}, {rows} rows", flush=True)
        one = torch.randn(1, case.in_features, device=device).bfloat16()
        for rows in ROWS:
            x = torch.randn(rows, case.in_features, device=device).bfloat16()
            works = {"one row": replay.Work(lambda i, x=one, c=copies: c[i].fused(x), len(copies)),
                     "main": replay.Work(lambda i, x=x, c=copies: c[i].fused(x), len(copies))}
            works |= {label: replay.Work(lambda i, x=x, c=copies, chosen=chosen: stream.multiply(c[i].weight, x, chosen=chosen),
                                         len(copies)) for label, chosen in variants(first.weight, rows).items()}
            works["stream, not in turn"] = replay.Work(lambda i, x=x, c=copies: out_of_turn(c[i].weight, x), len(copies))
            times = {label: percentile(found, 50) for label, found in replay.measure(works, device, samples=SAMPLES).items()}
            base = times["one row"]
            print(f"{name:8}{rows:3} rows, goal {GOAL[rows]:.2f} ({GOAL[rows] * base:5.1f}):  " + "  ".join(
                f"{label} {us:.2f} ({us / base:.2f})" for label, us in times.items()), flush=True)
            for label, us in times.items():
                keep(shape=name, rows=rows, kernel=label, us=us, ratio=us / base, way=first.way(rows, device) if label == "main" else None,
                     relative_error=errors[rows].get(label), in_features=case.in_features, out_features=case.out_features)
    for rows in (1, *ROWS):
        xs = {name: torch.randn(rows, SHAPES[name][0], device=device).bfloat16() for name in SHAPES}

        def layer(i: int, run, xs=xs) -> None:
            for name in SHAPES:
                run(linears[name][i], xs[name])

        works = {"main": replay.Work(lambda i, layer=layer: layer(i, lambda linear, x: linear.fused(x)), 8)}
        if rows > 1:
            works["stream"] = replay.Work(lambda i, layer=layer: layer(i, lambda linear, x: stream.multiply(linear.weight, x)), 8)
        times = {label: percentile(found, 50) for label, found in replay.measure(works, device, samples=SAMPLES).items()}
        layer_times[rows] = times
        print(f"layer   {rows:3} rows:  " + "  ".join(
            f"{label} {us:.2f} ({us / layer_times[1]['main']:.2f})" for label, us in times.items()), flush=True)
        for label, us in times.items():
            keep(shape="layer", rows=rows, kernel=label, us=us, ratio=us / layer_times[1]["main"])
    gated_case = case_of("gate_up")
    tensor = FORMATS["w4a16"](gated_case, (gated_case.out_features, gated_case.in_features), device)
    gated = [CudaLinear(tensor, dtype=torch.bfloat16, gated=True) for _ in range(8)]
    norm = (1 + 0.1 * torch.randn(SHAPES["gate_up"][0], device=device)).bfloat16()
    for rows in (1, *ROWS):
        attended, hidden = (torch.randn(rows, SHAPES["o"][0], device=device).bfloat16() for _ in range(2))
        found, works = {}, {}
        for label, streamed in {"main": (0, 0), "stream": (5, 32)}.items():
            choices.STREAMED = streamed
            found[label] = block(linears["o"][0], gated[0], linears["down"][0], attended, hidden, norm).double()

            def run(i: int, streamed=streamed, attended=attended, hidden=hidden) -> None:
                choices.STREAMED = streamed
                x = linears["o"][i].packed_input(rows, device) or attended
                block(linears["o"][i], gated[i], linears["down"][i], x, hidden, norm)

            works[label] = replay.Work(run, 8)
        apart = ((found["stream"] - found["main"]).norm() / found["main"].norm()).item()
        times = {label: percentile(one, 50) for label, one in replay.measure(works, device, samples=SAMPLES).items()}
        layer_times[rows] = times
        print(f"block   {rows:3} rows:  " + "  ".join(
            f"{label} {us:.2f} ({us / layer_times[1]['main']:.2f})" for label, us in times.items()) + f"  apart {apart:.1e}", flush=True)
        for label, us in times.items():
            keep(shape="block", rows=rows, kernel=label, us=us, ratio=us / layer_times[1]["main"], apart=apart)
    choices.STREAMED = 0, 0
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
