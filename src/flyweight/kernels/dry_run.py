"""Tensors with a shape, a type and a CUDA device but no bytes (torch's fake tensors), where there
may be no GPU at all.

Code that runs inside `dry_run` makes all its choices as on that GPU; kernels are noted in
`jit.wanted` and not launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from flyweight import garbage, gpu

DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def real() -> Iterator[None]:
    """In here tensors have values."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextlib.contextmanager
def dry_run(pretended: gpu.Gpu) -> Iterator[None]:
    """The process goes on pretending afterwards: what it keeps by shape or device is of no use for
    anything else.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    gpu.pretend(pretended)
    with torch.inference_mode(), FakeTensorMode() as mode, Unguarded(mode), garbage.paused():
        yield


# Of these torch's fake tensors take up to a millisecond each, and a model has tens of thousands.
MADE = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange}
SHAPED = {
    *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous),
    *(Tensor.transpose, Tensor.permute, Tensor.expand, Tensor.split, Tensor.chunk),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.float, Tensor.int, Tensor.long),
    *(torch.cat, torch.stack, torch.where, torch.nn.functional.pad, Tensor.__getitem__),
}
BITWISE = {Tensor.__and__, Tensor.__or__, Tensor.__lshift__, Tensor.__rshift__}
IN_PLACE = {Tensor.__setitem__, Tensor.copy_, Tensor.__ior__, Tensor.normal_}


class Unguarded(TorchFunctionMode):
    """Some of torch's functions look for the device before they find that there are no values, and
    a torch that was built without CUDA fails at that; others are slow. These do the same to shapes;
    that x[…] is then no view of x nobody can tell.
    """

    def __init__(self, mode: Any):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in IN_PLACE:
            return args[0]
        if func in BITWISE and keeps_type(*args):
            return self.bitwise(*args)
        if func in SHAPED or func in BITWISE:
            return self.shaped(func, args, options)
        if func is Tensor.to and not isinstance(args[-1], Tensor | int):
            return self.moved(*args, **options)
        if func in MADE and "out" not in options:
            device = torch.device(options.pop("device", None) or "cpu")
            with torch._C._DisableTorchDispatch():
                return self.faked(func(*args, **options, device="meta"), device)
        if func is not torch.tensor:
            return func(*args, **options)
        device = torch.device(options.pop("device", "cpu"))
        with _disable_current_modes(), torch.device("meta"):
            return self.faked(func(*args, **options), device)

    def moved(self, x: Tensor, *args: Any, device: Any = None, **options: Any) -> Tensor:
        """To a device, a type or both."""
        places = [one for one in args if isinstance(one, torch.device | str)]
        types = [one for one in args if one not in places]
        device = torch.device(device or next(iter(places), x.device))
        return self.shaped(Tensor.to, (x, *types), options, device)

    def bitwise(self, one: Tensor, other: Tensor | int) -> Tensor:
        """These are slow even on torch's tensors without values: they are written in Python."""
        shapes: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            result = shapes_of(one, shapes)
            if isinstance(other, Tensor):
                result, _ = torch.broadcast_tensors(result, shapes_of(other, shapes))
        return self.faked(result, largest(shapes).device)

    def shaped(
        self, func: Any, args: Any, options: dict[str, Any], device: torch.device | None = None
    ) -> Any:
        shapes: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            result = func(*shapes_of(args, shapes), **shapes_of(options, shapes))
        device = device or largest(shapes).device
        if isinstance(result, Tensor):
            return self.faked(result, device)
        return type(result)(self.faked(one, device) for one in result)

    def faked(self, shape: Tensor, device: torch.device) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        return FakeTensor(self.mode, shape, device)


def keeps_type(one: Tensor, other: Tensor | int) -> bool:
    return one.dtype == other.dtype if isinstance(other, Tensor) else one.dtype != torch.bool


def largest(tensors: list[Tensor]) -> Tensor:
    """Of the most dimensions: a single number may lie on another device."""
    return max(tensors, key=Tensor.dim)


def shapes_of(given: Any, found: list[Tensor]) -> Any:
    """The same of tensors without values, which are noted."""
    if isinstance(given, Tensor):
        found.append(given)
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    if isinstance(given, tuple | list):
        return type(given)([shapes_of(one, found) for one in given])
    if isinstance(given, dict):
        return {name: shapes_of(one, found) for name, one in given.items()}
    return given
