"""CUDA source → cubin, through NVRTC and `cuda.core`: no nvcc, no host compiler, no wheel to break.

A `.cu` file of this package is compiled once for a set of `#define`s (shapes are compile-time
constants) and one architecture; the cubin is kept on disk under a hash of all of that and the
compiler's version. Files are written beside and renamed, so several processes can share the folder.
Sources include no headers, so none are searched for. Where another GPU is imitated
(`imitation.py`), PTX of its virtual architecture takes the place of cubins.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyweight.errors import FlyweightError, MissingPackageError
from flyweight.kernels import imitation
from flyweight.saving import reason, replacing

SOURCES = Path(__file__).parent / "cuda"


class KernelError(FlyweightError):
    """A kernel was not compiled, loaded or launched; the message says what the compiler or the
    driver said.
    """


def cuda_core() -> Any:
    """The package, or what to install."""
    try:
        import cuda.core
    except ImportError as error:
        raise MissingPackageError(
            "CUDA kernels need cuda-core: pip install 'cuda-core>=1.2'"
        ) from error
    return cuda.core


def cache_folder() -> Path:
    root = os.environ.get("FLYWEIGHT_CACHE") or Path.home() / ".cache" / "flyweight"
    return Path(root) / "kernels"


@functools.cache
def source_of(file: str) -> str:
    """The file with this package's own `#include "x.cuh"` lines replaced by their text."""
    lines = []
    for line in (SOURCES / file).read_text(encoding="utf-8").splitlines():
        if line.startswith('#include "'):
            line = source_of(line.split('"')[1])
        lines.append(line)
    return "\n".join(lines)


def _flags(defines: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(defines.items())]


def cubin_path(
    file: str, defines: Mapping[str, object], arch: str, registers: int | None = None
) -> Path:
    """Where the cache has it, or will."""
    cuda_core()
    from cuda.bindings import nvrtc

    parts = [source_of(file), *_flags(defines), arch, str(nvrtc.nvrtcVersion()[1:]), str(registers)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    ending = "ptx" if is_virtual(arch) else "cubin"
    return cache_folder() / f"{Path(file).stem}-{arch}-{key}.{ending}"


_compilations = 0


def compilations() -> int:
    """How many this process has begun."""
    return _compilations


def is_virtual(arch: str) -> bool:
    """Whether code for it is PTX, which the driver translates."""
    return arch.startswith("compute_")


def compile_cubin(
    file: str, defines: Mapping[str, object], arch: str, registers: int | None = None
) -> bytes:
    """Compile with NVRTC, or take the cubin from the cache. Needs no GPU. `registers`: at most so
    many a thread. For a virtual architecture (`compute_80`) it is PTX.
    """
    flags = _flags(defines)
    path = cubin_path(file, defines, arch, registers)
    if path.exists():
        return path.read_bytes()
    global _compilations
    _compilations += 1
    translate = imitation.compile_ptx if is_virtual(arch) else _to_cubin
    try:
        cubin = translate(source_of(file), flags, arch, registers)
    except Exception as error:
        raise KernelError(
            f"{file} does not compile for {arch} with {' '.join(flags)}:\n{error}"
        ) from error
    keep(path, cubin)
    return cubin


def keep(path: Path, cubin: bytes) -> None:
    """In the cache, where it can be written; else the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as half:
            half.write_bytes(cubin)
    except OSError as error:
        if path.parent not in _unkept:
            _unkept.add(path.parent)
            warnings.warn(not_kept(path.parent, reason(error, path, len(cubin))))


_unkept: set[Path] = set()  # folders of which that was told


def not_kept(folder: Path, why: str, *, setting: str = "FLYWEIGHT_CACHE") -> str:
    return (
        f"{folder}: compiled kernels cannot be kept there ({why}), so the next run compiles "
        f"them again; make room, or set {setting} to another folder"
    )


def _to_cubin(source: str, flags: Sequence[str], arch: str, registers: int | None) -> bytes:
    core = cuda_core()
    options = core.ProgramOptions(
        std="c++17",
        arch=arch,
        max_register_count=registers,
        define_macro=[tuple(f.split("=", 1)) for f in flags] or None,
    )
    return bytes(core.Program(source, code_type="c++", options=options).compile("cubin").code)
