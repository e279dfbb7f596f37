"""Trial of branch w8a16, from the worktree's root on an H200: FLYWEIGHT_CACHE=… PYTHONPATH=src python3 w8a16_gpu.py OUTDIR

1. every variant against float64 (poisoned outputs, mail empty afterwards, W8A8 to the same bits), 2. single linears, 3. chains,
4. whole decode steps, 256 in, 512 out, and at 16,384 tokens. `--dry` (no GPU): the kernels of all of it, compiled for sm_90a.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from flyweight.bench import chain, replay
from flyweight.bench.kernels import FORMATS, Case
from flyweight.bench.replay import Work
from flyweight.bench.shapes import linears
from flyweight.kernels import cuda_linear, gemv, gemv_split, jit

DRY = "--dry" in sys.argv
SAMPLES = 7
BEGIN = time.monotonic()

# least: bytes a linear reserves at least; finer: formats with smaller stages; even: up to which rest tiles are cut; division: as
# main converts x; hint: the driver is asked for the largest carve-out instead of padding.
OLD = dict(least=0, finer=(), even=0, division=True, hint=False, turns=("int4",), held={"int4": 3}, finer_bytes=11264)
ROOM = OLD | dict(least=98 * 1024)
PIECES = ROOM | dict(division=False)
FINER = PIECES | dict(finer=("int8",))
ALL = FINER | dict(even=1 / 3)
EVERY = ("int4", "int8", "w8a8")
HELD = {count: {"int4": 3, "int8": count, "w8a8": count} for count in (3, 4)}
VARIANTS = {
    "main": OLD, "hint": OLD | dict(hint=True), "room": ROOM, "pieces": PIECES, "finer": FINER, "all": ALL,
    "all, not finer": ALL | dict(finer=()), "all, finest": ALL | dict(finer_bytes=8192),
    "all, held 3": ALL | dict(held=HELD[3]), "all, turns": ALL | dict(turns=EVERY),
    "all, turns, held 3": ALL | dict(turns=EVERY, held=HELD[3]), "all, turns, held 4": ALL | dict(turns=EVERY, held=HELD[4]),
    "all, int4 finer": ALL | dict(finer=("int4", "int8")),
}
SOME = ("main", "room", "all")
TURNS = ("all, turns", "all, turns, held 3", "all, turns, held 4")
current = dict(ALL)

NEW_LINE = "      p.group = {sum * LARGER, peak * (1.f / 32512 / LARGER)};"
OLD_LINE = "      p.group = {sum * LARGER, 1.f / (factor * LARGER)};"
_plain_source, _plain_load, _plain_allow = jit._source, jit.load, jit.Kernel._allow_shared


@functools.cache
def source(file):
    text = _plain_source(file)
    if file != "piece.cuh":
        return text
    assert NEW_LINE in text
    return text.replace(NEW_LINE, f"#ifdef DIVISION\n{OLD_LINE}\n#else\n{NEW_LINE}\n#endif")


def load(file, *, defines=None, registers=None):
    marks = {name: 1 for name, on in (("DIVISION", current["division"]), ("HINT", current["hint"]))
             if on and file in ("gemv.cu", "qkv_attention.cu")}
    return _plain_load(file, defines=dict(defines or {}) | marks, registers=registers)


def allow(self, size):
    _plain_allow(self, size)
    if current["hint"]:
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (status,) = driver.cuKernelSetAttribute(attribute, 100, driver.CUkernel(int(self._handle)), driver.CUdevice(0))
        assert status == driver.CUresult.CUDA_SUCCESS, status


jit._source, jit.load, jit.Kernel._allow_shared = source, load, allow


def switch(name):
    current.update(VARIANTS[name])
    gemv.SHARED_LEAST, gemv.FINER, gemv.EVEN = current["least"], current["finer"], current["even"]
    gemv.IN_TURN, gemv.HELD, gemv.FINER_BYTES = current["turns"], current["held"], current["finer_bytes"]
    for cached in (gemv.plan, gemv.fitting_plan, gemv_split.choose, cuda_linear.few):
        cached.cache_clear()


rows = []


def record(**row):
    rows.append(row | {"seconds": round(time.monotonic() - BEGIN, 2)})
    with open(OUT / "w8a16.jsonl", "a") as file:
        file.write(json.dumps(rows[-1]) + "\n")
    print(" ".join(f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()), flush=True)


def late(*names):
    """The most important things come first; what would end after a minute is left out."""
    if (over := not DRY and time.monotonic() - BEGIN > 50):
        print("left out, for it is late:", *names)
    return over


def make(form, case, shape):
    return FORMATS[form](case, shape, torch.device("cpu")).to(DEVICE) if DRY else FORMATS[form](case, shape, DEVICE)


def make_linears(preset, form):
    case = Case(form, 1, 0, 0, torch.bfloat16)
    tensors = {name: make(form, case, shape) for name, shape in linears(preset).items()}
    return tensors, {name: gemv.prepare(t, dtype=torch.bfloat16, interleave=name == "gate_up") for name, t in tensors.items()}


def call(name, weight, x, norm, out):
    """As a decode step does."""
    if name in ("qkv", "gate_up"):
        return weight(x, out, norm=norm)
    return weight(x, out, residual=RESIDUAL[:, : weight.out_features])


def check(preset, form, variants):
    tensors, weights = make_linears(preset, form)
    for name, weight in weights.items():
        torch.manual_seed(1)
        x, norm = torch.randn(1, weight.in_features, device=DEVICE).bfloat16(), torch.ones(weight.in_features, device=DEVICE).bfloat16()
        width = weight.out_features // (2 if weight.interleaved else 1)
        want, seen = None, {}
        if not DRY:
            wide = x.double()
            if name in ("qkv", "gate_up"):
                wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            want = tensors[name].matmul_reference(wide)
            if name == "gate_up":
                gate, up = want.chunk(2, -1)
                want = torch.nn.functional.silu(gate) * up
            if name in ("o", "down"):
                want = want + RESIDUAL[:, :width].double()
        for variant in variants:
            switch(variant)
            for _ in range(3):
                out = torch.full((1, width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
                call(name, weight, x, norm, out)
                if not DRY:
                    torch.cuda.synchronize()
                    error = ((out.double() - want).norm() / want.norm()).item()
                    assert error < (3e-2 if form == "w8a8" else 6e-3), (preset, form, name, variant, error)
                    assert (gemv.letters(DEVICE) == -1).all()
            seen[variant] = out
        if not DRY and form == "w8a8":
            assert all(torch.equal(one, seen["main"]) for one in seen.values()), (name, "W8A8 has other bits")
    record(what="checked", model=preset, format=form, variants=len(variants))


def measure_linears(preset, form, variants):
    if late(preset, form):
        return
    _, weights = make_linears(preset, form)
    for name, weight in weights.items():
        copies = [weight] + [dataclasses.replace(weight, weights=weight.weights.clone(), calls={},
                                                   records=None if weight.records is None else weight.records.clone())
                             for _ in range(0 if DRY else replay.copies_for(weight.nbytes, DEVICE) - 1)]
        x, norm = torch.randn(1, weight.in_features, device=DEVICE).bfloat16(), torch.ones(weight.in_features, device=DEVICE).bfloat16()
        out = torch.zeros(1, weight.out_features // (2 if weight.interleaved else 1), dtype=torch.bfloat16, device=DEVICE)
        times = timed(variants, lambda i: call(name, copies[i], x, norm, out), copies=len(copies))
        for variant, found in times.items():
            record(what="linear", model=preset, format=form, linear=name, variant=variant, us=statistics.median(found),
                   gb_s=weight.nbytes / statistics.median(found) / 1e3)


def timed(variants, launch, copies=1):
    """Microseconds of a launch by graph replay, variants by turns; a variant counts when its graph is captured."""
    found, samplers = {variant: [] for variant in variants}, {}
    for variant in variants:
        switch(variant)
        if DRY:
            launch(0)
        else:
            samplers[variant] = replay.sampler(Work(launch, copies), DEVICE)
    for turn in range(0 if DRY else SAMPLES + 3):
        for variant in variants if turn % 2 else reversed(variants):
            time_us = samplers[variant]()
            if turn >= 3:
                found[variant].append(time_us)
    return {} if DRY else found


def measure_chain(preset, form, variants):
    if late(preset, form):
        return
    shapes, case = linears(preset), Case(form, 1, 0, 0, torch.bfloat16)
    count = 1 if DRY else 10
    layers = [{name: make(form, case, shape) for name, shape in shapes.items()} for _ in range(count)]
    prepared = [chain.lay_out(layer, case) for layer in layers]
    x = torch.randn(1, shapes["o"][0], device=DEVICE).bfloat16()
    step = chain.fused_step(case, shapes, norm=torch.ones_like(x[0]))
    exact = None if DRY else chain.exact_step(layers[0], x, shapes["o"][1])
    errors = {}
    for variant in variants:
        switch(variant)
        got = step(prepared[0], x.clone())
        errors[variant] = 0.0 if DRY else ((got.double() - exact).norm() / exact.norm()).item()
        assert errors[variant] < 2e-2, (preset, form, variant, errors)
    for variant, found in timed(variants, lambda _: chain.run_layers(step, prepared, x)).items():
        record(what="chain", model=preset, format=form, variant=variant, us=statistics.median(found) / count, error=errors[variant])


def load_decoder(preset, scheme, layers=None):
    from flyweight.models.decoder import Decoder
    from flyweight.models.presets import PresetWeights

    weights = PresetWeights(preset, scheme)
    return Decoder.load(weights, device=DEVICE, dtype=torch.bfloat16, layers=layers)


def measure_steps(preset, scheme, variants, lengths=(256, 16384), steps=(192, 24), repeats=2):
    from flyweight.engine.batch import KVStorage
    from flyweight.engine.graphs import DecodeGraphs
    from flyweight.engine.rows import Rows
    from flyweight.engine.sampling import GREEDY

    if late(preset, scheme):
        return
    decoder = load_decoder(preset, scheme, [0] if DRY else None)
    if DRY:
        decoder.blocks = decoder.blocks * 2
    config, pages = decoder.config, (max(lengths) + 1024) // 16
    caches = [KVStorage(*(torch.zeros(pages, 16, config.kv_heads, config.head_dim, dtype=torch.bfloat16, device=DEVICE).normal_()
                          for _ in range(2))) for _ in range(2 if DRY else config.layers)]
    graphs, state = {}, Rows(1, pages=pages, vocabulary=config.vocab_size, device=DEVICE)
    state.tables.copy_(torch.arange(pages, dtype=torch.int32, device=DEVICE)[None])

    def place(length):
        state.tokens.fill_(17), state.lengths.fill_(length)

    logits = {}
    for variant in variants:
        switch(variant)
        place(lengths[0])
        graphs[variant] = DecodeGraphs(decoder, caches, state, sizes=(1,))
        if DRY:
            graphs[variant].step(1).launch(), graphs[variant].step(1).advance(GREEDY)
            continue
        assert graphs[variant].step(1).apart is None, graphs[variant].step(1).apart
        graphs[variant].capture(1, GREEDY)
        graphs[variant].step(1).launch()
        logits[variant] = graphs[variant].step(1).logits.double().clone()
    if DRY:
        return
    first = logits[variants[0]]
    apart = {name: ((one - first).norm() / first.norm()).item() for name, one in logits.items()}
    assert all(one == one and one < 0.3 for one in apart.values()), apart
    for length, count in zip(lengths, steps, strict=True):
        found = {variant: [] for variant in variants}
        for turn in range(repeats + 1):  # the first warms up
            for variant in variants if turn % 2 else reversed(variants):
                place(length)
                graph = graphs[variant].graphs[1, GREEDY]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(count if turn else 32):
                    graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    found[variant].append(1e3 * begin.elapsed_time(end) / count)
        for variant, times in found.items():
            record(what="step", model=preset, format=scheme, variant=variant, length=length, us=statistics.median(times),
                   tok_s=1e6 / statistics.median(times), spread=max(times) - min(times), apart=apart[variant])
    for variant in SOME if preset == "qwen3-4b" and set(SOME) <= set(variants) else ():
        parts(graphs[variant].graphs[1, GREEDY], lambda: place(lengths[0]), preset, scheme, variant)


def parts(graph, place, preset, scheme, variant):
    """As `flyweight bench step`: what each part of a step takes."""
    from torch.profiler import ProfilerActivity, profile

    from flyweight.bench.steps import Kernel, parts_of, split_steps

    place()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(12):
            graph.replay()
        torch.cuda.synchronize()
    kernels = [Kernel(e.time_range.start, e.time_range.end, e.name) for e in found.events()
               if e.device_type == torch.autograd.DeviceType.CUDA]
    split = [parts_of(step) for step in split_steps(kernels)][2:]
    record(what="parts", model=preset, format=scheme, variant=variant,
           **{name.replace(" ", "_"): statistics.median(one[name][0] for one in split) for name in split[0]})


def everything():
    names = [name for name in VARIANTS if name != "all, int4 finer"]
    check("qwen3-4b", "w8a16", names)
    check("qwen3-4b", "w8a8", (*SOME, *TURNS))
    check("qwen3-4b", "bf16", ("main", "all"))
    check("qwen3-4b", "w4a16", ("main", "all", "all, int4 finer"))
    measure_steps("qwen3-4b", "w8a16", names)
    measure_steps("qwen3-4b", "w8a8", (*SOME, *TURNS))
    measure_chain("qwen3-4b", "w8a16", names)
    measure_chain("qwen3-4b", "w8a8", (*SOME, *TURNS))
    measure_chain("qwen3-4b", "bf16", ("main", "all"))
    measure_chain("qwen3-8b", "w8a16", ("main", "room", "pieces", "all", *TURNS))
    measure_chain("qwen3-8b", "w8a8", ("main", "all", "all, turns, held 3"))
    measure_chain("qwen3-8b", "w4a16", ("main", "hint", "room", "all", "all, int4 finer"))
    measure_linears("qwen3-4b", "w8a16", ("main", "room", "pieces", "finer", "all"))
    measure_linears("qwen3-4b", "w8a8", SOME)
    measure_linears("qwen3-8b", "w8a16", ("main", "all"))
    measure_steps("qwen3-8b", "int4", ("main", "hint", "room", "all", "all, int4 finer"), lengths=(256,), steps=(192,))
    measure_steps("qwen3-4b", "bf16", ("main", "all"), lengths=(256,), steps=(128,))
    measure_steps("qwen2-7b", "w8a16", ("main", "room", "pieces", "all"), lengths=(256,), steps=(128,))
    measure_steps("qwen2-1.5b", "w8a16", ("main", "all"), lengths=(256,), steps=(256,))


def table():
    for what, key in (("step", "length"), ("chain", "what"), ("linear", "linear")):
        print(f"\n{what}, microseconds")
        for row in rows:
            if row["what"] == what:
                base = next(r for r in rows if r["what"] == what and r["variant"] == "main"
                            and all(r.get(k) == row.get(k) for k in ("model", "format", key)))
                print(f"{row['model']:11} {row['format']:6} {row.get(key)!s:8} {row['variant']:20} {row['us']:9.2f} "
                      f"{100 * (row['us'] / base['us'] - 1):+6.1f} %" + (f" {row['tok_s']:8.1f} tok/s" if "tok_s" in row else ""))


if __name__ == "__main__" and DRY:
    from flyweight.gpu import GPUS
    from flyweight.kernels.dry_run import DEVICE, dry_run

    OUT = Path("/tmp")
    record = lambda **row: print("dry:", row)  # noqa: E731
    with dry_run(GPUS["sm_90a"]):
        RESIDUAL = torch.zeros(1, 8192, dtype=torch.bfloat16, device=DEVICE)
        everything()
    print(len(jit.wanted), "kernels")
    if "--compile" in sys.argv:
        for i, one in enumerate(sorted(jit.wanted, key=str)):
            jit.compile_cubin(one.file, dict(one.defines), "sm_90a", one.registers)
            print(i, one.file, flush=True)
elif __name__ == "__main__":
    OUT, DEVICE = Path(sys.argv[1]), torch.device("cuda", 0)
    OUT.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    RESIDUAL = torch.randn(1, 8192, device=DEVICE).bfloat16()
    with torch.inference_mode():
        everything()
    table()
    print(f"{time.monotonic() - BEGIN:.1f} s")
