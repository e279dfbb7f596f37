"""What VPTQ hangs on, measured: the rate of gathers from shared memory, then every variant of the kernels.

    python benchmarks/probe_vptq.py OUT [part …]

Each part runs in a process of its own, so that a variant that crashes or hangs costs only its part. Rows go to
OUT/<part>.jsonl; the tables are printed last. Times are CUDA-graph replays: cold over rotating copies larger than L2,
hot over one. Every variant is compared with float64 before it is timed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from flyweight.kernels import jit, vptq
from flyweight.tensors import VectorQuant

COLUMNS = (1024, 2048, 4096, 8192, 16384)
ROWS = (1024, 4096, 8192, 14336, 28672, 53248)
BOOKS = ((8192, 256), (4096, 256), (4096, 512), (8192, 512))
Launch = vptq.Launch

GATHER = r"""
typedef unsigned int u32;
extern "C" __global__ void __launch_bounds__(1024, 1) gather(const u32* pattern, unsigned long long* clocks, u32* sink) {
  extern __shared__ __align__(128) char shared[];
  for (u32 i = threadIdx.x; i < 147456 / 4; i += blockDim.x) ((u32*)shared)[i] = i;
  u32 base = (u32)__cvta_generic_to_shared(shared), lane = threadIdx.x % 32, offset[16], out = 0;
  float acc[8] = {};
  for (int j = 0; j < 16; j++) offset[j] = base + pattern[(threadIdx.x / 32 * 16 + j) * 32 + lane];
  __syncthreads();
  unsigned long long begin = clock64();
  for (int it = 0; it < 64; it++) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
      u32 a, b, c, d, at = offset[j];
#if MODE == 0
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
#elif MODE == 1
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
#elif MODE == 2   // two planes of 8 bytes
      at = base + (at - base) / 2;
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+65536];" : "=r"(c), "=r"(d) : "r"(at));
#elif MODE == 3   // four planes of 4 bytes
      at = base + (at - base) / 4;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(at));
      asm volatile("ld.shared.u32 %0, [%1+32768];" : "=r"(b) : "r"(at));
      asm volatile("ld.shared.u32 %0, [%1+65536];" : "=r"(c) : "r"(at));
      asm volatile("ld.shared.u32 %0, [%1+98304];" : "=r"(d) : "r"(at));
#endif
#if USE == 0
      out ^= a ^ b ^ c ^ d;
#elif USE == 1    // fp32: unpack bf16 and multiply-add
      u32 w[4] = {a, b, c, d};
      float x = __uint_as_float(it << 20);
      for (int k = 0; k < 4; k++) {
        acc[2 * k] += x * __uint_as_float(w[k] << 16);
        acc[2 * k + 1] += x * __uint_as_float(w[k] & 0xffff0000);
      }
