"""VPTQ with 8, 32 and 64 rows: each change by itself and all of them, as linears and as whole decode steps of Qwen3-8B.

    FLYWEIGHT_CACHE=vptq-cache python3 vptq_gpu.py OUTDIR        from the root of the worktree (SRC=path/src for another tree)
    python3 vptq_gpu.py --compile                                here, without a GPU: the kernels into FLYWEIGHT_CACHE
    python3 vptq_gpu.py --dry                                    every path on tensors without values, nothing compiled

A tree without `vptq_rows.Cut` (main) runs as the one variant "tree". Rows go to OUTDIR/vptq.jsonl.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ.get("SRC", "src"))

import torch  # noqa: E402

from flyweight import gpu  # noqa: E402
from flyweight.bench import replay  # noqa: E402
from flyweight.bench.timing import turns  # noqa: E402
from flyweight.engine.batch import KVStorage  # noqa: E402
from flyweight.engine.graphs import DecodeGraphs  # noqa: E402
from flyweight.engine.rows import Rows  # noqa: E402
from flyweight.kernels import jit, vptq, vptq_rows  # noqa: E402
from flyweight.kernels.vptq_layout import COLUMN_LANE  # noqa: E402
from flyweight.kernels.vptq_parts import share_out  # noqa: E402
from flyweight.models.decoder import Decoder  # noqa: E402
from flyweight.models.presets import PresetWeights  # noqa: E402
from flyweight.packing import unpack  # noqa: E402
from flyweight.tensors import VectorQuant  # noqa: E402

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
DISTINCT, LAYERS, CONTEXT, PAGE = 12, 36, 320, 16  # layers of weights, of a step; tokens of a sequence
ROWS = (8, 32, 64)
BEGIN, LIMIT = time.monotonic(), 50  # seconds, after which nothing more is begun
NEW = hasattr(vptq_rows, "Cut")


# ---- variants ----
@dataclasses.dataclass(frozen=True)
class Variant:
    packers: int = 2  # thread blocks of vptq_pack.cu for an SM, at most
    beside: int = 2  # of which so many fit beside the product
    eight: bool = True  # TOKENS 8
    apart: bool = True  # small last tiles by themselves
    together: bool = True  # two sums of a thread at once
    swaps: bool = True  # row blocks exchange items that would clash


OLD = Variant(6, 1, False, False, False, False)
VARIANTS = {
    "main": OLD,
    "packers 2": dataclasses.replace(OLD, packers=2, beside=2),
    "packers 1": dataclasses.replace(OLD, packers=1, beside=1),
    "eight": dataclasses.replace(OLD, eight=True),
    "apart": dataclasses.replace(OLD, apart=True),
    "together": dataclasses.replace(OLD, together=True),
    "swaps": dataclasses.replace(OLD, swaps=True),
    "all, packers 1": Variant(packers=1, beside=1),
    "all, no swaps": Variant(swaps=False),
    "all, not apart": Variant(apart=False),
    "all": Variant(),
} if NEW else {"tree": None}
SOURCE, LOAD = jit._source, jit.load


def uncut(blocks, tile, units, count, spanning):
    """As main cuts."""
    tiles = tuple(-(-n // tile) for n in blocks)
    each, spread = min(count // sum(tiles), units), share_out(tuple(units * n for n in tiles), count)
    most = spanning + max(-(-units * n // ctas) for n, ctas in zip(tiles, spread, strict=True))
    if each and -(-units // each) <= most:
        return vptq_rows.Cut(tuple(each * n for n in tiles), -(-units // each))
    return vptq_rows.Cut(spread, most)


@functools.cache
def one_by_one(file):
    if "#" not in file:
        return SOURCE(file)
    text, line = SOURCE(file.split("#")[0]), "constexpr int TOGETHER = TOKENS > 16 ? 2 : 1;"
    assert line in text
    return text.replace(line, "constexpr int TOGETHER = 1;")


def load_one_by_one(file, **options):
    return LOAD(file + "#" if file == "vptq_rows.cu" else file, **options)


@contextlib.contextmanager
def using(variant):
    if variant is None:
        yield
        return
    module = vptq_rows
    kept = {name: getattr(module, name) for name in ("PACKERS", "BESIDE", "SHAPES", "SWAPS", "cut")}
    registers = module.Shape.registers
    module.PACKERS, module.BESIDE = variant.packers, 512 + 1152 * variant.beside
    module.SHAPES = {tokens: shape for tokens, shape in module.SHAPES.items() if variant.eight or tokens > 8}
    module.SWAPS = variant.swaps
    module.cut = kept["cut"] if variant.apart else uncut
    module.Shape.registers = property(
        lambda self: (65536 - variant.beside * 48 * 32 * module.PACK_WARPS) // (32 * (self.warps + 4)) // 8 * 8)
    jit._source, jit.load = one_by_one, LOAD if variant.together else load_one_by_one
    module.shape_for.cache_clear()
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
        module.Shape.registers, jit._source, jit.load = registers, SOURCE, LOAD
        module.shape_for.cache_clear()


# ---- what is multiplied ----
def random_weight(shape, seed=0, **options):
    where = torch.device("cpu") if gpu.is_pretended() else DEVICE  # a torch without CUDA has no generator for it
    return VectorQuant.random(shape, seed, where, **options).to(DEVICE)


def decoder_of(scheme, layers):
    weights = PresetWeights("qwen3-8b", scheme, device="cpu" if gpu.is_pretended() else DEVICE)
    return Decoder.load(weights, device=DEVICE, dtype=DTYPE, layers=range(layers))


def linears_of(block, rows):
    """name → a call, with what it does in a step; x and out are the caller's."""
    hidden, mlp = 4096, 12288
    x, wide = torch.randn(rows, hidden, device=DEVICE).to(DTYPE), torch.randn(rows, 2 * mlp, device=DEVICE).to(DTYPE)
    norm = 1 + torch.randn(hidden, device=DEVICE).to(DTYPE) / 8
    rest = torch.randn(rows, hidden, device=DEVICE).to(DTYPE)
    return {"qkv": (block.qkv.single, x, dict(norm=norm)), "o": (block.o.single, x, dict(residual=rest)),
            "gate_up": (block.gate_up.single, x, dict(norm=norm)), "down": (block.down.single, wide, dict(residual=rest, gated=True))}


