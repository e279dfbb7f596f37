"""`jit.load` for tensors on a CPU: the .cu files, compiled for the host with host_cuda.cuh in place
of common.cuh.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch

from flyweight import gpu
from flyweight.kernels import compiler, jit
from flyweight.kernels.attention import prefill, rope
from flyweight.kernels.vptq import decode

HERE = Path(__file__).parent
INSTEAD = {
    "common.cuh": "host_cuda.cuh",
    "wgmma.cuh": "host_wgmma.cuh",
    "cluster.cuh": "host_cluster.cuh",
}
# Hopper, with as many processors as a launch has CTAs for a whole GPU
HOST = gpu.Gpu(9, 0, 5, 232448, 233472)
# of machines that convert halves
OWN_FLAGS = {"x86_64": ["-mf16c", "-mfma"], "aarch64": ["-fsigned-char"]}
COMPILER = shutil.which("g++") if platform.machine() in OWN_FLAGS else None
FLAGS = [
    *OWN_FLAGS.get(platform.machine(), ()),
    "-std=c++17",
    "-Og",
    "-w",
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-fno-gnu-unique",
    "-fvisibility=hidden",  # torch has functions of the same names
]
# The C++ library of this process is found when a kernel is loaded: the linker would read all of it,
# for each kernel anew.
LINK = ["-shared", "-nodefaultlibs", "-lgcc"]
LIBRARY = "libstdc++.so.6"
# Every address is checked in the kernels whose shared memory is a struct of mixed words; elsewhere
# it costs a quarter of the time.
ALIGNED = {"attention.cu", "qkv_attention.cu", "rope.cu", "sample.cu", "delta.cu"}


def source(file: str) -> str:
    """With everything it includes written out."""
    path = HERE / INSTEAD[file] if file in INSTEAD else compiler.SOURCES / file
    lines = path.read_text().splitlines()
    return "\n".join(
        source(line.split('"')[1]) if line.startswith('#include "') else line for line in lines
    )


class Kernel:
    def __init__(self, path: Path, name: str):
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        self.run = ctypes.CDLL(str(path.with_suffix(".so")))[f"run_{name}"]
        self.source = path.with_suffix(".cpp")

    def launch(self, grid, block, args, *, shared=0, pdl=False, cluster=None):
        assert shared <= 227 * 1024
        values = [
            ctypes.create_string_buffer(a, len(a))
            if isinstance(a, bytes)
            else ctypes.c_void_p(0)
            if a is None
            else ctypes.c_float(a)
            if isinstance(a, float)
            else ctypes.c_int(a)
            if isinstance(a, int)
            else ctypes.c_void_p(a.data_ptr())
            for a in args
        ]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        x, y = (grid, 1) if isinstance(grid, int) else grid
        if line := self.run(x, y, block, places):
            raise AssertionError(
                f"misaligned address: {self.source.read_text().splitlines()[line - 1].strip()}"
            )


def tensor_map(tensor: torch.Tensor, box) -> bytes:
    """The struct of host_wgmma.cuh."""
    assert tensor.stride(2) == 1 and box[2] == 64 and max(box) <= 256, "as the driver asks for it"
    strides = 2 * tensor.stride(1), 2 * tensor.stride(0)
    assert tensor.data_ptr() % 16 == strides[0] % 16 == strides[1] % 16 == 0
    return struct.pack(
        "16Q", tensor.data_ptr(), *reversed(tensor.shape), *strides, *reversed(box), *[0] * 7
    )


class Host:
    """Compiles into `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, file, *, defines=None, registers=None):
        flags = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
        return SimpleNamespace(kernel=lambda name: self.kernel(file, flags, name))

    def kernel(self, file: str, flags: list[str], name: str) -> Kernel:
        entry = (
            f'\nextern "C" __attribute__((visibility("default"))) int run_{name}'
            "(int x, int y, int block, void** args) {"
            f"\n  return run_grid([](void** own) {{ call_with({name}, own); }}, x, y, block, args);"
            "\n}\n"
        )
        key = "".join([str(compiler.SOURCES / file), name, *flags])
        path = self.folder / hashlib.sha256(key.encode()).hexdigest()[:20]
        if not path.with_suffix(".so").exists():
            path.with_suffix(".cpp").write_text(source(file) + entry)
            checks = ["-fsanitize=alignment"] if file in ALIGNED else []
            made = path.with_suffix(".so")
            self.compile(
                made,
                [
                    *checks,
                    "-include",
                    self.headers(checks),
                    *flags,
                    path.with_suffix(".cpp"),
                    self.grid(),
                    *LINK,
                ],
            )
        return Kernel(path, name)

    def headers(self, checks: list[str]) -> Path:
        """What all kernels read, read once: the library's headers, and how a grid runs."""
        path = self.folder / f"library{len(checks)}.hpp"
        made = path.with_suffix(".hpp.gch")
        if not made.exists():
            lines = [
                line
                for file in INSTEAD.values()
                for line in (HERE / file).read_text().splitlines()
                if line.startswith("#include <")
            ]
            path.write_text("\n".join([*lines, (HERE / "host_grid.hpp").read_text()]))
            self.compile(made, [*checks, "-x", "c++-header", path])
        return path

    def grid(self) -> Path:
        """What runs a grid of any kernel."""
        made = self.folder / "grid.o"
        if not made.exists():
            self.compile(made, ["-c", HERE / "host_grid.cpp"])
        return made

    def compile(self, made: Path, arguments: list) -> None:
        """Written beside and renamed: another worker may make the same one."""
        own = made.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *FLAGS, *arguments, "-o", own], check=True)
        own.replace(made)


def pretend(monkeypatch, folder: Path) -> None:
    """From here on kernels run on the CPU, as on a Hopper GPU with few processors."""
    monkeypatch.setattr(jit, "load", Host(folder).load)
    monkeypatch.setattr(prefill, "tensor_map", tensor_map)
    monkeypatch.setattr(gpu, "of", lambda device: HOST)
    for module in (prefill, rope, decode):  # which keep their kernels
        monkeypatch.setattr(module, "_kernel", module._kernel.__wrapped__)
