"""Which files the figures of a row are of: git's pathspecs, for "has this code changed since?".

A row of ours is of whole rooms, less the files that nothing of its kind runs: those of a CPU where
it was measured on a GPU, of VPTQ where no weight is of that format, of families that its model is
not of, of another GPU's measured numbers. `tests/benchmarks/test_ran.py` runs models in a dry run
and asserts that no function of a file that is left out here is called. A row of another engine is
of that engine, and of the file of ours that drives it.
"""

from __future__ import annotations

from flyweight.report.figures import of_a_peer
from flyweight.report.rows import Row

SOURCE = "src/flyweight"
KERNELS = f"{SOURCE}/kernels"
FAST = (KERNELS, f"{SOURCE}/engine", f"{SOURCE}/models")
QUANT = (f"{SOURCE}/quant",)
PACKAGES = {  # bench → the code that its figures are of
    "kernel": FAST[:1],
    "latency": FAST,
    "speed": FAST,
    "throughput": FAST,
    "profile": FAST,
    "serve": (*FAST, f"{SOURCE}/server"),
    "quality": QUANT,
    "quantize": QUANT,
    "sanitize": FAST[:1],
    "prefill": FAST,
    "agreement": FAST,
    "ablation": FAST,
    "adapters": FAST,
    "sampling": FAST,
}
# rows of ours, of a quantized folder that the engine or its kernels ran
REAL_WEIGHTS = (*FAST, *QUANT)

ENGINES = {  # begins `backend` → what of ours is between it and the clock
    "vllm-plugin": (*FAST[::2], f"{SOURCE}/plugins", f"{SOURCE}/backends/vllm.py"),
    "sglang-plugin": (*FAST[::2], f"{SOURCE}/plugins", f"{SOURCE}/backends/sglang.py"),
    "vllm": (f"{SOURCE}/backends/vllm.py",),
    "sglang": (f"{SOURCE}/backends/sglang.py", f"{SOURCE}/backends/servers.py"),
    "transformers": (f"{SOURCE}/backends/transformers.py",),
    "openai": (f"{SOURCE}/backends/openai.py",),
}
RANDOM = (f"{SOURCE}/models/random_folder.py", f"{SOURCE}/models/presets.py")  # the weights it read
OWN_TOOLS = ("flyweight", "needle", None)  # None: rows from before there were others
MEASURED_BY_OURS = (f"{SOURCE}/quant/evaluate.py", f"{SOURCE}/quant/subject.py")

ON_A_CPU = (
    f"{KERNELS}/native",
    f"{KERNELS}/cpu.py",
    f"{KERNELS}/cpu_integer.py",
    f"{SOURCE}/models/native.py",
)
OF_VPTQ = (f"{KERNELS}/vptq", f"{KERNELS}/cuda/vptq*")
OF_FAMILIES = (
    f"{SOURCE}/models/families",
    f"{KERNELS}/gated_delta",
    f"{KERNELS}/cuda/gated_delta.cu",
    f"{SOURCE}/models/delta_net.py",
    f"{SOURCE}/models/latent_step.py",
)
# models whose config is read by models/config.py alone
STANDARD = ("qwen1.5-", "qwen2-", "qwen2.5-", "qwen3-4b", "qwen3-8b", "smollm2", "trained-")
OF_OLDER_GPUS = (f"{KERNELS}/tuned/sm_80.toml",)  # it names Hopper's numbers as its base
# where Hopper's own kernel takes all shapes of a model
OF_ODD_SHAPES = (f"{KERNELS}/linear/gemm_mma.py", f"{KERNELS}/cuda/gemm_mma.cu")
EVEN = ("qwen1.5-32b", "qwen2-7b", "qwen2-72b", "qwen3-4b", "qwen3-8b")


def code_of(row: Row, device: str | None) -> tuple[str, ...]:
    """Pathspecs: folders and files that count, and `:(exclude)` of what it did not run. None at all
    where nothing of ours was measured.
    """
    paths = rooms_of(row)
    left = left_out(row, device) if any(path in REAL_WEIGHTS for path in paths) else ()
    return (*paths, *(f":(exclude){path}" for path in left))


def rooms_of(row: Row) -> tuple[str, ...]:
    if row["bench"] == "quantize":
        return QUANT if row.get("tool") in OWN_TOOLS else ()
    if row["bench"] == "kernel" and of_a_peer(row):
        return ()
    backend = str(row.get("backend") or "native").partition(" ")[0]
    engine = next((ENGINES[name] for name in ENGINES if is_of(backend, name)), None)
    if row["bench"] == "quality":
        return rooms_of_quality(row, engine)
    if engine is None:
        return PACKAGES[row["bench"]]
    is_random = str(row.get("checkpoint")).startswith("random:")
    return (*engine, *(RANDOM if is_random else ()))


def is_of(backend: str, name: str) -> bool:
    """`transformers-compiled` is of transformers; `vllm-plugin` is not of vllm alone."""
    return backend == name or (backend.startswith(f"{name}-") and backend not in ENGINES)


def rooms_of_quality(row: Row, engine: tuple[str, ...] | None) -> tuple[str, ...]:
    if row.get("tool") == "vllm":  # a folder of ours in another engine, or that engine in ours
        return (*(engine or REAL_WEIGHTS), *(() if engine is None else QUANT))
    if row.get("tool") not in OWN_TOOLS:
        return MEASURED_BY_OURS
    cached = row.get("kv_dtype") not in (None, "float32")
    return REAL_WEIGHTS if row.get("check") or cached or row.get("tool") == "needle" else QUANT


def left_out(row: Row, device: str | None) -> tuple[str, ...]:
    """Files in the rooms of a row of ours that it cannot have run."""
    left: list[str] = []
    model = str(row.get("model")).lower().removeprefix("preset:")
    if device and "NVIDIA" in device:
        left += ON_A_CPU
        if " as sm_" not in device:
            left += OF_OLDER_GPUS
            left += OF_ODD_SHAPES if model.startswith(EVEN) else ()
    words = [row.get(name) for name in ("scheme", "format", "kernel", "model", "backend", "job")]
    if not any("vptq" in str(word).lower() for word in words) and not row.get("main_centroids"):
        left += OF_VPTQ
    if model.startswith(STANDARD):
        left += OF_FAMILIES
    return tuple(left)
