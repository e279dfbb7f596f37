"""Which C compiler there is, and which instructions it may use here.

The system's compiler comes first, then the one that pip can bring (`ziglang`, which is clang).
Flags name what the processor has instead of saying "native": both compilers understand them, and
code for another processor can be made and run under an emulator.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PR_SVE_GET_VL = 51  # linux/prctl.h: bytes of a vector, and flags above them

COMMON = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-pthread")

# Not Linux's word: SVE whose vectors have 256 bits. Of 128 they are as wide as NEON's, which needs
# no second set of kernels.
WIDE_SVE = "sve 256"

# What each processor is told, by the features that it must have.
ARM = (
    (
        {"asimddp", "asimdhp", "i8mm", "sve", WIDE_SVE},
        "-march=armv8.2-a+dotprod+fp16+i8mm+sve -msve-vector-bits=256",
    ),
    ({"asimddp", "asimdhp", "i8mm"}, "-march=armv8.2-a+dotprod+fp16+i8mm"),
    ({"asimddp", "asimdhp"}, "-march=armv8.2-a+dotprod+fp16"),
)
X86 = (
    (
        {"avx2", "fma", "f16c", "avx512vl", "avx512bw", "avx512_vnni"},
        "-mavx2 -mfma -mf16c -mavx512vl -mavx512bw -mavx512vnni",
    ),
    ({"avx2", "fma", "f16c", "avx_vnni"}, "-mavx2 -mfma -mf16c -mavxvnni"),
    ({"avx2", "fma", "f16c"}, "-mavx2 -mfma -mf16c"),
)
ZIG = {
    "-march=armv8.2-a+dotprod+fp16": "-mcpu=generic+v8_2a+dotprod+fullfp16",
    "-march=armv8.2-a+dotprod+fp16+i8mm": "-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm",
    "-march=armv8.2-a+dotprod+fp16+i8mm+sve": "-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm+sve",
}


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command or Path(self.command[0]).name == "zig"


@functools.cache
def find_compiler() -> Compiler | None:
    """The one of the environment's CC, else the first that answers."""
    candidates = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    candidates += [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if importlib.util.find_spec("ziglang"):
        candidates.append([sys.executable, "-m", "ziglang", "cc"])
    for command in candidates:
        if version := _version(command):
            return Compiler(tuple(command), version)
    return None


def _version(command: list[str]) -> str | None:
    try:
        answer = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.splitlines()
    return lines[0] if answer.returncode == 0 and lines else None


@functools.cache
def cpu_features() -> frozenset[str]:
    """As Linux names them; on a Mac with an ARM processor, what all of those have."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimddp", "asimdhp"})
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(value.split())
            return frozenset(found | {WIDE_SVE} if sve_bits(found) == 256 else found)
    return frozenset()


def sve_bits(features: Collection[str]) -> int:
    """How long this thread's SVE vectors are; 0 without SVE."""
    if "sve" not in features:
        return 0
    answer = ctypes.CDLL(None).prctl(PR_SVE_GET_VL, 0, 0, 0, 0)
    return 0 if answer < 0 else 8 * (answer & 0xFFFF)


def processor_flags(machine: str, features: frozenset[str], *, zig: bool = False) -> list[str]:
    """For the widest instructions that are all there; none for plain C. zig spells some of them
    otherwise.
    """
    table = {"aarch64": ARM, "arm64": ARM, "x86_64": X86, "AMD64": X86}.get(machine, ())
    for needed, flags in table:
        if needed <= features:
            return [ZIG.get(flag, flag) if zig else flag for flag in flags.split()]
    return []
