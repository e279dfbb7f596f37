"""Decode attention behind gemm.cu's lone qkv tiles, at 32 and 64 sequences: main and variants of it.

    python3 lone_gpu.py OUTDIR            on the H200, from the worktree's root (about 45 s)
    python3 lone_gpu.py OUTDIR --dry      here: runs every path on tensors without values, compiles all kernels into the cache

FLYWEIGHT_CACHE names the cubins (lone-cache beside this file, if it is there). Rows go to OUTDIR/lone.jsonl:
  probe      cycles to read each sector after a prefetch of kinds: does prefetch.global.L2 bring 32 bytes, a line, or what?
  attention  the kernel by itself (graph of launches over caches larger than L2)
  step       whole decode steps of Qwen3-8B, 36 layers, interleaved, with the parts; `same`: logits are main's bits
"""
import concurrent.futures, functools, inspect, json, multiprocessing, os, statistics, sys, tempfile, time
from pathlib import Path

BEGIN, DEADLINE = time.monotonic(), 57.0
HERE, ROOT = Path(__file__).resolve().parent, Path.cwd()
sys.path.insert(0, str(ROOT / "src"))
if "FLYWEIGHT_CACHE" not in os.environ and (HERE / "lone-cache").exists():
    os.environ["FLYWEIGHT_CACHE"] = str(HERE / "lone-cache")

import torch  # noqa: E402

from flyweight import gpu  # noqa: E402
from flyweight.bench import replay  # noqa: E402
from flyweight.bench.steps import PARTS, Kernel, parts_of, split_steps  # noqa: E402
from flyweight.engine.batch import KVStorage  # noqa: E402
from flyweight.kernels import attention, cuda_linear, gemm, jit  # noqa: E402

CONTEXT, PAGE, MODEL = 274, 16, "qwen3-8b"  # 256 + 34 tokens less 2, in the middle: what `flyweight bench step` has
SCHEMES, BATCHES = ("w8a8", "int4", "bf16"), (64, 32)
REPLAYS, SAMPLES, RECORDED = 3, 9, 5
PRODUCT = jit.SOURCES

# ---- sources: main's are the product's with the changes taken back ----
BACK = {
    "attention.cu": [
        ("""  union {
    u16 query[G][QUERY_ROW];
    float share[G][MOST_RUNS];             // of every run, in the merge
  };
  u16 key[HEAD_DIM], value[HEAD_DIM];      // the newest token
  float partial[WARPS][G][STATE];
""", """  u16 query[8][QUERY_ROW];                 // zeros from G on
  u16 key[HEAD_DIM], value[HEAD_DIM];      // the newest token
  float partial[WARPS][G][STATE];
  float share[G][MOST_RUNS];               // of every run, in the merge
"""),
        ("""      const uint4 q = g < G ? *(const uint4*)(sh.query[g] + i * 32 + t * 8) : make_uint4(0, 0, 0, 0);
      const uint4 low""", """      const uint4 q = *(const uint4*)(sh.query[g] + i * 32 + t * 8), low"""),
        ("  if ((int)blockIdx.x < early && warp == 0) {", """  for (int i = threadIdx.x; i < (8 - G) * QUERY_ROW; i += THREADS) sh.query[G][i] = 0;
  if (false) {"""),
        ("  if (threadIdx.x < 2 && (int)blockIdx.x < sequences)", "  if (false)"),
    ],
}
NO_TABLES = {"attention.cu": [("  if (threadIdx.x < 2 && (int)blockIdx.x < sequences)", "  if (false)")]}
NO_ALLOCATE = {"attention.cu": [
    ("constexpr int THREADS", """DEVICE uint4 load_once(const u16* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
constexpr int THREADS"""),
    ("k4[half][i] = *(const uint4*)(keys + at[half] + g * STEP + i * 32 + t * 8);",
     "k4[half][i] = load_once(keys + at[half] + g * STEP + i * 32 + t * 8);"),
    ("v4[i][part] = *(const uint4*)(values + at[i / 2] + (2 * t + i % 2) * STEP + part * 64 + g * 8);",
     "v4[i][part] = load_once(values + at[i / 2] + (2 * t + i % 2) * STEP + part * 64 + g * 8);"),
]}
MINE = """  if ((int)blockIdx.x < early)
#pragma unroll 1
    for (int n = 1; n <= AHEAD / 16 / WARPS && first + n * WARPS < last; n++) {
      locate(n);
      const u16* mine = (lane < 16 ? keys : values) + (lane & 8 ? at[1] : at[0]) + lane % 8 * STEP;
      FETCH
    }
  if (false) {"""
