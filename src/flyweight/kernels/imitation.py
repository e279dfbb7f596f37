"""Another GPU's code on the GPU that is here (`gpu.imitate`, FLYWEIGHT_PRETEND=sm_80).

Kernels are compiled to PTX of the other GPU's virtual architecture, which has none of the later
instructions, and the driver translates it for the GPU that is here. A launch that the other GPU
would refuse is refused, and all launches are noted, so that a test can look at them. What the other
GPU would be slower or faster at, an imitation cannot show.

Triton is told the other architecture (TRITON_OVERRIDE_ARCH): its passes use no later instruction,
though its last one, the assembler, writes code for the GPU that is here. torch and cuBLAS are not
told anything and run their own kernels for the GPU that is here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyweight import gpu
from flyweight.errors import FlyweightError
from flyweight.gpu import Gpu

MOST_THREADS = 1024  # of a block, on every GPU
REGISTERS = 65536  # of an SM, on every GPU from Ampere on
RESERVED_SHARED = 1024  # bytes of an SM that the driver takes for each block


class ImitationError(FlyweightError):
    """A launch that the imitated GPU would refuse."""


@dataclass(frozen=True)
class Launched:
    """What a kernel asked for. `shared` and `registers` include what its code has of itself."""

    name: str
    blocks: int
    threads: int
    shared: int
    cluster: int
    registers: int

    def refused_by(self, device: Gpu) -> str | None:
        """None, or why such a GPU does not launch it."""
        limits = (
            ("threads", self.threads, MOST_THREADS),
            ("bytes of shared memory", self.shared, device.shared_most),
            ("registers", self.registers * self.threads, REGISTERS),
            ("blocks in a cluster", self.cluster, 8 if device.major >= 9 else 1),
        )
        for what, asked, most in limits:
            if asked > most:
                return f"{self.name} asks for {asked} {what} where a block may have {most}"
        return None

    def resident(self, device: Gpu) -> int:
        """How many of its blocks such a GPU runs at once."""
        each = min(
            device.resident_threads // self.threads,
            device.shared_memory_per_multiprocessor // (self.shared + RESERVED_SHARED),
            REGISTERS // max(1, -(-self.registers // 8) * 8 * self.threads),  # given out by eights
        )
        return each * device.processors


launches: set[Launched] = set()  # all kinds of launches that were made


def compile_ptx(source: str, flags: Sequence[str], arch: str, registers: int | None) -> bytes:
    """Through NVRTC itself: `cuda.core` asks for a driver here. `registers` are left to the driver,
    which assigns them (`load`).
    """
    from cuda.bindings import nvrtc

    program = nvrtc.nvrtcCreateProgram(source.encode(), b"default_program", 0, [], [])[1]

    def checked(found: tuple[Any, ...]) -> Any:
        if int(found[0]):
            log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{found[0]}\n{log.rstrip(bytes(1)).decode(errors='replace')}")
        return found[1] if len(found) > 1 else None

    options = ["-std=c++17", f"-arch={arch}", *(f"-D{flag}" for flag in flags)]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options]))
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0")


@functools.cache
def facts(kernel: int, device: int) -> tuple[int, int]:
    """Bytes of shared memory that a kernel's code declares, and registers a thread."""
    from cuda.bindings import driver

    names = driver.CUfunction_attribute
    wanted = (names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, names.CU_FUNC_ATTRIBUTE_NUM_REGS)
    found = [
        driver.cuKernelGetAttribute(one, driver.CUkernel(kernel), driver.CUdevice(device))
        for one in wanted
    ]
    return int(found[0][1]), int(found[1][1])


def note(
    name: str,
    kernel: int,
    device: int,
    grid: Sequence[int],
    threads: int,
    shared: int,
    cluster: int,
) -> None:
    """Note a launch, or raise where the imitated GPU would refuse it."""
    declared, registers = facts(kernel, device)
    launched = Launched(name, math.prod(grid), threads, shared + declared, cluster, registers)
    reason = launched.refused_by(gpu.of(device))
    if reason is not None:
        raise ImitationError(reason)
    launches.add(launched)


def tell_triton() -> None:
    """Triton refuses kernels that need more shared memory than the imitated GPU has."""
    if gpu.imitated() is None:
        return
    from triton.compiler import compiler

    real = compiler.max_shared_mem
    compiler.max_shared_mem = lambda device: min(real(device), gpu.of(device).shared_most)
