"""What `flyweight doctor` finds out: the machine, its kernels, their speed and their exactness.

Everything is a plain dictionary, so that the same findings are a screen, a JSON object and the
contents of a bug report. A check has a name, whether it held, and one line that says what was found
and, where it did not hold, what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flyweight import gpu, gpu_share
from flyweight.bench import replay
from flyweight.bench.environment import commit, gpu_facts, nvidia, versions
from flyweight.bench.kernels import FORMATS, Case, chosen, copied, reference, relative_error
from flyweight.bench.timing import percentile
from flyweight.cpu import usable_cores
from flyweight.device import unsupported_gpu
from flyweight.errors import FlyweightError
from flyweight.kernels import compiler, dispatch, tuned
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.machine import copy_bandwidth, cpu_name, device_name
from flyweight.plugins.sglang.state import state as sglang_state
from flyweight.plugins.vllm.state import state as vllm_state

ROWS = (1, 8, 64, 2048)
RAGGED = (1000, 576)  # outputs, inputs: multiples of no tile
RAGGED_ROWS = (1, 3, 9, 33, 130)
LARGEST_ERROR = 1e-2  # of a product in 16 bits, against float64
TABLE_SHAPE = {"cuda": (4096, 4096), "cpu": (512, 512)}
SPEED_SHAPE = {"cuda": (12288, 4096), "cpu": (4096, 2048)}
SPEED_FORMATS = {"int4": "w4a16", "bf16": "bf16"}
LEAST_DISK = 1 << 30  # bytes for compiled kernels
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


def examine(
    device: torch.device, *, listen: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """All findings about a device; `listen` is told each stage before it begins."""
    found: dict[str, Any] = {"software": software(), "hardware": hardware(device)}
    checks = [*software_checks(device), disk_check()]
    if torch.cuda.is_available():
        checks.append(gpu_check(device))
    if not all(check.ok for check in checks):
        return found | ending(checks)
    for name, stage in (("kernels", kernel_table), ("numerics", numerics), ("speed", speed)):
        listen(name)
        found[name] = stage(device)
    checks += numerics_checks(found["numerics"])
    return found | ending(checks)


def ending(checks: Iterable[Check]) -> dict[str, Any]:
    listed = [vars(check) for check in checks]
    return {
        "cache": cache_state(),
        "checks": listed,
        "ok": all(check["ok"] for check in listed),
    }


# -- what is there -------------------------------------------------------------------------


def software() -> dict[str, Any]:
    packages = versions()
    return {
        "flyweight": packages.pop("flyweight", None),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": packages | _version_of("cuda-bindings"),
        "triton": dispatch.unsupported_by_triton() or "works",
        "native": native_state(),
        "vllm_plugin": vllm_state().text,
        "sglang_plugin": sglang_state().text,
    }


def _version_of(name: str) -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def native_state() -> str:
    """Of the kernels in C for the CPU (`--native`), with the instructions that they use."""
    from flyweight.kernels.native import library

    return library.why_not() or f"works ({library.load().instructions().decode()})"


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": str(device),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gb": host_memory_gb(),
    }
    if device.type != "cuda":
        return found | {"name": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}
    index = device.index or 0
    free, total = torch.cuda.mem_get_info(device)
    facts = gpu.of(index)
    return found | {
        "name": device_name(device),
        "architecture": facts.architecture,
        "processors": facts.processors,
        "shared_memory_kb": facts.shared_most // 1024,
        "gpu_memory_gb": round(total / 1e9, 1),
        "gpu_memory_free_gb": round(free / 1e9, 1),
        "imitates": None if gpu.imitated() is None else os.environ.get(gpu.PRETEND, "another GPU"),
        "mps": gpu_share.of(index).mps,
        "mig": mig_state(),
        "tuned": tuned_state(facts),
        **gpu_facts(),
    }


def host_memory_gb() -> float | None:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return None
    return round(size / 1e9, 1)


def mig_state() -> str:
    found = nvidia("mig.mode.current")
    return "unknown" if not found or found.startswith("[") else found.lower()


def tuned_state(facts: gpu.Gpu) -> str:
    name = tuned.of(facts).name
    if tuned.is_measured(facts):
        return f"measured on such a GPU ({name})"
    return f"borrowed from the {name}; `flyweight doctor --tune` measures this GPU's own"


def cache_state() -> dict[str, Any]:
    folder = compiler.cache_folder()
    files = [path for path in folder.glob("*") if path.is_file()] if folder.exists() else []
    return {
        "folder": str(folder.parent),
        "kernels": len(files),
        "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 1),
        "free_gb": round(_free_bytes() / 1e9, 1),
        "tuned": [str(path.name) for path in tuned.local_files()],
    }


def _free_bytes() -> int:
    """Where the cache is, or will be."""
    folder = compiler.cache_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# -- checks --------------------------------------------------------------------------------


def software_checks(device: torch.device) -> list[Check]:
    if device.type != "cuda":
        return []
    return [compiler_check()]


def compiler_check() -> Check:
    try:
        compiler.compile_cubin("token.cu", dict(FP16=0, WIDTH=1000, THREADS=256), "sm_80")
    except FlyweightError as error:
        return Check("NVRTC", False, str(error).split("\n")[0])
    return Check("NVRTC", True, "compiles kernels")


def gpu_check(device: torch.device) -> Check:
    reason = unsupported_gpu(device.index or 0)
    return Check("GPU", reason is None, reason or "Ampere or later")


def disk_check() -> Check:
    free = _free_bytes()
    text = f"{free / 1e9:.1f} GB free for compiled kernels"
    if free < LEAST_DISK:
        return Check("disk", False, f"{text}: make room, or set FLYWEIGHT_CACHE to another disk")
    return Check("disk", True, text)


def numerics_checks(found: dict[str, Any]) -> list[Check]:
    checks = []
    for name, one in found.items():
        error = one["largest_error"]
        ok = error is not None and error < LARGEST_ERROR
        detail = (
            f"{error:.1e} from float64"
            if ok
            else f"{one.get('reason') or f'{error:.1e} from float64'}: please report this"
        )
        checks.append(Check(f"numerics of {name}", ok, detail))
    return checks


# -- kernels -------------------------------------------------------------------------------


def kernel_table(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Format → which kernel multiplies so many rows, and why."""
    shape = TABLE_SHAPE[device.type]
    dtype = DTYPES[device.type]
    return {name: table_row(name, shape, device, dtype) for name in FORMATS}