EARLY = "  if ((int)blockIdx.x < early && warp == 0) {"
OWN = {"attention.cu": [(EARLY, MINE.replace("FETCH", "prefetch_l2<HEAD_DIM * 2>(mine);"))]}
LINES = {"attention.cu": [(EARLY, MINE.replace("FETCH", "for (int i = 0; i < HEAD_DIM; i += 64) prefetch_l2(mine + i);"))]}
PROBE = """#include "common.cuh"
extern "C" __global__ void probe(const u8* data, u32* out, int mode) {
  u32 word = 0;
  word += *(const volatile u32*)(data + (64 << 14));  // the page's translation
  for (int i = 0; i < 64; i++) {  // chunks of 16 KB, of which each is read once
    const u8* chunk = data + ((size_t)i << 14);
    const int sector = i % 8;
    if (mode == 1) prefetch_l2(chunk);
    if (mode == 2) prefetch_l2<256>(chunk);
    if (mode == 3) asm volatile("ld.global.L2::256B.u32 %0, [%1];" : "=r"(word) : "l"(chunk));
    if (mode == 4) prefetch_l2<16384>(chunk);
    const u32 begin = cycles();
    while (cycles() - begin < 6000) {}
    const u32 before = cycles();
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(chunk + sector * (mode == 4 ? 2048 + 4 : 32)) : "memory");
    if (v == 12345) word++;
    out[i] = cycles() - before + (word == 54321);
  }
}
"""
MAIN_LIMIT = "(SHARED_SMALL if beside else 210 * 1024 if small else SHARED)"
LIMIT = "(SHARED_SMALL if beside else SHARED_LONE if small or (lone and warpgroups == 1) else SHARED)"
SHAPE_FOR = inspect.getsource(gemm.shape_for.__wrapped__)


class Variant:
    def __init__(self, changes=None, *, limit=LIMIT, beside=0, early=True, carve=None, lone=gemm.LONE, only=None):
        self.changes, self.limit, self.beside, self.early, self.carve = changes or {}, limit, beside, early, carve
        self.lone, self.only = lone, only

    def switch_on(self, folders):
        """From here on the package is this variant; what others have captured stays."""
        jit.SOURCES = folders(self.changes)
        jit._source = functools.cache(jit._source.__wrapped__)
        jit._load = functools.cache(jit._load.__wrapped__)
        assert LIMIT in SHAPE_FOR
        exec(SHAPE_FOR.replace(LIMIT, self.limit), gemm.__dict__)  # with its @functools.cache
        gemm._why_not.cache_clear(), gemm.kernels.cache_clear()
        gemm.LONE, beside = self.lone, self.beside

        def lone_ctas(self, rows, device):  # a CTA beside which `beside` of an SM's 16 warps begin early counts for less
            found = LONE_CTAS(self, rows, device)
            return found and found * (16 - beside) // 16

        cuda_linear.CudaLinear.lone_ctas = lone_ctas if self.early else lambda self, rows, device: None
        jit.load = functools.partial(load_with, self.carve)


LONE_CTAS, LOAD = cuda_linear.CudaLinear.lone_ctas, jit.load


def load_with(carve, file, **options):
    module = LOAD(file, **options)
    if carve is not None and file == "attention.cu" and not gpu.is_pretended():
        from cuda.bindings import driver
        name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        kernel = driver.CUkernel(int(module.kernel("attention")._handle))
        (status,) = driver.cuKernelSetAttribute(name, carve, kernel, driver.CUdevice(torch.cuda.current_device()))
        assert status == driver.CUresult.CUDA_SUCCESS, status
    return module


