"""Descriptors of tensors for Hopper's copies of boxes (TMA), as the driver encodes them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from torch import Tensor

from flyweight import gpu
from flyweight.kernels.compiler import KernelError


def tensor_map(tensor: Tensor, box: Sequence[int]) -> bytes:
    """What a kernel's tensor copies need to know of a tensor [z, y, x] of 16-bit values, and of the
    boxes [z, y, x] copied out of it: an argument by value. Rows of a box are 128 bytes, and come to
    lie swizzled; values beyond the tensor are zeros.
    """
    if gpu.is_pretended():
        return b""
    return _tensor_map(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tuple(box))


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    assert strides[-1] == 1 and box[-1] == 64
    # of cuda.h
    rank = len(shape)
    sixteen_bits = 1
    no_interleaving = 0
    swizzle_128_bytes = 3
    fetch_256_bytes = 3
    zeros = 0
    room = ctypes.create_string_buffer(256)
    # cuda.bindings has these 128 bytes wherever Python puts its object
    place = -(-ctypes.addressof(room) // 128) * 128
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * (rank - 1))(*(2 * s for s in strides[-2::-1]))
    boxes = (ctypes.c_uint32 * rank)(*reversed(box))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        sixteen_bits,
        rank,
        ctypes.c_void_p(address),
        sizes,
        steps,
        boxes,
        ones,
        no_interleaving,
        swizzle_128_bytes,
        fetch_256_bytes,
        zeros,
    )
    if status:
        raise KernelError(
            f"no tensor map of {shape} with strides {strides} in boxes of {box}: the driver's "
            f"error {status}"
        )
    return ctypes.string_at(place, 128)