def table_row(
    name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    return choices(dispatch.prepare(make(name, shape, device, dtype), dtype=dtype))


def choices(linear: FusedLinear) -> list[dict[str, Any]]:
    found = [(rows, chosen(linear, rows)) for rows in ROWS]
    return [{"rows": rows, "kernel": one.kernel, "why": one.why} for rows, one in found]


def planned_table(one: gpu.Gpu) -> dict[str, list[dict[str, Any]]]:
    """The same for a GPU that is not there. For a process of its own: it goes on pretending."""
    from flyweight.kernels.dry_run import DEVICE, dry_run

    with dry_run(one):
        return {
            name: planned_row(name, TABLE_SHAPE["cuda"], DEVICE, DTYPES["cuda"]) for name in FORMATS
        }


def planned_row(
    name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    tensor = make(name, shape, torch.device("cpu"), dtype).to(device)
    return choices(dispatch.prepare(tensor, dtype=dtype))


def make(name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Any:
    outputs, inputs = shape
    case = Case(name, 1, inputs, outputs, dtype, group_size=64 if inputs % 128 else 128)
    return FORMATS[name](case, shape, device)


def numerics(device: torch.device) -> dict[str, Any]:
    """Format → the largest relative error over ragged products of several sizes."""
    found = {name: numerics_of(name, device, dispatched) for name in FORMATS}
    if device.type == "cpu" and native_state().startswith("works"):
        found |= {f"{name}, native": numerics_of(name, device, native) for name in FORMATS}
    return found


def dispatched(tensor: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return dispatch.prepare(tensor, dtype=dtype)


def native(tensor: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """In C (`--native`); exact, since x in 8 bits is another product."""
    from flyweight.kernels.native.linear import NativeLinear

    return NativeLinear(tensor, exact=True)


def numerics_of(name: str, device: torch.device, prepare: Callable[..., Any]) -> dict[str, Any]:
    dtype = DTYPES[device.type]
    torch.manual_seed(0)
    try:
        tensor = make(name, RAGGED, device, dtype)
        linear = prepare(tensor, dtype)
        errors = []
        for rows in RAGGED_ROWS:
            x = torch.randn(rows, RAGGED[1], device=device).to(dtype)
            errors.append(relative_error(linear(x), reference(tensor, x)))
    except (FlyweightError, RuntimeError, ValueError) as error:
        return {"largest_error": None, "reason": str(error).split("\n")[0][:200]}
    return {"largest_error": max(errors)}


# -- speed ---------------------------------------------------------------------------------


def speed(device: torch.device) -> dict[str, Any]:
    """Copy bandwidth, and how much of it products of one row reach."""
    bandwidth = copy_bandwidth(device)
    found: dict[str, Any] = {"copy_gb_s": round(bandwidth, 1)}
    for name, format_name in SPEED_FORMATS.items():
        rate = product_rate(format_name, device)
        found[name] = {"gb_s": round(rate, 1), "share": round(rate / bandwidth, 3)}
    return found


def product_rate(format_name: str, device: torch.device) -> float:
    """GB/s of one row through a linear of a large model, weights read from memory."""
    dtype = DTYPES[device.type]
    outputs, inputs = SPEED_SHAPE[device.type]
    tensor = make(format_name, (outputs, inputs), device, dtype)
    linear = dispatch.prepare(tensor, dtype=dtype)
    x = torch.randn(1, inputs, device=device).to(dtype)
    count = replay.copies_for(linear.nbytes, device)
    copies = [linear]
    while len(copies) < count:
        copies.append(copied(linear, lambda: dispatch.prepare(tensor, dtype=dtype)))
    work = replay.Work(lambda i: copies[i](x), count)
    times = replay.measure({"one": work}, device, samples=5)["one"]
    moved = linear.nbytes + x.nbytes + outputs * dtype.itemsize
    return moved / percentile(times, 50) / 1e3
