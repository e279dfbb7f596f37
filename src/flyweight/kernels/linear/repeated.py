"""A product of a tiled weight launched with little work of the host: noted once, then repeated.

    first product of a shape and a number of rows    as ever, its launches are noted
    every later one, of all layers of that shape     the same launches with other addresses

Engines that launch prompts kernel by kernel from Python wait for the host: choosing kernels, sizes
and buffers takes longer than small products do. All of it depends on the weight's shape, the rows
and the workspace, never on the layer. What is left here is a result to allocate, addresses to write
and one call of the driver for each kernel.

Launches are repeated only where every address among their arguments is known: x, the result, one of
the weight's tensors or a buffer of the workspace, which never moves. Products that torch takes part
in (cuBLAS) are never noted.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels import compiler, jit, workspace
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import TiledWeight

# kernels of TiledLinear.multiply that are launches and nothing else
NOTED = ("gemv", "gemv_splitk", "gemv_cluster", "gemm_small", "gemm", "gemm_dequantized")
MOST = 8192  # products that a workspace keeps: rows of prompts take any value
TENSORS = ("weights", "records", "channel_scale", "bias", "order")  # of a TiledWeight
_shapes: dict[tuple[Any, ...], int] = {}


class Launch:
    """One kernel's launch, whose arguments are written anew each time."""

    def __init__(self, noted: jit.Noted, places: list[tuple[int, int, int]]) -> None:
        """`places`: (argument, which address of the product, bytes behind it)."""
        self.name = noted.kernel.name
        self.config = noted.config  # keeps what `configuration` points to
        self.configuration = int(noted.config.getPtr())
        self.handle = noted.kernel.handle
        self.kept = noted.args  # the workspace's buffers
        self.values = list(noted.values)
        self.places = places
        self.layout = jit.ArgumentLayout.of(noted.args)

    def again(self, addresses: Sequence[int]) -> None:
        values = self.values
        for argument, source, behind in self.places:
            values[argument] = addresses[source] + behind
        layout = self.layout
        layout.write(*values)
        status = _driver_launch()(self.configuration, self.handle, layout.address, None)
        if status:
            raise compiler.KernelError(f"{self.name} was not launched again: error {status}")


@functools.cache
def _driver_launch() -> Callable[..., int]:
    """The driver's own function: bindings convert each argument once more."""
    found: Any = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    found.argtypes = [ctypes.c_void_p] * 4
    found.restype = ctypes.c_int
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Product:
    """All launches of one product; none: it cannot be repeated."""

    launches: tuple[Launch, ...]


NOT_REPEATED = Product(())


def product_of(noted: Sequence[jit.Noted], x: Tensor, out: Tensor, weight: TiledWeight) -> Product:
    """What was noted of one product, ready to be repeated with other addresses."""
    sources = [x, out, *_tensors(weight)]
    here = workspace.current(x.device)
    launches = []
    for one in noted:
        places = []
        for argument, value in enumerate(one.args):
            if isinstance(value, bytes):
                return NOT_REPEATED  # may hold an address
            if not isinstance(value, Tensor) or value.numel() == 0:
                continue
            source = _source(value, sources)
            if source is not None:
                behind = value.data_ptr() - sources[source].data_ptr()
                places.append((argument, source, behind))
            elif not here.holds(value):
                return NOT_REPEATED
        if one.kernel.counts or type(one.kernel) is not jit.Kernel:
            return NOT_REPEATED  # its arguments or its size depend on the launch before
        launches.append(Launch(one, places))
    return Product(tuple(launches))


def _source(value: Tensor, sources: Sequence[Tensor]) -> int | None:
    """Which of the sources a tensor is a part of."""
    storage = value.untyped_storage().data_ptr()
    for index, source in enumerate(sources):
        if source.untyped_storage().data_ptr() == storage:
            return index
    return None


def _tensors(weight: TiledWeight) -> list[Tensor]:
    found = (getattr(weight, name) for name in TENSORS)
    return [one for one in found if one is not None]


def _shape(linear: TiledLinear) -> int:
    """A number for all weights whose products are launched alike."""
    weight = linear.weight
    facts = (
        weight.matrix,
        weight.dtype,
        weight.activation,
        weight.scale_fp16,
        weight.static,
        weight.symmetric,
        weight.by_rows,
        *(getattr(weight, name) is None for name in TENSORS),
    )
    return _shapes.setdefault(facts, len(_shapes))


def current_stream(device: torch.device) -> int | None:
    """None: not torch's current device, or no GPU."""
    if device.type != "cuda":
        return None
    index = torch._C._cuda_getDevice()
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found if device.index == index else None


class RepeatedLinear:
    """A linear as engines call it that launch from Python."""

    def __init__(self, linear: FusedLinear) -> None:
        self.linear = linear
        # not of subclasses, which do more than launch
        self.repeats = type(linear) is TiledLinear and not linear.weight.interleaved
        if isinstance(linear, TiledLinear) and self.repeats:
            weight = linear.weight
            self.shape = _shape(linear)
            self.dtype = weight.dtype
            self.inputs = weight.in_features
            self.outputs = weight.out_features
            self.addresses = [one.data_ptr() for one in _tensors(weight)]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]"""
        if not self.repeats or x.dtype != self.dtype or not x.is_contiguous():
            return self.linear(x)
        stream = current_stream(x.device)
        if stream is None:
            return self.linear(x)
        here = workspace.current(x.device)
        key = (self.shape, x.numel() // self.inputs, stream, jit.overlap_allowed())
        product = here.products.get(key)
        if product is None:
            return self._first(x, key, here)
        if product is NOT_REPEATED:
            return self.linear(x)
        out = x.new_empty((*x.shape[:-1], self.outputs))
        addresses = (x.data_ptr(), out.data_ptr(), *self.addresses)
        for launch in product.launches:
            launch.again(addresses)
        return out

    def _first(self, x: Tensor, key: tuple[Any, ...], here: workspace.Workspace) -> Tensor:
        linear = self.linear
        assert isinstance(linear, TiledLinear)
        if len(here.products) >= MOST:
            here.products.clear()
        flat = x.view(-1, self.inputs)
        if len(flat) == 0 or linear.choose(len(flat)).kernel not in NOTED:
            here.products[key] = NOT_REPEATED
            return linear(x)
        with jit.noting() as noted:
            out = linear.multiply(flat)
        here.products[key] = product_of(noted, flat, out, linear.weight)
        return out.view(*x.shape[:-1], self.outputs)
