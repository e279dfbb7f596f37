"""VPTQ against torch bf16 on the seeds' shapes: the kernel that is chosen, and the choices still in question.

    python benchmarks/probe_vptq.py OUT [book | rows | question …]

Rows go to OUT/vptq.jsonl, tables to the terminal. Times are CUDA-graph replays, cold over rotating copies larger than L2,
hot over one. Every weight is compared with float64 before it is timed. A weight of many rows is 1024 of them repeated.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from flyweight.bench.rows import environment_row, make_row
from flyweight.kernels import jit, vptq, vptq_layout
from flyweight.kernels.vptq import Launch
from flyweight.tensors import VectorQuant

COLUMNS = (1024, 2048, 4096, 8192, 16384)
ROWS = (1024, 4096, 8192, 14336, 28672, 53248)
BOOKS = ((8192, 256), (4096, 256), (4096, 512), (8192, 512))
BASE = 1024  # outputs that are really made

# What the borders in vptq.py hang on: (name, codebooks, shapes, launch, doubled)
SMALL = [(1024, 1024), (2048, 1024), (1024, 4096), (4096, 1024), (1024, 8192), (2048, 4096), (8192, 1024)]
MIDDLE = [(4096, 4096), (4096, 8192), (2048, 14336), (8192, 4096), (16384, 1024), (4096, 14336), (8192, 8192)]
LARGE = [(8192, 14336), (16384, 8192), (4096, 53248), (16384, 53248)]
QUESTIONS: list[tuple[str, tuple, list, Launch, bool]] = [
    ("direct 8 warps", BOOKS, SMALL, Launch("direct", warps=8), False),
    ("direct 16 warps", BOOKS[:1], SMALL, Launch("direct", warps=16), False),
    ("half the processors", (BOOKS[0], BOOKS[3]), SMALL, Launch("staged", share=2), False),
    ("half the processors, 8 warps", BOOKS[:1], SMALL, Launch("staged", share=2, warps=8), False),
    ("all processors", BOOKS, SMALL + MIDDLE, Launch("staged"), False),
    ("8 warps", BOOKS[:1], SMALL + MIDDLE, Launch("staged", warps=8), False),
    ("32 warps", BOOKS, MIDDLE + LARGE, Launch("staged", warps=32), False),
    ("two on a processor", BOOKS[1:2], SMALL + MIDDLE + LARGE, Launch("staged", resident=2), False),
    ("two on a processor, 4 copies", BOOKS[2:3], SMALL + MIDDLE, Launch("staged", resident=2, copies=4), False),
    ("doubled", BOOKS[1:3], MIDDLE + LARGE, Launch("staged"), True),
    ("sliced, 16 warps", ((65536, 256),), [(4096, 4096), *LARGE], Launch("sliced"), False),
    ("not doubled", BOOKS[1:3], LARGE, Launch("staged"), False),
]


def microseconds(launch: Callable[[int], Any], copies: int, *, replays: int = 11) -> tuple[float, float, float]:
    """Median, p10 and p90 per launch of a graph that walks over `copies`, at least 24 launches."""
    launches = copies * math.ceil(24 / copies)
    for i in range(min(copies, 3)):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % copies)
    graph.replay()
    samples = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / launches * 1e3)
    samples.sort()
    return samples[replays // 2], samples[replays // 10], samples[-1 - replays // 10]


def copies_for(size: int) -> int:
    return max(2, min(400, math.ceil(160e6 / size)))


class Torch:
    """Times of `x @ W`, bf16, each measured once."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int, int], float] = {}

    def __call__(self, rows: int, columns: int, outputs: int) -> float:
        key = (rows, columns, outputs)
        if key not in self.times:
            x = torch.randn(rows, columns, device="cuda").bfloat16()
            copies = copies_for(2 * columns * outputs)
            weights = [torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
            self.times[key] = microseconds(lambda i: torch.matmul(x, weights[i].t(), out=out), len(weights))[0]
        return self.times[key]


def repeated(base: vptq.Vptq, times: int) -> vptq.Vptq:
    """The weight `times` times over its rows, in fresh memory: as slow as a weight of that size."""
    layout, offsets = base.layout, base.layout.offsets
    if offsets is not None:
        steps = layout.stream.shape[0]
        shifts = torch.arange(times, device="cuda", dtype=torch.int32)[:, None] * steps
        offsets = torch.cat([(offsets[:-1] + shifts).flatten(), offsets[-1:] + (times - 1) * steps])
    stream = layout.stream.repeat(times, *[1] * (layout.stream.ndim - 1))
    grown = dataclasses.replace(layout, stream=stream, offsets=offsets, out_features=layout.out_features * times,
                                book=layout.book.clone(), affine=layout.affine.clone())
    return vptq.Vptq(grown, base.arrived)


class Probe:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "vptq.jsonl").open("w")
        self.rows: list[dict] = []
        self.torch_us = Torch()
        self.tensors: dict[tuple, VectorQuant] = {}
        self.prepared: dict[tuple, vptq.Vptq] = {}
        self.environment = environment_row("cuda")
        self.write(self.environment)

    def write(self, row: dict) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if row["bench"] == "kernel":
            self.rows.append(row)

    def tensor(self, book: tuple[int, int], columns: int) -> VectorQuant:
        if (book, columns) not in self.tensors:
            made = VectorQuant.random((BASE, columns), seed=columns, device="cuda", main=book[0], residual=book[1])
            self.tensors[book, columns] = made
        return self.tensors[book, columns]

    def base(self, book: tuple[int, int], columns: int, doubled: bool) -> vptq.Vptq:
        key = (book, columns, doubled)
        if key not in self.prepared:
            weight = vptq.prepare(self.tensor(book, columns), dtype=torch.bfloat16, doubled=doubled)
            assert isinstance(weight, vptq.Vptq)
            self.prepared[key] = weight
        return self.prepared[key]

    def measure(self, book: tuple[int, int], columns: int, outputs: int, *, rows: int = 1, name: str = "",
                doubled: bool | None = None, launch: Launch | None = None) -> None:
        """One row of results; `name` is the question it answers, or nothing for the kernel that is chosen."""
        fields = dict(format="vptq", rows=rows, in_features=columns, out_features=outputs, vector_length=8,
                      main_centroids=book[0], residual_centroids=book[1], dtype="bfloat16", question=name)
        try:
            found = self.time(book, columns, outputs, rows=rows, doubled=doubled, launch=launch)
            self.write(make_row("kernel", self.environment["id"], **fields, **found))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[-600:]
            print(name, book, columns, outputs, reason, flush=True)
            self.write(make_row("kernel", self.environment["id"], status="failed", reason=reason, **fields))

    def time(self, book: tuple[int, int], columns: int, outputs: int, *, rows: int, doubled: bool | None,
             launch: Launch | None) -> dict[str, Any]:
        times, tensor = outputs // BASE, self.tensor(book, columns)
        if doubled is None:
            grown = dataclasses.replace(tensor, indices=tensor.indices.new_empty(1, outputs // 8, 0))
            doubled = vptq.worth_doubling(grown)
        base = self.base(book, columns, doubled)
        size = base.layout.stream.nbytes * times + base.layout.book.nbytes
        weights = [repeated(base, times) for _ in range(copies_for(size))]
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        out = torch.full((rows, outputs), math.nan, device="cuda", dtype=torch.bfloat16)
        weights[0](x, out, launch=launch)
        expected = tensor.matmul_reference(x).repeat(1, times)
        error = ((out.double() - expected).norm() / expected.norm()).item()
        us, low, high = microseconds(lambda i: weights[i](x, out, launch=launch), len(weights))
        hot = microseconds(lambda i: weights[0](x, out, launch=launch), 1)[0]
        torch_us = self.torch_us(rows, columns, outputs)
        step = min(8, 1 << (rows - 1).bit_length())
        chosen = weights[0].choose(step, x.device, launch) if rows <= vptq.FUSED_ROWS else None
        rate = size / us / 1e3
        plan = dict(launch=dataclasses.asdict(chosen.launch), phase=chosen.phase) if chosen else dict(launch=None, phase=None)
        return dict(kernel=f"vptq_{chosen.launch.kernel}" if chosen else "vptq_dequantize + torch", **plan, doubled=doubled,
                    us=round(us, 2), us_p10=round(low, 2), us_p90=round(high, 2), us_hot=round(hot, 2),
                    torch_us=round(torch_us, 2), ratio=round(us / torch_us, 4), gb_s=round(rate, 1),
                    share_of_bandwidth=round(rate / self.environment["copy_gb_s"], 3), relative_error=error)


def part_book(probe: Probe) -> None:
    """The chosen kernel on every row of the seeds, and 65536 entries from 4096 up."""
    for book in BOOKS:
        for columns in COLUMNS:
            for outputs in ROWS:
                probe.measure(book, columns, outputs)
    for columns in COLUMNS[2:]:
        for outputs in ROWS[1:]:
            probe.measure((65536, 256), columns, outputs)


def part_rows(probe: Probe) -> None:
    for rows in (2, 4, 8, 16, 32, 256, 2048):
        for book in (BOOKS[0], BOOKS[1], (65536, 256)):
            for columns, outputs in ((4096, 4096), (4096, 28672), (14336, 4096)):
                probe.measure(book, columns, outputs, rows=rows, name="rows")
    for book in (BOOKS[0], BOOKS[1], (65536, 256)):
        probe.measure(book, 14336, 4096, name="rows")


def part_question(probe: Probe) -> None:
    for name, books, shapes, launch, doubled in QUESTIONS:
        for book in books:
            for columns, outputs in shapes:
                probe.measure(book, columns, outputs, name=name, launch=launch, doubled=doubled)


def prepare_seconds() -> None:
    """How long laying out takes, and how well the items are ordered."""
    for book in (BOOKS[0], BOOKS[1], (65536, 256)):
        tensor = VectorQuant.random((8192, 8192), device="cuda", main=book[0], residual=book[1])
        vptq.prepare(tensor, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        begin = time.time()
        vptq.prepare(tensor, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        print(f"8192 × 8192, {book}: laid out in {time.time() - begin:.3f} s")
    for window in (4, 8, 16):
        bank = torch.randint(0, 8, (20000, 8, window), device="cuda")
        for name, other in (("one copy", bank), ("two", (bank + torch.randint(1, 8, bank.shape, device="cuda")) % 8)):
            order = vptq_layout.schedule((bank | other << 4).to(torch.uint8))
            item = (order & 127).long()
            chosen = torch.where(order > 127, other.gather(2, item), bank.gather(2, item))
            clashes = torch.nn.functional.one_hot(chosen, 8).sum(1).amax(-1).double().mean().item()
            print(f"window of {window}, {name}: {clashes:.3f} cycles a step for eight lanes")


def warm_up() -> None:
    """Compile every variant at once: NVRTC leaves the interpreter free."""
    base = {"HALVES": 1, "COPIES": 8, "ROWS": 1, "FP16": 0, "WARPS": 16, "ITEM_BYTES": 3, "KERNEL": 0, "RESIDENT": 1}
    jobs: list[tuple[str, dict]] = [("vptq_layout.cu", {"KERNEL": 0, "POS_BITS": bits}) for bits in (2, 3, 4)]
    for main, residual in BOOKS:
        for doubled in (False, True) if main == 4096 else (False,):
            bits = ((main - 1).bit_length() + doubled, (residual - 1).bit_length())
            form = vptq_layout.ItemFormat.choose(*bits, 1024).defines()
            variants: list[dict] = [{}, {"WARPS": 8}, {"WARPS": 32}] + [{"ROWS": rows} for rows in (2, 4, 8) if residual == 256]
            if not doubled:
                variants += [{"KERNEL": 1, "WARPS": warps} for warps in (4, 8, 16)]
                variants += [{"RESIDENT": 2, "COPIES": 8 if residual == 256 else 4}] if main == 4096 else []
            jobs += [("vptq.cu", base | form | more) for more in variants]
    sliced = {"KERNEL": 2, "ITEM_BYTES": 4, "MAIN_BITS": 13, "RES_BITS": 8, "POS_BITS": 11}
    of_rows = ((1, 32), (1, 16), (2, 32), (4, 16), (8, 16))
    jobs += [("vptq.cu", base | sliced | {"ROWS": rows, "WARPS": warps}) for rows, warps in of_rows]
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        for done in [pool.submit(jit.compile_cubin, file, defines, jit.architecture()) for file, defines in jobs]:
            if done.exception():
                print(done.exception(), flush=True)


def key_of(row: dict) -> tuple[int, int, int, int]:
    return row["main_centroids"], row["residual_centroids"], row["in_features"], row["out_features"]


def geometric_mean(rows: list[dict]) -> float:
    return math.exp(sum(math.log(r["ratio"]) for r in rows) / len(rows))


def report(rows: list[dict]) -> None:
    rows = [r for r in rows if r["status"] == "ok"]
    chosen = {key_of(r): r for r in rows if not r["question"]}
    for book in dict.fromkeys(key[:2] for key in chosen):
        of_book = [r for key, r in chosen.items() if key[:2] == book]
        print(f"\n{book[0]}/{book[1]}  in × out: µs cold / hot, torch µs, time / torch time (below 1 is faster)")
        for columns in COLUMNS:
            cells = [f"{r['out_features']}: {r['us']:.1f}/{r['us_hot']:.1f} {r['torch_us']:.1f} {r['ratio']:.2f}"
                     for r in of_book if r["in_features"] == columns]
            if cells:
                print(f"{columns:6} × " + " | ".join(cells))
        print(f"geometric mean {geometric_mean(of_book):.3f}, worst {max(r['ratio'] for r in of_book):.2f}, "
              f"largest error {max(r['relative_error'] for r in of_book):.1e}")
    seeds = [r for key, r in chosen.items() if key[:2] in BOOKS] + [r for key, r in chosen.items() if key[:2] == BOOKS[0]]
    if seeds:
        print(f"\nall {len(seeds)} rows of the seeds: geometric mean {geometric_mean(seeds):.3f}")
    for name in dict.fromkeys(r["question"] for r in rows if r["question"]):
        print(f"\n{name}")
        for r in (r for r in rows if r["question"] == name):
            key = key_of(r)
            against = f" chosen {chosen[key]['us']:.2f}" if key in chosen else ""
            print(f"  {key[0]}/{key[1]} {key[2]}x{key[3]} rows {r['rows']}: {r['us']:.2f} µs{against} ratio {r['ratio']:.2f} "
                  f"error {r['relative_error']:.0e} {r['kernel']} phase {r['phase']}")


PARTS = {"book": part_book, "rows": part_rows, "question": part_question}


def main() -> None:
    probe, begin = Probe(Path(sys.argv[1])), time.time()
    warm_up()
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    prepare_seconds()
    for name in sys.argv[2:] or PARTS:
        begin = time.time()
        PARTS[name](probe)
        print(f"-- {name}: {time.time() - begin:.0f} s", flush=True)
    report(probe.rows)


if __name__ == "__main__":
    main()
