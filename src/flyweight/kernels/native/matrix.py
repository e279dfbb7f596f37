"""The structs of source/matrix.h, and a weight that has become one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flyweight.tensors import QuantTensor

WIDTH = 8  # outputs of a block
FORMATS = (
    "int4",
    "int8",
    "float32",
    "float16",
    "bfloat16",
    "float8",
    "vectors",
    "blocks",
    "trellis",
)
ACTIVATIONS = (
    "as it is",
    "int8 by group",
    "int8 static",
    "float8 by token",
    "float8 static",
    "float8 by group",
    "float16 by row",
)
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LONGEST_GROUP = 128  # inputs under one copy of a scale
INPUT_GROUP = 32  # inputs of x that share a scale of x: rounding with 64 costs twice the KL
HALF_WEIGHT = 16.0  # of source/matrix.h


class Matrix(ctypes.Structure):
    """`Matrix` of source/matrix.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("input_group", ctypes.c_int32),
        ("wide_scales", ctypes.c_int32),
        ("zeros", ctypes.c_int32),
        ("input_scale", ctypes.c_float),
        ("input_zero", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("block_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("column_scale", ctypes.c_void_p),
        ("column_bias", ctypes.c_void_p),
        ("book", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("entries", ctypes.c_int32),
        ("residual_entries", ctypes.c_int32),
        ("residual_bytes", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("super_groups", ctypes.c_int32),
        ("mins", ctypes.c_int32),
        ("subs", ctypes.c_int32),
        ("sub_bias", ctypes.c_int32),
        ("middle", ctypes.c_int32),
        ("table", ctypes.c_void_p),
    )


class Packing(ctypes.Structure):
    """`Packing` of source/matrix.h."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("source_bits", ctypes.c_int32),
        ("is_signed", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("weight_group", ctypes.c_int32),
        ("weight_groups", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("from_bfloats", ctypes.c_int32),
        ("to", ctypes.c_void_p),
    )


@dataclass(eq=False)
class Weight:
    """A packed weight; `tensors` keeps alive what `matrix` points to."""

    matrix: Matrix
    why: str  # what it has become, in words
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def keep(self, name: str, tensor: Tensor | None) -> None:
        """Let the matrix point to this tensor."""
        if tensor is not None:
            self.tensors[name] = tensor
            setattr(self.matrix, name, tensor.data_ptr())


def blocks(outputs: int) -> int:
    return -(-outputs // WIDTH)


def empty_matrix(tensor: QuantTensor | Tensor, kind: str, *, group: int, groups: int) -> Matrix:
    outputs, inputs = tensor.shape[-2:] if isinstance(tensor, Tensor) else tensor.matrix_shape
    return Matrix(
        format=FORMATS.index(kind),
        outputs=outputs,
        inputs=inputs,
        columns=group * groups,
        group=group,
        groups=groups,
        input_group=group,
        factor=1.0,
    )