def outputs_of(weight, rows):
    return torch.full((rows, weight.out_features), float("nan"), dtype=DTYPE, device=DEVICE)


def reference(matrix, x, *, norm=None, residual=None, gated=False):
    wide = x.double()
    if gated:
        gate, up = wide.chunk(2, -1)
        wide = torch.nn.functional.silu(gate) * up
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    y = wide @ matrix.T
    return y if residual is None else y + residual.double()


def error_of(y, want):
    """Not a number where anything was left out."""
    return float((y.double() - want).norm() / want.norm())


CHECKED = {  # outputs of the parts, inputs; and what is fused
    "qkv": ([4096, 1024, 1024], 4096, dict(norm=True)),
    "o": ([4096], 4096, dict(residual=True)),
    "gate_up": ([1536, 1536], 4096, dict(norm=True)),
    "down": ([4096], 12288, dict(residual=True, gated=True)),
    "small": ([64, 24, 200], 1280, dict(norm=True)),
    "ragged": ([3000, 21], 2300, dict(residual=True)),
    "outliers": ([1024, 264], 2112, dict(norm=True, outliers=64, permute=True)),
}


def check(write):
    """Every variant against float64: each row count once, and a second time, since thread blocks meet again."""
    worst = {name: 0.0 for name in VARIANTS}
    for case, (outputs, inputs, options) in CHECKED.items():
        made = {name: value for name, value in options.items() if name in ("outliers", "permute")}
        tensors = [random_weight((n, inputs), seed, **made) for seed, n in enumerate(outputs)]
        weight = vptq.join([vptq.prepare(tensor, dtype=DTYPE) for tensor in tensors])
        matrix = None if gpu.is_pretended() else torch.cat([tensor.dequantize(torch.float64) for tensor in tensors])
        for rows in (3, 8, 12, 20, 32, 40, 64, 100):
            x = torch.randn(rows, inputs * (1 + options.get("gated", False)), device=DEVICE).to(DTYPE)
            ends = {"norm": (1 + torch.randn(inputs, device=DEVICE) / 8).to(DTYPE)} if options.get("norm") else {}
            ends |= {"residual": torch.randn(rows, sum(outputs), device=DEVICE).to(DTYPE)} if options.get("residual") else {}
            ends |= {"gated": True} if options.get("gated") else {}
            want = None if matrix is None else reference(matrix, x, **ends)
            for name, variant in VARIANTS.items():
                with using(variant):
                    for _ in range(2):
                        y = weight.fused(x, outputs_of(weight, rows), **ends)
                        if want is not None:
                            found = error_of(y, want)
                            worst[name] = max(worst[name], found) if found == found else float("nan")
                            if not found < 1e-2:
                                print(f"WRONG: {name}, {case}, {rows} rows: {found}", flush=True)
                                write(kind="wrong", variant=name, case=case, rows=rows, error=found)
                                break
    return worst