VARIANTS = {
    "main": Variant(BACK, limit=MAIN_LIMIT, early=False),
    "room": Variant(early=False),                          # small attention CTAs, bounded ring: 2 (64) or 1 (32) beside a qkv tile
    "idle": Variant(),                                     # and those on SMs without a qkv tile bring tokens to L2: as committed
    "half": Variant(beside=4),                             # and a quarter of those beside a tile
    "all": Variant(beside=8),                              # and all that fit beside one
    "ring": Variant(limit=MAIN_LIMIT, only=("int4", "bf16")),  # as idle, but qkv keeps main's ring
    "own": Variant(OWN, beside=4),                         # as half, each warp its own tokens in pieces of 256 bytes
    "lines": Variant(LINES, beside=4),                     # as own, by prefetch.global.L2
    "carve": Variant(carve=100),                           # as idle, attention asks for the gemm's split of L1
    "noalloc": Variant(NO_ALLOCATE),                       # as idle, K and V without a place in L1
    "clusters": Variant(BACK, limit=MAIN_LIMIT, early=False, lone=("plain", "int4", "int8"), only=("w8a8",)),  # before lone tiles
}


class Folders:
    """Changed copies of the sources."""

    def __init__(self):
        self.made, self.root = {}, Path(tempfile.mkdtemp(prefix="lone"))

    def __call__(self, changes):
        key = json.dumps(changes)
        if key not in self.made:
            folder = self.made[key] = self.root / str(len(self.made))
            folder.mkdir()
            for path in PRODUCT.iterdir():
                text = path.read_text()
                for old, new in changes.get(path.name, []):
                    assert text.count(old) == 1, (path.name, old, text.count(old))
                    text = text.replace(old, new)
                (folder / path.name).write_text(text)
            (folder / "probe.cu").write_text(PROBE)
        return self.made[key]


# ---- kernels, compiled ahead ----
def compile_one(job):
    folder, file, defines, registers = job
    jit.SOURCES = Path(folder)
    jit._source = functools.cache(jit._source.__wrapped__)
    jit.compile_cubin(file, dict(defines), "sm_90a", registers)


def compile_all(jobs):
    missing = []
    for job in jobs:
        jit.SOURCES = Path(job[0])
        jit._source = functools.cache(jit._source.__wrapped__)
        if not jit.cubin_path(job[1], dict(job[2]), "sm_90a", job[3]).exists():
            missing.append(job)
    print(f"{len(jobs)} kernels, {len(missing)} to compile", flush=True)
    if missing:
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, missing))


# ---- the model ----
def load_decoder(scheme, layers=None):
    from flyweight.models.decoder import Decoder
    from flyweight.models.presets import PresetWeights
    device = torch.device("cuda", 0)
    weights = PresetWeights(MODEL, scheme, device="cpu" if gpu.is_pretended() else device)
    if layers is None:
        return Decoder.load(weights, device=device, dtype=torch.bfloat16)
    decoder = Decoder.load(weights, device=device, dtype=torch.bfloat16, layers=layers)
    decoder.blocks = decoder.blocks * 2
    return decoder


