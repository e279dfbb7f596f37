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
from torch.utils import _pytree as pytree
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
    with torch.inference_mode(), FakeTensorMode(), Unguarded(), garbage.paused():
        yield


class Unguarded(TorchFunctionMode):
    """Some of torch's functions look for the device before they find that there are no values, and
    a torch that was built without CUDA fails at that. These do the same to shapes; that x[…] is
    then no view of x nobody can tell.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in (Tensor.__setitem__, Tensor.copy_):
            return args[0]
        if func is Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func not in (Tensor.__getitem__, torch.tensor):
            return func(*args, **options)
        device = args[0].device if func is Tensor.__getitem__ else options.pop("device", "cpu")
        with _disable_current_modes(), torch.device("meta"):
            found = func(*pytree.tree_map_only(Tensor, _shape_of, args), **options)
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=device)


def _shape_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
