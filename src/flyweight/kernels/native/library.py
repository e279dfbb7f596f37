"""The C sources as a library in this process, and its threads.

Compiled once for these sources, this compiler and these instructions; the library is kept in the
cache under a hash of all of that. It is written beside and renamed, under a lock, so that
several processes can start at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from flyweight.checkpoint.hub import cache_folder
from flyweight.errors import FlyweightError
from flyweight.kernels.compiler import not_kept
from flyweight.kernels.native.compiler import (
    COMMON,
    Compiler,
    cpu_features,
    find_compiler,
    processor_flags,
)
from flyweight.saving import is_full, reason

SOURCES = Path(__file__).parent / "source"


class NativeError(FlyweightError):
    """The native kernels cannot be used here; the message says why and what would help."""


def library_path(compiler: Compiler, flags: list[str]) -> Path:
    parts = [compiler.version, *compiler.command, *flags, platform.machine()]
    parts += [
        path.name + path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / "native" / f"kernels-{key}.so"


def build() -> Path:
    """The library for this machine, compiled unless the cache has it."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeError(
            "the CPU's native kernels need a C compiler, and there is none; install gcc or clang, "
            "or `pip install 'flyweight[cpu]'` (torch's own ops take over until then)"
        )
    flags = [*COMMON, *processor_flags(platform.machine(), cpu_features(), zig=compiler.is_zig)]
    path = library_path(compiler, flags)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                compile_library(compiler.command, flags, path)
        return path
    except (OSError, NativeError) as error:
        if isinstance(error, NativeError) and not is_full(error):
            raise  # it would not compile elsewhere either
        made = build_elsewhere(compiler.command, flags, path.name)
        if made is None:
            raise
        warnings.warn(not_kept(path.parent, reason(error, path)))
        return made


def build_elsewhere(command: tuple[str, ...], flags: list[str], name: str) -> Path | None:
    """For this process alone, where the cache has no room; None where there is none anywhere."""
    for place in (None, "/dev/shm"):  # None: the system's temporary folder
        try:
            folder = tempfile.TemporaryDirectory(prefix="flyweight-", dir=place)
        except OSError:
            continue
        atexit.register(folder.cleanup)
        with contextlib.suppress(OSError, NativeError):
            compile_library(command, flags, Path(folder.name, name))
            return Path(folder.name, name)
        folder.cleanup()
    return None


def compile_library(command: tuple[str, ...], flags: list[str], path: Path) -> None:
    """Each file by a process of its own, because optimizing the kernels takes seconds."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        jobs = [
            [*command, *flags, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        made = f"{folder}/{path.name}"
        _run([*command, *flags, "-shared", *objects, "-o", made, "-lm"])
        os.replace(made, path)


def _run(command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if answer.returncode:
        raise NativeError(
            f"the native kernels do not compile ({' '.join(command)}):\n{answer.stderr[-4000:]}"
        )


@functools.cache
def load() -> ctypes.CDLL:
    """The library; NativeError where it cannot be made."""
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        raise NativeError(
            f"the native kernels cannot be loaded ({error}); set FLYWEIGHT_CACHE to a folder that "
            "allows programs, or remove its `native` folder"
        ) from error
    pointer = ctypes.c_void_p
    signatures = {
        "team_make": (pointer, [ctypes.c_int, pointer]),
        "instructions": (ctypes.c_char_p, []),
        "half_products": (ctypes.c_int, []),
        "matrix_scratch": (ctypes.c_size_t, [pointer, ctypes.c_int]),
        "matrix_pack": (None, [pointer, pointer]),
        "matrix_multiply": (None, [pointer, pointer, pointer, pointer, ctypes.c_int, pointer]),
        "rounding_errors": (None, [pointer, pointer]),
        "rounding_largest": (None, [pointer, pointer]),
        "rounding_walk": (None, [pointer, pointer]),
        "decoder_workspace": (ctypes.c_size_t, [pointer, pointer, ctypes.c_int]),
        "decoder_step": (None, [pointer, pointer, pointer, pointer]),
        "rows_room": (ctypes.c_size_t, [ctypes.c_int]),
        "decoder_advance": (
            None,
            [pointer, pointer, pointer, pointer, ctypes.c_int, ctypes.c_int, pointer],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def loaded_name() -> str:
    """Says of which sources, compiler and instructions this process's library is."""
    return Path(load()._name).name


@functools.cache
def why_not() -> str | None:
    """None where the kernels can be used, else the reason in one line."""
    try:
        load()
    except NativeError as error:
        return str(error)
    return None


def thread_count() -> int:
    """OMP_NUM_THREADS, as everywhere; else the cores that this process may use, less where a
    container has a quota.
    """
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(given):
        return int(given)
    return max(1, min(len(allowed_cores()), cpu_quota()))


def allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 16


class _Team:
    """The threads of this process; a forked child has none of its parent's and makes its own."""

    handle: int | None = None
    process: int | None = None
    cores: ctypes.Array[ctypes.c_int32] | None = None


def team() -> int:
    """The handle of this process's threads, started when first needed."""
    if _Team.handle is None or _Team.process != os.getpid():
        start_team(thread_count())
    assert _Team.handle is not None
    return _Team.handle


def start_team(count: int) -> None:
    """So many threads from now on; those from before sleep for ever."""
    cores = allowed_cores()
    pinned = (
        count == len(cores) and count > 1
    )  # with fewer threads than cores the system knows better where to put them
    _Team.cores = (ctypes.c_int32 * count)(*cores) if pinned else None
    _Team.handle = load().team_make(count, _Team.cores)
    _Team.process = os.getpid()
    if not _Team.handle:
        raise NativeError(f"{count} threads cannot be started; set OMP_NUM_THREADS to fewer")