def make_caches(decoder, batch):
    """Every layer's own, or what one layer reads would still be in L2 for the next."""
    pages, config = -(-(CONTEXT + PAGE) // PAGE) * batch, decoder.config
    return [KVStorage(*(torch.randn(pages, PAGE, config.kv_heads, config.head_dim, device=decoder.device,
                                    dtype=torch.bfloat16) for _ in range(2))) for _ in decoder.blocks]


def make_rows(decoder, batch):
    from flyweight.engine.rows import Rows
    rows = Rows(batch, pages=-(-decoder.config.context_length // PAGE), vocabulary=decoder.config.vocab_size, device=decoder.device)
    each = -(-(CONTEXT + PAGE) // PAGE)
    if not gpu.is_pretended():
        rows.tables[:batch, :each] = torch.randperm(batch * each, device=decoder.device).view(batch, each).int()
        rows.lengths[:batch] = CONTEXT
        rows.tokens[:batch] = torch.randint(0, decoder.config.vocab_size, (batch,), device=decoder.device)
    return rows


def forget_calls(decoder):
    for block in decoder.blocks:
        for linear in (block.qkv, block.o, block.gate_up, block.down):
            linear.single.weight.calls.clear()
    decoder.head.single.weight.calls.clear()


def graphs_of(decoder, caches, rows, batch):
    from flyweight.engine.graphs import DecodeGraphs
    return DecodeGraphs(decoder, caches, rows, sizes=(batch,))


def wanted_variants(scheme):
    return {name: one for name, one in VARIANTS.items() if one.only is None or scheme in one.only}


# ---- checks ----
def exact_attention(shape, qkv, norms, angles, cache, table, length):
    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()

    query, key, value = qkv.double().view(-1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads])
    query, key = normed(query, norms[0]), normed(key, norms[1])
    cos, sin = angles[length - 1].double().cos(), angles[length - 1].double().sin()

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(qkv.dtype).double()

    tokens = torch.arange(length - 1, device=qkv.device)
    slots = table.long()[tokens // PAGE] * PAGE + tokens % PAGE
    keys, values = (torch.cat([side.flatten(0, 1)[slots].double(), new[None]]).repeat_interleave(shape.group, 1)
                    for side, new in ((cache.keys, turned(key)), (cache.values, value)))
    weights = (torch.einsum("hd,thd->ht", turned(query), keys) * shape.head_dim**-0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


def attention_options(batch, lengths, pages, device):
    shape = attention.HeadShape(32, 8, 128, 128, PAGE, True)
    angles = torch.rand(pages * PAGE, 64, device=device) * 6
    splits = attention.choose_splits(batch, 8, 132)
    norms = tuple((1 + 0.1 * torch.randn(128, device=device)).bfloat16() for _ in range(2))
    tables = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    return angles, dict(shape=shape, norms=norms, rope=attention.rope_pairs(angles.cos(), angles.sin()), lengths=lengths, tables=tables,
                        splits=splits, workspace=attention.Workspace.make(shape, batch, splits, device), epsilon=1e-6,
                        scale=128**-0.5)


def check_attention(batch, device):
    """The worst relative error of ragged sequences, outputs and unused tokens poisoned."""
    lengths = torch.tensor([1, 2, 16, 17, 64, 65, 274, 320, 321, 600] * 7, dtype=torch.int32)[:batch].to(device)
    pages = 40
    angles, options = attention_options(batch, lengths, pages, device)
    cache = KVStorage(*(torch.randn(batch * pages, PAGE, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)))
    for row, length in enumerate(lengths.tolist()):
        tokens = torch.arange(length - 1, pages * PAGE, device=device)
        slots = options["tables"][row].long()[tokens // PAGE] * PAGE + tokens % PAGE
        for side in (cache.keys, cache.values):
            side.flatten(0, 1)[slots] = float("nan")
    qkv = torch.randn(batch, 48 * 128, device=device, dtype=torch.bfloat16)
    before = KVStorage(cache.keys.clone(), cache.values.clone())
    out = torch.full((batch, 4096), float("nan"), device=device, dtype=torch.bfloat16)
    attention.decode_attention(qkv, out, cache, qkv_ctas=0, **options)  # all CTAs bring tokens to L2
    worst = 0.0
    for row, length in enumerate(lengths.tolist()):
        want = exact_attention(options["shape"], qkv[row], options["norms"], angles, before, options["tables"][row], length).flatten()
        worst = max(worst, ((out[row].double() - want).norm() / want.norm()).item())
    assert worst < 8e-3, worst  # a NaN fails as well
    return worst


def check_qkv(scheme, rows, device):
    """The qkv product with the variant's ring, against float64."""
    from flyweight.models.presets import SCHEMES as MAKE
    tensor = MAKE[scheme]((6144, 4096), 3, device, dtype=torch.bfloat16)
    x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
    out = torch.full((rows, 6144), float("nan"), device=device, dtype=torch.bfloat16)
    cuda_linear.CudaLinear(tensor, dtype=torch.bfloat16).fused(x, out)
    want = tensor.matmul_reference(x.double())
    error = ((out.double() - want).norm() / want.norm()).item()
    assert error < 1e-2, error
    return error


# ---- times ----
def probe(device, emit):
    data, out = torch.zeros(65 << 14, dtype=torch.uint8, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    other = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    kernel = jit.load("probe.cu", defines={"FP16": 0}).kernel("probe")
    for mode, name in enumerate(("nothing", "prefetch.global.L2", "bulk 256", "ld.L2::256B", "bulk 16384 (sectors 2 KB apart)")):
        other.fill_(mode)
        kernel.launch(1, 1, (data, out, mode))
        torch.cuda.synchronize()
        cycles = out.view(8, 8).float().median(0).values.int().tolist()
        emit({"bench": "probe", "mode": name, "cycles_by_sector": cycles})


def time_alone(batch, names, folders, device, emit):
    """µs of a launch by itself; graphs of 24 launches over caches of three times L2."""
    pages = -(-CONTEXT // PAGE)
    lengths = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)
    nbytes = batch * CONTEXT * 4096
    _, options = attention_options(batch, lengths, pages, device)
    caches = [KVStorage(*(torch.randn(batch * pages, PAGE, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)))
              for _ in range(replay.copies_for(nbytes, device))]
    qkv, out = torch.randn(batch, 6144, device=device).bfloat16(), torch.empty(batch, 4096, device=device, dtype=torch.bfloat16)
    samplers = {}
    for name, variant in names.items():
        variant.switch_on(folders)
        samplers[name] = replay.sampler(replay.Work(lambda i: attention.decode_attention(qkv, out, caches[i], **options),
                                                    len(caches)), device)
        samplers[name]()
    found = {name: [] for name in names}
    for _ in range(SAMPLES):
        for name in names:
            found[name].append(samplers[name]())
    for name, times in found.items():
        us = statistics.median(times)
        emit({"bench": "attention", "variant": name, "batch": batch, "context": CONTEXT, "us": us, "gb_s": nbytes / us / 1e3})


def time_steps(decoder, scheme, batch, folders, emit):
    caches, rows = make_caches(decoder, batch), make_rows(decoder, batch)
    graphs, logits = {}, {}
    for name, variant in wanted_variants(scheme).items():
        variant.switch_on(folders)
        forget_calls(decoder)
        one = graphs_of(decoder, caches, rows, batch)
        one.capture(batch, None)
        one.activations.logits.fill_(float("nan"))
        graphs[name], logits[name] = one, one.logits(batch).clone()
        shape = gemm.shape_for(decoder.blocks[0].qkv.single.weight.kind, 6144, 4096, decoder.blocks[0].qkv.single.weight.group,
                               batch, 132)
        graphs[name].ring = (shape.stages, shape.shared)
    assert logits["main"].isfinite().all()
    found = {name: [] for name in graphs}
    for turn in range(SAMPLES + 1):
        for name, one in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            one.logits(batch)  # so that the first timed step has this variant's own before it
            begin.record()
            for _ in range(REPLAYS):
                one.logits(batch)
            end.record()
            end.synchronize()
            if turn:
                found[name].append(1e3 * begin.elapsed_time(end) / REPLAYS)
    parts = record(graphs, batch)
    for name, times in found.items():
        emit({"bench": "step", "model": MODEL, "scheme": scheme, "batch": batch, "context": CONTEXT, "variant": name,
              "us": statistics.median(times), "us_p10": sorted(times)[len(times) // 10], "same": torch.equal(logits[name], logits["main"]),
              "ring": graphs[name].ring, **parts[name]})


def record(graphs, batch):
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for one in graphs.values():
            for _ in range(RECORDED):
                one.logits(batch)
        torch.cuda.synchronize()
    kernels = [Kernel(event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
               if event.device_type == torch.autograd.DeviceType.CUDA]
    steps, found = split_steps(kernels), {}
    for i, name in enumerate(graphs):
        mine = [parts_of(step) for step in steps[i * RECORDED + 1 : (i + 1) * RECORDED - 1]]
        found[name] = {f"part {part}": statistics.median(one[part][0] for one in mine) for part in PARTS if mine}
    return found


def main():
    out, dry = Path(sys.argv[1]), "--dry" in sys.argv
    out.mkdir(parents=True, exist_ok=True)
    folders = Folders()
    if dry:
        return rehearse(folders)
    listed = json.loads((HERE / "lone-kernels.json").read_text()) if (HERE / "lone-kernels.json").exists() else []
    compile_all([(str(folders(VARIANTS[name].changes)), file, defines, registers) for name, file, defines, registers in listed])
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.manual_seed(0)

    def emit(row):
        with open(out / "lone.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        text = {key: round(value, 1) if isinstance(value, float) and value > 1 else value for key, value in row.items() if key != "bench"}
        print(f"{time.monotonic() - BEGIN:5.1f} s", row["bench"], *(f"{key}={value}" for key, value in text.items()), flush=True)

    with torch.inference_mode():
        for name in ("main", "idle", "all", "own", "lines", "noalloc"):
            VARIANTS[name].switch_on(folders)
            for batch in BATCHES:
                emit({"bench": "check", "what": "attention", "variant": name, "batch": batch, "error": check_attention(batch, device)})
        for scheme in SCHEMES:
            for batch in BATCHES:
                VARIANTS["idle"].switch_on(folders)
                emit({"bench": "check", "what": "qkv", "scheme": scheme, "batch": batch, "error": check_qkv(scheme, batch, device)})
        VARIANTS["idle"].switch_on(folders)
        probe(device, emit)
        alone = {name: VARIANTS[name] for name in ("main", "room", "carve", "noalloc")} | {"large L1": Variant(early=False, carve=25)}
        for batch in BATCHES:
            time_alone(batch, alone, folders, device, emit)
        slowest = 0.0
        for scheme in SCHEMES:
            if time.monotonic() - BEGIN + slowest > DEADLINE:
                print("no time left for", scheme)
                break
            begin, decoder = time.monotonic(), load_decoder(scheme)
            for batch in BATCHES:
                if time.monotonic() - BEGIN > DEADLINE - 4:
                    print("no time left for", scheme, batch)
                    continue
                time_steps(decoder, scheme, batch, folders, emit)
            slowest = max(slowest, time.monotonic() - begin)
            del decoder
            torch.cuda.empty_cache()


def rehearse(folders):
    """What each variant asks for, into lone-kernels.json and the cache."""
    from flyweight.kernels.dry_run import dry_run
    jobs = []
    with dry_run(gpu.GPUS["sm_90a"]):
        for scheme in SCHEMES:
            decoder = load_decoder(scheme, layers=[0])
            for batch in BATCHES:
                caches, rows = make_caches(decoder, batch), make_rows(decoder, batch)
                for name, variant in wanted_variants(scheme).items():
                    variant.switch_on(folders)
                    forget_calls(decoder)
                    jit.wanted.clear()
                    graphs_of(decoder, caches, rows, batch).step(batch).launch()
                    weight = decoder.blocks[0].qkv.single.weight
                    shape = gemm.shape_for(weight.kind, 6144, 4096, weight.group, batch, 132)
                    print(scheme, batch, name, "stages", shape.stages, "shared", shape.shared, "ctas",
                          decoder.blocks[0].qkv.single.lone_ctas(batch, decoder.device))
                    jobs += [(name, one.file, one.defines, one.registers) for one in jit.wanted]
                VARIANTS["idle"].switch_on(folders)  # and the checks
                jit.wanted.clear()
                from flyweight.models.presets import SCHEMES as MAKE
                tensor = MAKE[scheme]((6144, 4096), 3, "cpu", dtype=torch.bfloat16)
                tensor = tensor.map(lambda one: torch.empty(one.shape, dtype=one.dtype, device="cuda:0"))
                linear = cuda_linear.CudaLinear(tensor, dtype=torch.bfloat16)
                linear.fused(torch.empty(batch, 4096, dtype=torch.bfloat16, device="cuda:0"))
                jobs += [("idle", one.file, one.defines, one.registers) for one in jit.wanted]
        for batch in BATCHES:
            for name in ("main", "idle", "own", "lines", "noalloc"):
                VARIANTS[name].switch_on(folders)
                jit.wanted.clear()
                lengths = torch.zeros(batch, dtype=torch.int32, device="cuda:0")
                _, options = attention_options(batch, lengths, 18, torch.device("cuda", 0))
                cache = KVStorage(*(torch.empty(batch * 18, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)))
                attention.decode_attention(torch.empty(batch, 6144, dtype=torch.bfloat16, device="cuda:0"),
                                           torch.empty(batch, 4096, dtype=torch.bfloat16, device="cuda:0"), cache, **options)
                jobs += [(name, one.file, one.defines, one.registers) for one in jit.wanted]
    jobs.append(("idle", "probe.cu", (("FP16", 0),), None))
    once = {json.dumps((str(folders(VARIANTS[job[0]].changes)), *job[1:])): job for job in jobs}
    (HERE / "lone-kernels.json").write_text(json.dumps(list(once.values())))
    compile_all([(str(folders(VARIANTS[job[0]].changes)), *job[1:]) for job in once.values()])


if __name__ == "__main__":
    main()
