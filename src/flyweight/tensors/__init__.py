"""QuantTensor: what a quantized weight means. Algorithms make them, files store them, kernels
multiply with them.

Each kind is a frozen dataclass of named tensors. `dequantize()` is the reference of every file
format and solver, `matmul_reference(x)` (activation quantization included) the reference of every
kernel. Nothing else in the package says what a format means.

A weight is [out_features, in_features]; with a leading expert dimension every tensor field gets one
too.
"""

from flyweight.tensors.base import Plain, QuantTensor, merge
from flyweight.tensors.blocks import IntBlock
from flyweight.tensors.float4 import FLOAT4_GROUP, Float4, NvFloat4
from flyweight.tensors.float8 import FLOAT8, FLOAT8_MAX, Float8, quantize_float8_rows
from flyweight.tensors.integer import Int8Channel, IntGroup, Sparse24, quantize_int8_rows
from flyweight.tensors.rows import reorder_rows, scale_rows
from flyweight.tensors.trellis import Trellis
from flyweight.tensors.vector import ByteVectorQuant, VectorQuant

KINDS: dict[str, type[QuantTensor]] = {
    t.kind: t
    for t in (
        Plain,
        IntGroup,
        IntBlock,
        Int8Channel,
        Float8,
        Float4,
        NvFloat4,
        Sparse24,
        VectorQuant,
        Trellis,
    )
}


def register(kind: type[QuantTensor]) -> None:
    """A kind of weight from outside of this folder; blocks of it can be stored and resumed."""
    if kind.kind in KINDS:
        raise ValueError(f"there is a kind {kind.kind} already")
    KINDS[kind.kind] = kind


__all__ = [
    "FLOAT4_GROUP",
    "FLOAT8",
    "FLOAT8_MAX",
    "KINDS",
    "ByteVectorQuant",
    "Float4",
    "Float8",
    "Int8Channel",
    "IntBlock",
    "IntGroup",
    "NvFloat4",
    "Plain",
    "QuantTensor",
    "Sparse24",
    "Trellis",
    "VectorQuant",
    "merge",
    "quantize_float8_rows",
    "quantize_int8_rows",
    "register",
    "reorder_rows",
    "scale_rows",
]
