"""What the solvers of quant/ do to every weight many times over, as calls on tensors: the error of
a grid, the columns of GPTQ, and the largest numbers under a grid (source/rounding.c).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flyweight.kernels.native import library

MOST_COLUMNS = 128  # `BLOCK` of source/rounding.c


class CRounding(ctypes.Structure):
    """`Rounding` of source/rounding.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pieces", "scales", "zeros", "weights", "errors")),
        ("count", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("size", ctypes.c_int32),
        ("steps", ctypes.c_int32),
    )


class CWalk(ctypes.Structure):
    """`Walk` of source/rounding.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tile",
                "matrix",
                "scales",
                "zeros",
                "kept",
                "values",
                "codes",
                "errors",
            )
        ),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int32),
        ("steps", ctypes.c_int32),
    )


class CLargest(ctypes.Structure):
    """`Largest` of source/rounding.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sizes", "scales", "largest", "at")),
        ("count", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("size", ctypes.c_int32),
    )


def takes(tensor: Tensor) -> bool:
    """Whether these kernels are for such a tensor, here."""
    return tensor.device.type == "cpu" and library.why_not() is None


def rounding_error(
    pieces: Tensor, scales: Tensor, zeros: Tensor | None, weights: Tensor | None, *, steps: int
) -> Tensor:
    """pieces [rows, groups, size], scales and zeros [rows, groups] (no zeros: the middle), weights
    [groups, size] → the weighted squared error of each group, [rows, groups]; without weights its
    error to the fourth power.
    """
    pieces, scales = _plain(pieces), _plain(scales)
    zeros = None if zeros is None else _plain(zeros)
    weights = None if weights is None else _plain(weights)
    errors = torch.empty_like(scales)
    call = CRounding(
        pieces=pieces.data_ptr(),
        scales=scales.data_ptr(),
        zeros=_address(zeros),
        weights=_address(weights),
        errors=errors.data_ptr(),
        count=scales.numel(),
        groups=scales.shape[-1],
        size=pieces.shape[-1],
        steps=steps,
    )
    library.load().rounding_errors(library.team(), ctypes.byref(call))
    return errors


def largest(sizes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """sizes [..., size] and scales [size], or [..., groups, size] and [groups, size] → which size
    of each group has the largest product with its scale, and the place of that scale among all.
    """
    sizes, scales = _plain(sizes), _plain(scales)
    found = torch.empty(sizes.shape[:-1])
    at = torch.empty(sizes.shape[:-1], dtype=torch.int64)
    call = CLargest(
        sizes=sizes.data_ptr(),
        scales=scales.data_ptr(),
        largest=found.data_ptr(),
        at=at.data_ptr(),
        count=found.numel(),
        groups=scales.numel() // sizes.shape[-1],
        size=sizes.shape[-1],
    )
    library.load().rounding_largest(library.team(), ctypes.byref(call))
    return found, at


def walk(
    tile: Tensor,
    matrix: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    steps: int,
    kept: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`walk` of quant/gptq.py: codes and errors [columns, rows] of at most 128 columns."""
    assert len(tile) <= MOST_COLUMNS
    tile, scales, zeros = _plain(tile), _plain(scales), _plain(zeros)
    matrix = matrix.float() if matrix.stride(-1) == 1 else _plain(matrix)
    values = None if values is None else _plain(values)
    kept = None if kept is None else kept.to(torch.uint8).contiguous()
    codes = torch.empty_like(tile)
    errors = torch.empty_like(tile)
    call = CWalk(
        tile=tile.data_ptr(),
        matrix=matrix.data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr(),
        kept=_address(kept),
        values=_address(values),
        codes=codes.data_ptr(),
        errors=errors.data_ptr(),
        rows=tile.shape[1],
        stride=matrix.stride(0),
        columns=len(tile),
        steps=steps,
    )
    library.load().rounding_walk(library.team(), ctypes.byref(call))
    return codes, errors


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