#elif USE == 2    // bf16x2 multiply-add
      u32 w[4] = {a, b, c, d}, x = it;
      for (int k = 0; k < 4; k++) asm volatile("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(((u32*)acc)[k]) : "r"(w[k]), "r"(x));
#elif USE == 3    // matrix unit
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a), "r"(b), "r"(c), "r"(d), "r"(it), "r"(it));
#endif
    }
  }
  __syncthreads();
  unsigned long long end = clock64();
  if (threadIdx.x == 0) clocks[blockIdx.x] = end - begin;
  for (int k = 0; k < 8; k++) out ^= __float_as_uint(acc[k]);
  if (out == 0x12345) sink[0] = out;
}
"""

EMPTY = r"""
extern "C" __global__ void empty(int n) { asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;"); }
"""


class Recorder:
    def __init__(self, folder: Path, part: str) -> None:
        self.file = (folder / f"{part}.jsonl").open("w")

    def __call__(self, **row: object) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def microseconds(launch, copies: int, *, replays: int = 9) -> dict[str, float]:
    """Median, p10 and p90 per launch of a graph that walks over `copies`, twice for few."""
    launches = copies * max(1, math.ceil(24 / copies))
    for i in range(min(copies, 3)):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / launches * 1e3)
    samples.sort()
    median, low, high = samples[replays // 2], samples[replays // 10], samples[-1 - replays // 10]
    return dict(us=round(median, 2), p10=round(low, 2), p90=round(high, 2))


def copies_for(size: int) -> int:
    return max(2, min(400, math.ceil(160e6 / size)))


def part_torch(record: Recorder, _: float) -> None:
    empty = jit.Module(compile_source(EMPTY, {"N": 0})).kernel("empty")
    for pdl in (False, True):
        record(kind="empty", pdl=pdl, **microseconds(lambda i, p=pdl: empty.launch(132, 1024, (0,), pdl=p), 24))
    for columns in COLUMNS:
        x = torch.randn(1, columns, device="cuda").bfloat16()
        for rows in ROWS:
            copies = copies_for(2 * columns * rows)
            weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            out = torch.empty(1, rows, device="cuda", dtype=torch.bfloat16)

            def run(i: int, x=x, weights=weights, out=out) -> None:
                torch.matmul(x, weights[i].t(), out=out)

            record(kind="torch", k=columns, n=rows, **microseconds(run, copies), hot=microseconds(run, 1)["us"])


def compile_source(source: str, defines: dict[str, int]) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(std="c++17", arch=jit.architecture(), define_macro=[(k, str(v)) for k, v in defines.items()])
    return bytes(Program(source, code_type="c++", options=options).compile("cubin").code)


def patterns() -> dict[str, torch.Tensor]:
    """Byte offsets [warp, item, lane] of 16-byte entries in a table of 8192."""
    random = torch.randint(0, 8192, (32, 16, 32))
    lane = torch.arange(32).expand(32, 16, 32)
    ordered = vptq.schedule(random.transpose(1, 2).reshape(128, 8, 16) % 8).long()
    scheduled = random.transpose(1, 2).reshape(128, 8, 16).gather(2, ordered).view(32, 32, 16).transpose(1, 2)
    rows = random // 8 * 8
    return {
        "free": (rows + lane % 8) * 16,
        "same entry": torch.zeros_like(random),
        "random": random * 16,
        "scheduled 16": scheduled * 16,
        "two a bank, each eight": (rows + lane % 4) * 16,
        # Each eight lanes crowd into two banks, but over the warp every bank has four: are the eights served together?
        "crowded eights": (rows + lane // 8 * 2 + lane % 2) * 16,
        "replicated 256": (random % 256 * 8 + lane % 8) * 16,
        "replicated 256 by 4": (random % 256 * 4 + lane % 4) * 16,
        "256 entries": random % 256 * 16,
    }


def part_gather(record: Recorder, _: float) -> None:
    names = {0: "ld.shared.v4", 1: "ldmatrix.x4.trans", 2: "2 planes of 8 bytes", 3: "4 planes of 4 bytes"}
    uses = {0: "xor", 1: "fp32", 2: "bf16x2", 3: "mma"}
    clocks, sink = torch.zeros(132, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    jobs = [(mode, use) for mode in names for use in uses if use == 0 or mode < 2]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda job: compile_source(GATHER, {"MODE": job[0], "USE": job[1]}), jobs))
    table = patterns()
    for (mode, use), cubin in zip(jobs, cubins, strict=True):
        kernel = jit.Module(cubin).kernel("gather")
        for name, pattern in table.items():
            if use and name not in ("random", "free"):
                continue
            offsets = pattern.to(torch.int32).cuda().contiguous()
            for warps in (8, 32):
                for _ in range(2):
                    kernel.launch(132, 32 * warps, (offsets, clocks, sink), shared=147456)
                torch.cuda.synchronize()
                record(kind="gather", load=names[mode], use=uses[use], pattern=name, warps=warps,
                       cycles=round(clocks.double().median().item() / (warps * 16 * 64), 2))


@dataclasses.dataclass(frozen=True)
class Variant:
    name: str
    launch: Launch
    item_bytes: int | None = None
    position: int | None = None


def repeated(weight: vptq.Vptq, times: int) -> vptq.Vptq:
    """The weight `times` times over its rows, in fresh memory: as slow as a weight of that size."""
    offsets = workspace = None
    if weight.offsets is not None and weight.workspace is not None:
        steps = weight.stream.shape[0]
        shifts = torch.arange(times, device=weight.offsets.device, dtype=torch.int32)[:, None] * steps
        offsets = torch.cat([(weight.offsets[:-1] + shifts).flatten(), weight.offsets[-1:] + (times - 1) * steps])
        workspace = weight.workspace.repeat(times)
    return dataclasses.replace(
        weight, stream=weight.stream.repeat(times, *[1] * (weight.stream.ndim - 1)), offsets=offsets, workspace=workspace,
        out_features=weight.out_features * times, book=weight.book.clone(), affine=weight.affine.clone(),
        residual=None if weight.residual is None else weight.residual.clone())


def time_variants(record: Recorder, deadline: float, book: tuple[int, int], variants: list[Variant], *, most: int = 1 << 40,
                  least: int = 0) -> None:
    for columns in COLUMNS:
        tensor = VectorQuant.random((1024, columns), seed=columns, device="cuda", main=book[0], residual=book[1])
        x = torch.randn(1, columns, device="cuda").bfloat16()
        expected = tensor.matmul_reference(x)
        prepared: dict[tuple, vptq.Vptq] = {}
        for variant in variants:
            form = (variant.item_bytes, variant.position)
            try:
                if form not in prepared:
                    prepared[form] = vptq.prepare(tensor, dtype=torch.bfloat16, item_bytes=form[0], position=form[1])
                for rows in ROWS:
                    if time.time() > deadline:
                        record(kind="late", variant=variant.name, book=book, k=columns, n=rows)
                        return
                    if columns * rows <= most and min(columns, rows) >= least:
                        time_one(record, prepared[form], variant, x, expected, times=rows // 1024, book=book)
            except Exception as error:
                record(kind="error", variant=variant.name, book=book, k=columns, error=f"{type(error).__name__}: {error}"[-1500:])
                print(f"{variant.name} {book} K={columns}: {type(error).__name__}: {error}"[-600:], flush=True)


def time_one(record: Recorder, base: vptq.Vptq, variant: Variant, x: torch.Tensor, expected: torch.Tensor, *, times: int,
             book: tuple[int, int]) -> None:
    size = base.stream.nbytes * times + base.book.nbytes
    weights = [repeated(base, times) for _ in range(copies_for(size))]
    out = torch.full((1, 1024 * times), math.nan, device="cuda", dtype=torch.bfloat16)
    weights[0](x, out, launch=variant.launch)
    torch.cuda.synchronize()
    target = expected.repeat(1, times)
    error = ((out.double() - target).norm() / target.norm()).item()
    first = out.clone()
    cold = microseconds(lambda i: weights[i](x, out, launch=variant.launch), len(weights))
    hot = microseconds(lambda i: weights[0](x, out, launch=variant.launch), 1)
    record(kind="vptq", variant=variant.name, book=book, k=x.shape[1], n=1024 * times, **cold, hot=hot["us"],
           error=error, stable=torch.equal(out, first), gbs=round(size / cold["us"] / 1e3, 1), bytes=size)


def part_staged(record: Recorder, deadline: float) -> None:
    staged = Launch("staged")
    fixed_cost(record)
    time_variants(record, deadline, BOOKS[0], [
        Variant("scheduled", staged), Variant("natural", staged, position=0),
        Variant("4 bytes", staged, item_bytes=4, position=5), Variant("scheduled 16 warps", Launch("staged", warps=16))])
    for book in BOOKS[1:]:
        small = [Variant("16 warps, 2 resident", Launch("staged", warps=16, resident=2, copies=8 if book[1] == 256 else 4))]
        time_variants(record, deadline, book, [Variant("scheduled", staged)] + (small if book[0] == 4096 else []))


def fixed_cost(record: Recorder) -> None:
    """The staged kernel without a single row block: launch, staging, x."""
    for book in BOOKS[:2]:
        for columns in (1024, 4096, 16384):
            tensor = VectorQuant.random((1024, columns), device="cuda", main=book[0], residual=book[1])
            base = vptq.prepare(tensor, dtype=torch.bfloat16)
            weights = [repeated(base, 1) for _ in range(copies_for(base.stream.nbytes + base.book.nbytes))]
            x, out = torch.randn(1, columns, device="cuda").bfloat16(), torch.empty(1, 1024, device="cuda", dtype=torch.bfloat16)
            for cluster, split in ((1, False), (2, False), (4, False), (4, True)):
                launch = Launch("staged", cluster=cluster, split=split, processors=128 if cluster == 4 else None)

                def run(i: int, launch: Launch = launch, x=x, out=out, weights=weights) -> None:
                    hollow = dataclasses.replace(weights[i], out_features=0)
                    object.__setattr__(hollow, "grid", lambda *_: launch.processors or 132)
                    hollow._launch(x, out, launch, 1, True)

                try:
                    record(kind="fixed", book=book, k=columns, cluster=cluster, split=split, **microseconds(run, len(weights)),
                           hot=microseconds(lambda i, run=run: run(0), 1)["us"])
                except Exception as error:
                    record(kind="error", variant=f"fixed {cluster} {split}", error=str(error)[-500:])


def part_cluster(record: Recorder, deadline: float) -> None:
    def shared(cluster: int, split: bool = False) -> Launch:
        return Launch("staged", cluster=cluster, split=split, processors=128 if cluster == 4 else None)

    variants = [Variant("cluster 4 split", shared(4, True)), Variant("cluster 4", shared(4)), Variant("cluster 2", shared(2)),
                Variant("cluster 2 split", shared(2, True))]
    for book in BOOKS:
        time_variants(record, deadline, book, variants[: 4 if book == BOOKS[0] else 2])


def part_direct(record: Recorder, deadline: float) -> None:
    variants = [Variant("direct 4", Launch("direct", warps=4)), Variant("direct 16", Launch("direct", warps=16)),
                Variant("direct 8", Launch("direct", warps=8))]
    for book in BOOKS:
        time_variants(record, deadline, book, variants[: 3 if book == BOOKS[0] else 1], most=17_000_000)


def part_sliced(record: Recorder, deadline: float) -> None:
    time_variants(record, deadline, (65536, 256), [Variant("sliced", Launch("sliced"))], least=4096)


def part_tests(_: Recorder, __: float) -> None:
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-x", "--tb=short", "tests/kernels/test_vptq_gpu.py"],
                            cwd=Path(__file__).parent.parent, env=os.environ | {"PYTHONPATH": "src"}).returncode)


PARTS = {"gather": (part_gather, 20), "torch": (part_torch, 25), "staged": (part_staged, 45), "cluster": (part_cluster, 40),
         "direct": (part_direct, 20), "sliced": (part_sliced, 20), "tests": (part_tests, 60)}


def warm_up(names: list[str]) -> None:
    """Compile every variant at once: NVRTC leaves the interpreter free."""
    base = {"HALVES": 1, "COPIES": 8, "ROWS": 1, "FP16": 0, "CLUSTER": 1, "SPLIT": 0, "WARPS": 32, "ITEM_BYTES": 3, "KERNEL": 0,
            "RESIDENT": 1}
    jobs: list[dict] = []
    for main, residual in BOOKS:
        bits = {"MAIN_BITS": (main - 1).bit_length(), "RES_BITS": (residual - 1).bit_length()}
        bits["POS_BITS"] = min(4, 24 - sum(bits.values()))
        first = (main, residual) == BOOKS[0]
        jobs += [base | bits] if "staged" in names else []
        jobs += [base | bits | more for more in ({"POS_BITS": 0}, {"ITEM_BYTES": 4, "POS_BITS": 5}, {"WARPS": 16})
                 if first and "staged" in names]
        jobs += [base | bits | {"WARPS": 16, "RESIDENT": 2, "COPIES": 8 if residual == 256 else 4}] if main == 4096 else []
        jobs += [base | bits | {"CLUSTER": c, "SPLIT": s} for c, s in ((4, 1), (4, 0), (2, 0), (2, 1)) if "cluster" in names]
        jobs += [base | bits | {"KERNEL": 1, "WARPS": w} for w in (4, 16, 8) if "direct" in names]
    jobs += [base | {"KERNEL": 2, "ITEM_BYTES": 4, "MAIN_BITS": 13, "RES_BITS": 8, "POS_BITS": 11}] if "sliced" in names else []
    arch = jit.architecture()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(jit.compile_cubin, "vptq.cu", job, arch) for job in jobs]:
            if done.exception():
                print(done.exception(), flush=True)


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for name in PARTS for path in [folder / f"{name}.jsonl"] if path.exists()
            for line in path.read_text().splitlines()]


def report(folder: Path) -> None:
    rows = read(folder)
    gathers = [r for r in rows if r["kind"] == "gather" and r["warps"] == 32]
    for pattern in dict.fromkeys(r["pattern"] for r in gathers):
        cells = [f"{r['load']}/{r['use']} {r['cycles']}" for r in gathers if r["pattern"] == pattern]
        print(f"{pattern:24} cycles for 32 lanes: " + " | ".join(cells))
    for r in rows:
        if r["kind"] in ("empty", "fixed"):
            print({k: v for k, v in r.items() if k not in ("p10", "p90")})
    torch_us = {(r["k"], r["n"]): r for r in rows if r["kind"] == "torch"}
    timed = [r for r in rows if r["kind"] == "vptq"]
    books = list(dict.fromkeys(tuple(r["book"]) for r in timed))
    for book in books:
        names = list(dict.fromkeys(r["variant"] for r in timed if tuple(r["book"]) == book))
        print(f"\n{book[0]}/{book[1]}  torch µs cold/hot: µs cold, time / torch time (below 1 is faster), h = µs hot")
        print("variants: " + " | ".join(names))
        found = {(r["variant"], r["k"], r["n"]): r for r in timed if tuple(r["book"]) == book}
        for columns in COLUMNS:
            for n in ROWS:
                cells = []
                for name in names:
                    r = found.get((name, columns, n))
                    base = torch_us.get((columns, n))
                    ratio = f" {r['us'] / base['us']:.2f}" if r and base else ""
                    bad = "!" if r and not (r["error"] < 1e-2 and r["stable"]) else ""
                    cells.append(f"{r['us']:.1f}{ratio}{bad} h{r['hot']:.1f}" if r else "-")
                base = torch_us.get((columns, n), {"us": 0, "hot": 0})
                if any(c != "-" for c in cells):
                    print(f"{columns}x{n} {base['us']:.1f}/{base['hot']:.1f}: " + " | ".join(cells))
        best: dict[tuple, float] = {}
        for r in timed:
            if tuple(r["book"]) == book and (r["k"], r["n"]) in torch_us and r["error"] < 1e-2:
                key = (r["k"], r["n"])
                best[key] = min(best.get(key, 9e9), r["us"] / torch_us[key]["us"])
        if best:
            mean = math.exp(sum(map(math.log, best.values())) / len(best))
            print(f"best of all: geometric mean {mean:.3f}, worst {max(best.values()):.2f}; "
                  f"largest error {max(r['error'] for r in timed if tuple(r['book']) == book):.1e}")
    for r in rows:
        if r["kind"] in ("error", "late"):
            print({k: (v if k != "error" else v[-200:]) for k, v in r.items()})


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    if wanted[:1] == ["--part"]:
        run, limit = PARTS[wanted[1]]
        torch.manual_seed(0)
        run(Recorder(folder, wanted[1]), time.time() + limit)
        return
    names = wanted or [name for name in PARTS if name != "tests"]
    begin = time.time()
    warm_up(names)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for name in names:
        start = time.time()
        try:
            result = subprocess.run([sys.executable, __file__, str(folder), "--part", name], timeout=PARTS[name][1] + 25,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            tail = result.stdout[-1500:] if result.returncode or name == "tests" else result.stdout[-400:]
            print(f"-- {name}: exit {result.returncode} after {time.time() - start:.0f} s {tail}", flush=True)
        except subprocess.TimeoutExpired as error:
            print(f"-- {name}: hung; {str(error.stdout)[-500:]}", flush=True)
    report(folder)


if __name__ == "__main__":
    main()