# ---- times ----
def time_linears(decoder, write):
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    for rows in ROWS:
        for which, shape in shapes.items():
            works = {}
            for name, variant in VARIANTS.items():
                calls = [linears_of(block, rows)[which] for block in decoder.blocks[:DISTINCT]]
                out = outputs_of(calls[0][0], rows)

                def launch(i, calls=calls, out=out, variant=variant):
                    weight, x, ends = calls[i]
                    with using(variant):
                        weight.fused(x, out, **ends)

                works[name] = replay.Work(launch, len(calls))
            dense = [torch.randn(shape, device=DEVICE).to(DTYPE) for _ in range(4 if shape[0] * shape[1] > 3e7 else 8)]
            x = torch.randn(rows, shape[1], device=DEVICE).to(DTYPE)
            works["torch"] = replay.Work(lambda i, dense=dense, x=x: torch.nn.functional.linear(x, dense[i]), len(dense))
            if gpu.is_pretended():
                for work in works.values():
                    work.launch(0)
                continue
            if time.monotonic() - BEGIN > LIMIT + 5:
                return
            for name, found in replay.measure(works, DEVICE, samples=5).items():
                write(kind="linear", variant=name, linear=which, rows=rows, us=statistics.median(found), samples=found)


def steps_of(decoder):
    decoder.blocks = (decoder.blocks[:DISTINCT] * LAYERS)[:LAYERS] if len(decoder.blocks) < LAYERS else decoder.blocks
    pages = -(-CONTEXT // PAGE)
    size = (64 * pages, PAGE, decoder.config.kv_heads, decoder.config.head_dim)
    caches = [KVStorage(*(torch.randn(size, device=DEVICE).to(DTYPE) for _ in range(2))) for _ in range(LAYERS)]
    rows = Rows(64, pages=pages, vocabulary=decoder.config.vocab_size, device=DEVICE)
    rows.lengths.fill_(CONTEXT)
    rows.tokens.copy_(torch.arange(64, device=DEVICE) * 100 + 11)
    rows.tables.copy_(torch.arange(64 * pages, dtype=torch.int32, device=DEVICE).view(64, pages))
    return lambda: DecodeGraphs(decoder, caches, rows)


def time_steps(decoders, write):
    graphs = {}
    for scheme, decoder in decoders.items():
        make = steps_of(decoder)
        for name, variant in VARIANTS.items() if scheme == "vptq" else {"bf16": None}.items():
            with using(variant):
                graphs[name] = steps = make()
                for size in ROWS:
                    steps.step(size).launch() if gpu.is_pretended() else steps.capture(size, None)
    if gpu.is_pretended():
        return
    first = {}
    for size in ROWS:
        for name, steps in graphs.items():  # the same logits, but for the order of sums
            logits = steps.logits(size).float()
            want = first.setdefault((size, name != "bf16"), logits.clone())
            write(kind="logits", variant=name, rows=size, apart=float((logits - want).norm() / want.norm()),
                  finite=bool(logits.isfinite().all()))
    times = {}
    for size in ROWS:
        for _ in range(5):  # warm
            for steps in graphs.values():
                steps.logits(size)
        for _, name in turns(list(graphs), 7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name].logits(size)
            begin.record()
            for _ in range(5):
                graphs[name].logits(size)
            end.record()
            end.synchronize()
            times.setdefault((size, name), []).append(1e3 * begin.elapsed_time(end) / 5)
    for (size, name), found in times.items():
        write(kind="step", variant=name, rows=size, us=statistics.median(found), samples=found)


def probe_clashes(write):
    """What clashes in the codebook cost: the same product where the eight lanes that read at once are in eight banks."""
    lanes = torch.tensor([COLUMN_LANE.index(column % 64 // 2) % 8 for column in range(4096)], device=DEVICE)
    for outputs in (4096, 24576):
        works = {}
        for kind in ("random", "none"):
            tensor = random_weight((outputs, 4096))
            if kind == "none" and not gpu.is_pretended():
                joint = unpack(tensor.indices[0], 21, 4096).long()
                main = joint & 8191 & ~7 | lanes
                tensor = dataclasses.replace(tensor, indices=VectorQuant.join_indices(
                    main[None], (joint >> 13)[None], main_bits=13, residual_bits=8))
            weights = [vptq.prepare(tensor, dtype=DTYPE) for _ in range(4 if outputs > 9999 else 8)]
            for rows in ROWS:
                x, out = torch.randn(rows, 4096, device=DEVICE).to(DTYPE), outputs_of(weights[0], rows)
                works[kind, rows] = replay.Work(lambda i, w=weights, x=x, out=out: w[i].fused(x, out), len(weights))
        if gpu.is_pretended():
            for work in works.values():
                work.launch(0)
            continue
        for (kind, rows), found in replay.measure(works, DEVICE, samples=3).items():
            write(kind="clashes", variant=kind, outputs=outputs, rows=rows, us=statistics.median(found))


def show(rows):
    names = [*VARIANTS, "bf16", "torch"]
    linears = {(row["variant"], row["linear"], row["rows"]): row["us"] for row in rows if row["kind"] == "linear"}
    steps = {(row["variant"], row["rows"]): row["us"] for row in rows if row["kind"] == "step"}
    print(f"{'variant':16}" + "".join(f"{which + ' ' + str(n):>12}" for n in ROWS for which in ("qkv", "o", "gate_up", "down")))
    for name in names:
        if any(key[0] == name for key in linears):
            print(f"{name:16}" + "".join(f"{linears.get((name, which, n), 0):12.2f}" for n in ROWS
                                         for which in ("qkv", "o", "gate_up", "down")))
    print(f"\n{'step, us':16}" + "".join(f"{n:>10}{'÷ bf16':>8}" for n in ROWS))
    for name in names:
        if any(key[0] == name for key in steps):
            print(f"{name:16}" + "".join(f"{steps[name, n]:10.0f}{steps[name, n] / steps['bf16', n]:8.3f}" for n in ROWS))
    for row in rows:
        if row["kind"] in ("clashes", "errors") or (row["kind"] == "logits" and not (row["finite"] and row["apart"] < 0.05)
                                                    and row["variant"] != "bf16"):
            print({key: value for key, value in row.items() if key != "kind"})


def work(write):
    def after(what):
        print(f"{time.monotonic() - BEGIN:5.1f} s  {what}", flush=True)

    write(kind="errors", **check(write))
    after("checked")
    decoders = {"vptq": decoder_of("vptq", 1 if gpu.is_pretended() else DISTINCT),
                "bf16": decoder_of("bf16", 1 if gpu.is_pretended() else DISTINCT)}
    after("loaded")
    with torch.inference_mode():
        time_steps(decoders, write)
        after("steps")
        for what, run in {"clashes": lambda: probe_clashes(write), "linears": lambda: time_linears(decoders["vptq"], write)}.items():
            if time.monotonic() - BEGIN < LIMIT or gpu.is_pretended():
                run()
                after(what)


def main():
    arguments = sys.argv[1:]
    if arguments[:1] in (["--compile"], ["--dry"]):
        from flyweight.kernels.dry_run import dry_run

        with dry_run(gpu.GPUS["sm_90a"]):
            work(lambda **row: None)
        wanted = sorted(jit.wanted, key=str)
        print(len(wanted), "kernels")
        jit._source = one_by_one
        if arguments[0] == "--compile":
            for one in wanted:
                jit.compile_cubin(one.file, dict(one.defines), "sm_90a", one.registers)
        return
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with (folder / "vptq.jsonl").open("a") as file:
        def write(**row):
            row = {"source": str(Path(vptq_rows.__file__).parents[3]), **row}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        work(write)
    show(rows)


main()
