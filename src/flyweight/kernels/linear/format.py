"""Weight formats of the CUDA tiles: one object for each, and nothing about them anywhere else.

A format says how a QuantTensor becomes codes and scales (`read`), in which order the matrix units
want the codes (`order`, 16 outputs × 64 inputs at a time), how large such a block is, what is done
to x, and which kernels take it. What was measured of a format stands in `tuned/*.toml` under its
name. docs/add-a-format.md adds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flyweight.errors import unknown
from flyweight.kernels.linear import bits
from flyweight.kernels.linear.bits import Variant
from flyweight.tensors import (
    FLOAT4_GROUP,
    FLOAT8_MAX,
    Float4,
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
)

# The axes of a weight cut into blocks: see `tiles.blocks`.
TILE, HALF_ROW, ROW, BLOCK, HALF, COLUMN, STEP, PAIR, WITHIN = range(9)
WORDS = (TILE, BLOCK, HALF, STEP, ROW, COLUMN, PAIR, HALF_ROW, WITHIN)
BYTES = (TILE, BLOCK, HALF, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN)
NIBBLES = (TILE, BLOCK, ROW, COLUMN, STEP, HALF_ROW, PAIR, WITHIN, HALF)

BIT_PLANES = 8  # FORMAT of the CUDA sources, for codes in planes
INT8_INPUTS = 1  # x becomes int8 codes with one scale a row: QUANTIZE of the CUDA sources
FLOAT8_INPUTS = 2
EVERYWHERE = frozenset({"gemv", "gemm", "experts"})


@dataclass(frozen=True)
class Codes:
    """A weight taken apart: what tiles are made of."""

    codes: Tensor  # [out, in], or [out, in / 2] where two of four are kept
    scales: Tensor | None = None  # float [out, groups], as stored
    zeros: Tensor | None = None  # int [out, groups]; None: the middle of the codes
    channel_scale: Tensor | None = None  # float32 [out]
    input_scale: Tensor | None = None  # one for x, known beforehand
    group: int = 64  # inputs that share a scale
    middle: int = 0  # the zero point of codes that have none stored
    exponents: Tensor | None = None  # uint8 [out, groups], of groups that have no other scale
    # float32 [out, groups], the same for eight neighbouring outputs: of blocks of float8
    block_scales: Tensor | None = None
    record_parts: list[Tensor] | None = None  # of codes in planes: `bits.record_parts`
    tiles: Tensor | None = None  # the codes, where files have them in the order of the kernels


Matches = Callable[[QuantTensor], bool]
Read = Callable[[QuantTensor, torch.dtype], Codes]


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """How weights of one kind lie in tiles, and which kernels read them."""

    name: str
    code: int  # FORMAT of the CUDA sources
    bits: int
    block_bytes: int  # of 16 outputs × 64 inputs
    order: tuple[int, ...]
    matches: Matches
    read: Read
    kernels: frozenset[str] = EVERYWHERE
    grouped: bool = False  # scales and zero points for groups of inputs
    sparse: bool = False  # two of four inputs kept
    input_codes: int = 0  # what x becomes: INT8_INPUTS, FLOAT8_INPUTS, or 0: it stays
    # codes without zero points have a kernel of their own, which takes them as signed
    signed_pays: bool = False
    needs_float8: bool = False
    widened: bool = False  # float8 codes become 16-bit floats, which x stays
    record_bytes: int = 64  # of 16 outputs: scale and zero point of a group, or its exponent
    floats: bool = False  # codes are multiplied as 16-bit floats, x as it is
    pairs_rows: bool = True  # rows of gate and up may lie by turns
    unit_blocks: int = 1  # of 64 inputs, that are read together
    variant: Variant | None = None  # of codes in planes, what a weight's own are like
    variants: dict[Variant, WeightFormat] = field(default_factory=dict, repr=False)

    @property
    def quantizes_input(self) -> bool:
        return self.input_codes > 0

    @property
    def largest_code(self) -> float:
        """Of formats with a scale for each output."""
        return FLOAT8_MAX if self.input_codes == FLOAT8_INPUTS else 127

    @property
    def input_order(self) -> int:
        """ORDER of the inputs in packed x (cuda/packed.cuh)."""
        return 2 if self.grouped and self.sparse else int(self.grouped or self.widened)

    @property
    def in_planes(self) -> bool:
        return self.code == BIT_PLANES

    def of(self, tensor: QuantTensor) -> WeightFormat:
        """This format as that weight has it: sizes of codes in planes are its own."""
        found = bits.variant(tensor) if self.in_planes else None
        if found is None:
            return self
        if found not in self.variants:
            self.variants[found] = replace(
                self,
                bits=found.bits,
                block_bytes=found.block_bytes,
                record_bytes=found.record_bytes,
                variant=found,
            )
        return self.variants[found]

    def defines(self, *, symmetric: bool = False) -> dict[str, int]:
        """For the compiler; only what is true is named, so that other formats keep their cubins."""
        named = {"SPARSE": self.sparse, "SYMMETRIC": symmetric}
        own = {} if self.variant is None else self.variant.defines
        return {"FORMAT": self.code} | {name: 1 for name, value in named.items() if value} | own

    def __repr__(self) -> str:
        return self.name


def is_plain(tensor: QuantTensor) -> bool:
    return isinstance(tensor, Plain)


def read_plain(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    assert isinstance(tensor, Plain)
    return Codes(tensor.weight.to(dtype))


def is_int8(tensor: QuantTensor) -> bool:
    return isinstance(tensor, Int8Channel) and tensor.input_zero is None


def is_float8(tensor: QuantTensor) -> bool:
    return (
        isinstance(tensor, Float8)
        and tensor.activation in ("token", "static")
        and tensor.block is None
    )


def read_channels(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    """One scale for each output."""
    assert isinstance(tensor, Int8Channel | Float8)
    codes = tensor.codes if isinstance(tensor, Int8Channel) else tensor.weight.view(torch.uint8)
    scale = tensor.scales.float().expand(codes.shape[0], 1).reshape(-1).contiguous()
    return Codes(codes, channel_scale=scale, input_scale=tensor.input_scale)


def read_widened(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    """x is not quantized, so it needs no scale either."""
    return replace(read_channels(tensor, dtype), input_scale=None)


def has_float8_blocks(tensor: QuantTensor) -> bool:
    """Whether tiles of 16 outputs lie within blocks. What the files ask to be done to x is not:
    its 16 bits are only more precise.
    """
    return isinstance(tensor, Float8) and tensor.block is not None and tensor.block % 128 == 0


def read_float8_blocks(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    assert isinstance(tensor, Float8) and tensor.block is not None
    codes = tensor.weight.view(torch.uint8)
    scales = tensor.scales.float().repeat_interleave(tensor.block, 0)[: len(codes)]
    return Codes(codes, block_scales=scales, group=tensor.block)


def is_float4(tensor: QuantTensor) -> bool:
    return isinstance(tensor, Float4)


def read_float4(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    assert isinstance(tensor, Float4)
    return Codes(tensor.unpacked(), exponents=tensor.exponents, group=FLOAT4_GROUP)


def has_groups(bits: int, stretch: int = 1) -> Matches:
    """`stretch`: inputs for one stored column."""

    def matches(tensor: QuantTensor) -> bool:
        if not isinstance(tensor, IntGroup) or tensor.bits != bits or tensor.g_idx is not None:
            return False
        group = stretch * tensor.group_size
        if tensor.zeros is None and group == 32 and stretch == 1:
            return False  # a record would hold as many bits for zero points again
        return group in (32, 64) or group % 128 == 0 or group >= stretch * tensor.in_features

    return matches


def read_groups(stretch: int = 1) -> Read:
    def read(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
        assert isinstance(tensor, IntGroup)
        group = min(stretch * tensor.group_size, stretch * tensor.in_features)
        return Codes(
            tensor.values().to(torch.uint8),
            tensor.scales,
            tensor.zeros,
            group=group,
            middle=1 << (tensor.bits - 1),
        )

    return read


def read_bits(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    found = bits.variant(tensor)
    assert found is not None
    return Codes(
        bits.codes_of(tensor),
        getattr(tensor, "scales", None),
        group=found.span,
        record_parts=bits.record_parts(tensor, found),
    )


def is_trellis(tensor: QuantTensor) -> bool:
    return isinstance(tensor, Trellis)


def read_trellis(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
    assert isinstance(tensor, Trellis)
    found = bits.variant(tensor)
    assert found is not None
    return Codes(
        tensor.words,
        tensor.scales,
        group=found.span,
        record_parts=bits.record_parts(tensor, found),
        tiles=bits.trellis_words(tensor),
    )


def is_kept(inner: Matches) -> Matches:
    """Two of four inputs are kept, of a weight that `inner` knows."""
    return lambda tensor: isinstance(tensor, Sparse24) and inner(tensor.inner)


def read_kept(inner: Read) -> Read:
    def read(tensor: QuantTensor, dtype: torch.dtype) -> Codes:
        assert isinstance(tensor, Sparse24)
        return inner(tensor.inner, dtype)

    return read


FEW = EVERYWHERE | {"gemm_small"}
SLICED = FEW | {"gemv_splitk"}
INTEGER = SLICED | {"gemv_cluster", "gemv_registers", "gemm_int16"}

PLAIN = WeightFormat("plain", 0, 16, 2048, WORDS, is_plain, read_plain, SLICED, floats=True)
FORMATS = {
    one.name: one
    for one in (
        PLAIN,
        WeightFormat(
            "int4",
            1,
            4,
            512,
            NIBBLES,
            has_groups(4),
            read_groups(),
            INTEGER | {"recode", "look_up"},
            grouped=True,
        ),
        WeightFormat(
            "int8",
            2,
            8,
            1024,
            BYTES,
            has_groups(8),
            read_groups(),
            INTEGER | {"look_up"},
            grouped=True,
            signed_pays=True,
        ),
        # what has no place in the two before it keeps the bits of its file
        WeightFormat(
            "bits",
            BIT_PLANES,
            8,
            1024,
            BYTES,
            bits.takes,
            read_bits,
            EVERYWHERE | {"gemv_splitk", "look_up"},
            grouped=True,
        ),
        WeightFormat(
            "trellis-bits",
            BIT_PLANES,
            2,
            256,
            BYTES,
            is_trellis,
            read_trellis,
            EVERYWHERE | {"gemv_splitk", "look_up"},
            grouped=True,
            pairs_rows=False,
            unit_blocks=2,
        ),
        WeightFormat(
            "w8a8",
            3,
            8,
            1024,
            BYTES,
            is_int8,
            read_channels,
            FEW | {"gemv_cluster"},
            input_codes=INT8_INPUTS,
        ),
        WeightFormat(
            "fp8",
            4,
            8,
            1024,
            BYTES,
            is_float8,
            read_channels,
            input_codes=FLOAT8_INPUTS,
            needs_float8=True,
        ),
        WeightFormat(
            "fp8-wide",
            5,
            8,
            1024,
            BYTES,
            is_float8,
            read_widened,
            frozenset({"gemm_mma"}),
            widened=True,
        ),
        WeightFormat(
            "fp8-block",
            7,
            8,
            1024,
            BYTES,
            has_float8_blocks,
            read_float8_blocks,
            EVERYWHERE | {"gemv_splitk"},
            grouped=True,
            record_bytes=16,
            floats=True,
        ),
        WeightFormat(
            "mxfp4", 6, 4, 512, NIBBLES, is_float4, read_float4, grouped=True, record_bytes=16
        ),
        WeightFormat(
            "sparse-int4",
            1,
            3,
            384,
            NIBBLES,
            is_kept(has_groups(4, 2)),
            read_kept(read_groups(2)),
            SLICED,
            grouped=True,
            sparse=True,
            signed_pays=True,
        ),
        WeightFormat(
            "sparse-int8",
            2,
            5,
            640,
            BYTES,
            is_kept(has_groups(8, 2)),
            read_kept(read_groups(2)),
            SLICED,
            grouped=True,
            sparse=True,
            signed_pays=True,
        ),
        WeightFormat(
            "sparse-w8a8",
            3,
            5,
            640,
            BYTES,
            is_kept(is_int8),
            read_kept(read_channels),
            FEW,
            sparse=True,
            input_codes=INT8_INPUTS,
        ),
    )
}


def named(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise KeyError(unknown("format", name, FORMATS))
    return FORMATS[name]


def register(one: WeightFormat) -> None:
    """A format from outside of this file."""
    if one.name in FORMATS:
        raise ValueError(f"there is a format {one.name} already")
    FORMATS[one.name] = one
