"""CUDA source → running kernel, through NVRTC and `cuda.core`: no nvcc, no host compiler, no wheel to break.

A `.cu` file of this package is compiled once for a set of `#define`s (shapes are compile-time constants) and one
architecture; the cubin is kept on disk under a hash of all of that and the compiler's version. Files are written
beside and renamed, so several processes can share the folder. Sources include no headers, so none are searched for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flyweight.errors import FlyweightError, MissingPackageError

SOURCES = Path(__file__).parent / "cuda"


class KernelError(FlyweightError):
    """A kernel source did not compile; the message holds the compiler's log."""


def _cuda_core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise MissingPackageError("CUDA kernels need cuda-core: pip install 'cuda-core>=1.2'") from error
    return cuda.core


def cache_folder() -> Path:
    root = os.environ.get("FLYWEIGHT_CACHE") or Path.home() / ".cache" / "flyweight"
    return Path(root) / "kernels"


@functools.cache
def architecture(device: int = 0) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _source(file: str) -> str:
    """The file with this package's own `#include "x.cuh"` lines replaced by their text."""
    lines = []
    for line in (SOURCES / file).read_text().splitlines():
        if line.startswith('#include "'):
            line = _source(line.split('"')[1])
        lines.append(line)
    return "\n".join(lines)


def compile_cubin(file: str, defines: Mapping[str, object], arch: str) -> bytes:
    """Compile with NVRTC, or take the cubin from the cache. Needs no GPU."""
    core = _cuda_core()
    from cuda.bindings import nvrtc

    flags = [f"{name}={value}" for name, value in sorted(defines.items())]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256("\0".join([_source(file), *flags, arch, str(version)]).encode()).hexdigest()[:32]
    path = cache_folder() / f"{Path(file).stem}-{arch}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    options = core.ProgramOptions(std="c++17", arch=arch, define_macro=[tuple(f.split("=", 1)) for f in flags] or None)
    try:
        cubin = bytes(core.Program(_source(file), code_type="c++", options=options).compile("cubin").code)
    except Exception as error:
        raise KernelError(f"{file} does not compile for {arch} with {' '.join(flags)}:\n{error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file_beside:
        file_beside.write(cubin)
    os.replace(file_beside.name, path)
    return cubin


class _TorchStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


_STREAM = _TorchStream()


@functools.cache
def _launch_config(grid: tuple[int, ...], block: int, shared: int, pdl: bool, cluster: int | None) -> Any:
    options: dict[str, Any] = dict(grid=grid, block=(block,), shmem_size=shared, programmatic_stream_serialization=pdl)
    if cluster:
        options |= dict(cluster=(cluster, 1, 1), grid=(grid[0] // cluster, *grid[1:]))  # cuda.core counts clusters
    return _cuda_core().LaunchConfig(**options)


class Kernel:
    """One compiled function. Arguments: tensors (their pointer), None (null), int (32 bit), float (32 bit)."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name, self._shared = handle, name, 48 * 1024

    def _allow_shared(self, size: int) -> None:
        """More than 48 KB of dynamic shared memory must be asked for once."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(torch.cuda.current_device())
        (status,) = driver.cuKernelSetAttribute(attribute, size, driver.CUkernel(int(self.handle.handle)), device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"{self.name} asks for {size} bytes of shared memory: {status}")
        self._shared = size

    def launch(self, grid: int | Sequence[int], block: int, args: Sequence[Any], *, shared: int = 0, pdl: bool = False,
               cluster: int | None = None) -> None:
        """Launch on torch's current stream (and so inside a graph that torch captures)."""
        if shared > self._shared:
            self._allow_shared(shared)
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        config = _launch_config(grid, block, shared, pdl, cluster)
        _cuda_core().launch(_STREAM, config, self.handle, *map(_argument, args))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value)


class Module:
    def __init__(self, cubin: bytes) -> None:
        self._code = _cuda_core().ObjectCode.from_cubin(cubin)

    @functools.cache  # noqa: B019 (modules live as long as the process)
    def kernel(self, name: str) -> Kernel:
        return Kernel(self._code.get_kernel(name), name)


@functools.cache
def _load(file: str, flags: tuple[tuple[str, object], ...], arch: str) -> Module:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context current before the module is loaded into it
    return Module(compile_cubin(file, dict(flags), arch))


def load(file: str, *, defines: Mapping[str, object] | None = None) -> Module:
    """The module of a source file under these defines for the current GPU; compiled or read from disk once."""
    return _load(file, tuple(sorted((defines or {}).items())), architecture(torch.cuda.current_device()))
