"""Kernels by their source file: compiled for the GPU (compiler.py), loaded and launched.

A dry run notes which kernels are asked for instead, and launches nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flyweight import gpu
from flyweight.kernels import dependent_launch, imitation, library, stall, together
from flyweight.kernels.compiler import KernelError, compile_cubin, is_virtual

UNASKED_SHARED = 48 * 1024  # bytes of shared memory that every kernel may have
_overlap = contextvars.ContextVar("overlap", default=True)


@contextlib.contextmanager
def overlap(allowed: bool) -> Iterator[None]:
    """Whether launches in here may begin before the kernel in front of them has ended (`pdl`)."""
    before = _overlap.set(allowed)
    try:
        yield
    finally:
        _overlap.reset(before)


def overlap_allowed() -> bool:
    return _overlap.get()


@functools.cache
def _launch_config(
    grid: tuple[int, ...], block: int, shared: int, pdl: bool, cluster: int, stream: int
) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    attributes = []
    ids = driver.CUlaunchAttributeID
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX = block
    config.blockDimY = 1
    config.blockDimZ = 1
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(stream)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = 1
        attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class ArgumentLayout:
    """Arguments of a launch in memory: eight bytes each, as many as it has of bytes, and the
    addresses of all of them, as the driver wants them.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        """`parts`: of each argument, as `struct` names them."""
        packed = struct.Struct("=" + "".join(parts))
        self._values = ctypes.create_string_buffer(max(8, packed.size))
        first = ctypes.addressof(self._values)
        sizes = (struct.calcsize("=" + part) for part in parts)
        starts = itertools.accumulate(sizes, initial=first)
        places = itertools.islice(starts, len(parts))
        self._places = (ctypes.c_void_p * max(1, len(parts)))(*places)
        self.address = ctypes.addressof(self._places)
        self.write = functools.partial(packed.pack_into, self._values, 0)

    @classmethod
    def of(cls, args: Sequence[Any]) -> ArgumentLayout:
        return cls([cls._part(a) for a in args])

    @staticmethod
    def _part(argument: Any) -> str:
        """Its bytes as `struct` names them: numbers take four of eight, all else is a pointer."""
        if isinstance(argument, bytes):
            return f"{len(argument)}s"
        if isinstance(argument, float):
            return "f4x"
        return "i4x" if isinstance(argument, int) else "Q"


class Noted(NamedTuple):
    """A launch as the driver got it."""

    kernel: Kernel
    config: Any
    args: Sequence[Any]
    values: Sequence[Any]


class _Notes(threading.local):
    launches: list[Noted] | None = None


_notes = _Notes()


@contextlib.contextmanager
def noting() -> Iterator[list[Noted]]:
    """The launches of this thread in here, in their order."""
    before = _notes.launches
    _notes.launches = []
    try:
        yield _notes.launches
    finally:
        _notes.launches = before


