"""Compiled code in the driver's hands: a library, and the handles of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flyweight.errors import FlyweightError

ELF = b"\x7fELF"


class LibraryError(FlyweightError):
    """The driver does not take compiled code."""


@dataclass(frozen=True)
class Loaded:
    """What the driver was given."""

    file: str
    target: str  # `cubin`, or the architecture that PTX was written for


loaded: list[Loaded] = []  # all of this process


def target_of(code: bytes) -> str:
    """`cubin`, or the architecture that a PTX text was written for: `sm_80`."""
    if code.startswith(ELF):
        return "cubin"
    line = next(line for line in code.split(b"\n") if line.startswith(b".target"))
    return line.split()[1].rstrip(b",").decode()


def load(file: str, code: bytes, registers: int | None) -> Any:
    """A cubin, or PTX that the driver translates with at most so many registers a thread."""
    from cuda.bindings import driver

    target = target_of(code)
    limited = registers is not None and target != "cubin"
    options = [driver.CUjit_option.CU_JIT_MAX_REGISTERS] if limited else []
    values = [registers] if limited else []
    status, library = driver.cuLibraryLoadData(
        code + b"\0", options, values, len(options), [], [], 0
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LibraryError(f"{file} ({target}) was not loaded by the driver: {status}")
    loaded.append(Loaded(file, target))
    return library


def handle(library: Any, name: str) -> int:
    from cuda.bindings import driver

    status, kernel = driver.cuLibraryGetKernel(library, name.encode())
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LibraryError(f"no kernel {name}: {status}")
    return int(kernel)
