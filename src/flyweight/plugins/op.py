"""One torch op that multiplies with any weight of ours, for engines that compile and capture.

    flyweight::linear(x [..., in], key, outputs) → [..., outputs]

An engine's compiler sees an op of tensors and one integer: `key` is a parameter of one element that
belongs to a layer, and its address finds the `FusedLinear` which holds the weight. Layers of one
shape thus trace to the same graph, and a graph that was compiled and stored by an earlier process
stays right: no number of a layer is part of it. Where nothing is compiled, layers call `multiply`
instead, which saves what torch does for every op. Everything that a launch needs besides (packed
inputs, partial sums, flags) comes from the workspace of the device, which is filled by the first
call with so many rows: engines run every size once before they capture it.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.linear.repeated import RepeatedLinear
from flyweight.plugins import ahead
from flyweight.tensors import QuantTensor, merge

_library = torch.library.Library("flyweight", "FRAGMENT")
_library.define("linear(Tensor x, Tensor key, SymInt outputs) -> Tensor")
_linears: dict[int, RepeatedLinear] = {}
_seconds: list[float] = []  # that weights took to be laid out
logger = logging.getLogger("vllm.flyweight")


def _linear(x: Tensor, key: Tensor, outputs: int) -> Tensor:
    return multiply(x, _linears[key.data_ptr()])


def multiply(x: Tensor, by: RepeatedLinear) -> Tensor:
    if ahead.has_noted():
        begin()
    return by(x)


def _shape_only(x: Tensor, key: Tensor, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


_library.impl("linear", _linear, "CUDA")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("flyweight::linear", _shape_only, lib=_library)


def begin() -> None:
    """Of the first product after weights were laid out."""
    logger.info("Flyweight: %d weights laid out in %.1f s", len(_linears), sum(_seconds))
    _seconds.clear()
    ahead.compile_noted()


def linear(x: Tensor, key: Tensor, outputs: int) -> Tensor:
    """x [..., in] → [..., outputs], by the linear that `hold` has given this key."""
    found: Tensor = torch.ops.flyweight.linear(x, key, outputs)
    return found


def hold(one: FusedLinear, device: torch.device, *, owner: Any = None) -> Tensor:
    """A key for `one`, which is kept as long as its owner (a layer) lives, or the process."""
    key = torch.zeros(1, dtype=torch.uint8, device=device)
    _linears[key.data_ptr()] = RepeatedLinear(one)
    if owner is not None:
        weakref.finalize(owner, _linears.pop, key.data_ptr(), None)
    return key


def held(key: Tensor) -> RepeatedLinear:
    return _linears[key.data_ptr()]


def prepare(
    parts: list[QuantTensor], *, dtype: torch.dtype, bias: Tensor | None = None
) -> FusedLinear:
    """One linear of the parts of a merged projection, laid out for the device that they are on."""
    segments = merge(parts)
    with timed(), floats_by_default():
        if ahead.compiles(segments[0]):
            outlines = [ahead.outline_of(one) for one in segments]
            ahead.note(ahead.NotedLinear(outlines, dtype, bias is not None))
        return ahead.lay_out(segments, dtype=dtype, bias=bias)


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Time that weights take to be laid out, of which the first product tells."""
    started = time.perf_counter()
    yield
    _seconds.append(time.perf_counter() - started)


@contextlib.contextmanager
def floats_by_default() -> Iterator[None]:
    """Engines load models with 16 bits as torch's default, in which our layouts are not meant."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def kernels_held() -> dict[str, int]:
    """How many linears of this process run by which of our kernels."""
    return dict(Counter(one.linear.kernel for one in _linears.values()))