class Kernel:
    """One compiled function. Arguments: tensors (their pointer), None (null), int (32 bit), float
    (32 bit), bytes (by value).

    A prefill pass launches hundreds of kernels from Python, so a launch does little: arguments are
    packed into a buffer of the kernel's own, whose layout is made at the first launch, and
    configurations are kept.
    """

    def __init__(self, handle: int, name: str) -> None:
        from cuda.bindings import driver

        self.name = name
        self._shared: dict[int, int] = {}  # bytes that each device allows a launch
        self.waits = False  # for other blocks of its launch, perhaps
        self.counts = False  # and waits for counters of other launches: cuda/dependent_launch.cuh
        self._together: set[tuple[int, int]] = set()  # launches whose blocks all run at once
        # a CUkernel may stand for a CUfunction
        self._driver = driver
        self._handle = driver.CUfunction(handle)
        self.handle = int(handle)
        self._layout: ArgumentLayout | None = None
        self._lock = threading.Lock()

    def _unasked_shared(self, device: int) -> int:
        """Bytes that a launch may have unasked: what the kernel's own variables leave of 48 KB."""
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(self._handle))
        status, own = driver.cuKernelGetAttribute(attribute, kernel, driver.CUdevice(device))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"{self.name} does not tell its shared memory: {status}")
        self._shared[device] = max(UNASKED_SHARED - own, 0)
        return self._shared[device]

    def _allow_shared(self, size: int, device: int) -> None:
        """More of it must be asked for once on each device."""
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(self._handle))
        (status,) = driver.cuKernelSetAttribute(attribute, size, kernel, driver.CUdevice(device))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"{self.name} asks for {size} bytes of shared memory: {status}")
        self._shared[device] = size

    def _check_together(self, config: Any, grid: tuple[int, ...], device: int) -> None:
        together.check(self._driver, self.name, int(self._handle), config, grid, device)
        self._together.add((id(config), device))  # configurations are kept

    def _link(
        self, stream: int, device: int, grid: tuple[int, ...], block: int, shared: int
    ) -> dependent_launch.Link | None:
        if not _overlap.get():
            return None
        launched = dependent_launch.launched(
            self.name, int(self._handle), device, grid, block, shared
        )
        return dependent_launch.link(stream, device, launched, gpu.of(device))

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int,
        args: Sequence[Any],
        *,
        shared: int = 0,
        pdl: bool = False,
        cluster: int | None = None,
    ) -> None:
        """Launch on torch's current device and stream (inside a graph that torch captures, too)."""
        device = torch._C._cuda_getDevice()
        allowed = self._shared.get(device)
        if shared > (self._unasked_shared(device) if allowed is None else allowed):
            self._allow_shared(shared, device)
        stream = torch._C._cuda_getCurrentRawStream(device)
        grids = (grid,) if isinstance(grid, int) else tuple(grid)
        overlapping = pdl and _overlap.get() and gpu.of(device).has_dependent_launch
        config = _launch_config(grids, block, shared, overlapping, cluster or 1, stream)
        if self.waits and (id(config), device) not in self._together:
            self._check_together(config, grids, device)
        link = None
        if self.counts:
            args = (*args, None, None)
            link = self._link(stream, device, grids, block, shared) if pdl else None
        values = [
            0 if a is None else a if type(a) in (int, float, bytes) else a.data_ptr() for a in args
        ]
        if link is not None:
            values[-2:] = link.arguments
        with self._lock:  # the driver takes its copy of the arguments before it returns
            layout = self._layout
            if layout is None:
                layout = self._layout = ArgumentLayout.of(args)
            layout.write(*values)
            (status,) = self._driver.cuLaunchKernelEx(config, self._handle, layout.address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            stalled = stall.explain(KernelError())
            if isinstance(stalled, stall.KernelStalled):
                raise stalled
            raise KernelError(
                f"{self.name} was not launched (grid {grid}, {block} threads, {shared} bytes of "
                f"shared memory, cluster {cluster}): {status}"
            )
        if link is not None:
            link.close()
        if _notes.launches is not None:
            _notes.launches.append(Noted(self, config, args, values))


class ImitatedKernel(Kernel):
    """Launches only what the imitated GPU would, and notes it."""

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int,
        args: Sequence[Any],
        *,
        shared: int = 0,
        pdl: bool = False,
        cluster: int | None = None,
    ) -> None:
        grids = (grid,) if isinstance(grid, int) else tuple(grid)
        device = torch._C._cuda_getDevice()
        imitation.note(self.name, int(self._handle), device, grids, block, shared, cluster or 1)
        super().launch(grid, block, args, shared=shared, pdl=pdl, cluster=cluster)


class Module:
    """A loaded cubin or, of an imitation, PTX that the driver has translated."""

    kernel_class = Kernel

    def __init__(
        self, file: str, code: bytes, registers: int | None = None, *, counts: bool = False
    ) -> None:
        self._counts = counts
        self._library = library.load(file, code, registers)
        self._waits = stall.watch(self._library, file)

    @functools.cache  # noqa: B019 (modules live as long as the process)
    def kernel(self, name: str) -> Kernel:
        found = self.kernel_class(library.handle(self._library, name), name)
        found.waits = self._waits
        found.counts = self._counts
        return found


class ImitatedModule(Module):
    kernel_class = ImitatedKernel


@functools.cache
def _load(
    file: str, flags: tuple[tuple[str, object], ...], arch: str, registers: int | None
) -> Module:
    torch.cuda.init()
    # makes torch's context current before the module is loaded into it
    torch.zeros(1, device="cuda")
    code = compile_cubin(file, dict(flags), arch, registers)
    kind = ImitatedModule if is_virtual(arch) else Module
    return kind(file, code, registers, counts=dependent_launch.DEFINE.items() <= set(flags))


def current_architecture() -> str:
    """What kernels of this process are compiled for on torch's current device."""
    index = torch.cuda.current_device()
    wanted_gpu = gpu.of(index)
    own = gpu.real(index).architecture
    if wanted_gpu.architecture == own:
        return own
    return wanted_gpu.virtual_architecture


class Wanted(NamedTuple):
    """A kernel that a dry run asked for: what `compile_cubin` takes."""

    file: str
    defines: tuple[tuple[str, object], ...]
    registers: int | None


class Unlaunched:
    """Stands for the modules and kernels of a dry run."""

    def kernel(self, name: str) -> Unlaunched:
        return self

    def launch(self, *args: Any, **options: Any) -> None:
        pass


wanted: set[Wanted] = set()  # by the dry run that this process is


def load(
    file: str, *, defines: Mapping[str, object] | None = None, registers: int | None = None
) -> Any:
    """The module of a source file under these defines for the current GPU; compiled or read from
    disk once.
    """
    pretended = gpu.is_pretended()
    device = gpu.of(0 if pretended else torch.cuda.current_device())
    flags = tuple(sorted({**(defines or {}), **dependent_launch.defines(file, device)}.items()))
    if pretended:
        wanted.add(Wanted(file, flags, registers))
        return Unlaunched()
    return _load(file, flags, current_architecture(), registers)
