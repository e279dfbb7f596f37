"""Integer weights: groups with scales and zero points, W8A8, and both with two of four inputs
pruned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.packing import pack, packed_words, unpack
from flyweight.tensors.base import QuantTensor, generator_on
from flyweight.values import known, same


@dataclass(frozen=True, eq=False)
class IntGroup(QuantTensor):
    """W[n, k] = scales[n, g] · (q[n, k] − zeros[n, g]), g = g_idx[k] or k // group_size; q
    unsigned, `bits` wide.

    Without zeros the zero point is 2^(bits−1). One scale per channel is group_size = in_features.
    """

    kind: ClassVar[str] = "int"
    codes: Tensor  # int32 [out, words]: dense stream along in_features
    scales: Tensor  # [out, groups]
    zeros: Tensor | None  # uint8 [out, groups]
    bits: int
    group_size: int
    in_features: int
    g_idx: Tensor | None = None  # int32 [in]: the group of each column (act-order)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.codes.shape[-2], self.in_features

    @property
    def groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def by_rows(self) -> bool:
        return self.g_idx is None and self.experts is None

    @classmethod
    def from_values(
        cls,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        bits: int,
        group_size: int,
        g_idx: Tensor | None = None,
    ) -> IntGroup:
        """Unsigned values [out, in] packed."""
        zeros = None if zeros is None else zeros.to(torch.uint8)
        return cls(pack(values, bits), scales, zeros, bits, group_size, values.shape[-1], g_idx)

    def values(self) -> Tensor:
        """Unsigned codes [..., out, in] as int32."""
        return unpack(self.codes, self.bits, self.in_features)

    def group_of_column(self) -> Tensor:
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.in_features, device=self.codes.device) // self.group_size

    def integers(self) -> Tensor:
        """Codes less their zero points, int32 [out, in]: what the scales multiply."""
        if self.zeros is None:
            return self.values() - (1 << (self.bits - 1))
        return self.values() - self.zeros.to(torch.int32)[:, self.group_of_column()]

    def _dequantize(self) -> Tensor:
        # in place: a fraction of the memory
        if self.g_idx is None and self.in_features == self.groups * self.group_size:
            middle = (
                float(1 << (self.bits - 1)) if self.zeros is None else self.zeros.float()[..., None]
            )
            values = self.values().float().unflatten(-1, (self.groups, self.group_size))
            return values.sub_(middle).mul_(self.scales.float()[..., None]).flatten(-2)
        return self.integers().float() * self.scales.float()[:, self.group_of_column()]

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else math.ceil(self.zeros.numel() * self.bits / 8)
        index = 0 if self.g_idx is None else self.g_idx.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros + index

    def _merge(self, others: Sequence[Any]) -> Self | None:
        if self.g_idx is None:
            return super()._merge(others)
        if any(
            not isinstance(o, IntGroup) or o.g_idx is None or not same(o.g_idx, self.g_idx)
            for o in others
        ):
            return None  # columns grouped differently
        plain = [dataclasses.replace(t, g_idx=None) for t in (self, *others)]
        joined = plain[0]._merge(plain[1:])
        return joined and dataclasses.replace(joined, g_idx=self.g_idx)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        bits: int = 4,
        group_size: int = 128,
        symmetric: bool = False,
        act_order: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> IntGroup:
        *lead, columns = shape
        group_size = columns if group_size in (-1, 0) else group_size
        generator, groups = generator_on(seed, device), math.ceil(columns / group_size)
        if columns * bits % 32 == 0:  # every bit of every word is a code
            words = (*lead, packed_words(columns, bits))
            codes = torch.randint(
                -(1 << 31), 1 << 31, words, generator=generator, device=device, dtype=torch.int32
            )
            if symmetric and bits == 4:
                codes = without_zeros(codes)
        else:
            codes = pack(
                torch.randint(0, 1 << bits, tuple(shape), generator=generator, device=device), bits
            )
        # keeps the output of a unit input near one
        spread = (1 << bits) / math.sqrt(12) * math.sqrt(columns)
        scales = (0.75 + torch.rand(*lead, groups, generator=generator, device=device) / 2) / spread
        zeros = None
        if not symmetric:
            # Around the codes' own mean, half a code below the middle: else every row had the same
            # small offset, and a deep model of such weights says one and the same token whatever it
            # is asked.
            middle = 1 << (bits - 1)
            room = max(1, middle // 4)
            size = (*lead, groups)
            zeros = torch.randint(
                middle - room, middle + room, size, generator=generator, device=device
            ).to(torch.uint8)
        g_idx = None
        if act_order:
            order = torch.rand(*lead[:-1], columns, generator=generator, device=device).argsort(-1)
            g_idx = (order // group_size).to(torch.int32)
        return cls(codes, scales.to(dtype), zeros, bits, group_size, columns, g_idx)


def without_zeros(words: Tensor) -> Tensor:
    """Codes of 4 bits with every 0 made 8, the middle: their mean is then the middle, too (see
    `IntGroup.random`).
    """
    ones = words | words >> 1 | words >> 2 | words >> 3
    return words | (~ones & 0x11111111) << 3


def quantize_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per-token int8: codes (as float32, in −127..127) and scales [..., 1], both from
    float32 arithmetic.
    """
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=127e-12)
    return (x.float() * (127 / most)).round(), most / 127


@dataclass(frozen=True, eq=False)
class Int8Channel(QuantTensor):
    """W8A8: int8 weights with one scale per output channel; int8 activations, per token, made at
    run time.

    With `input_scale` the activations use that one static scale (and `input_zero` where they are
    asymmetric).
    """

    kind: ClassVar[str] = "w8a8"
    codes: Tensor  # int8 [out, in]
    scales: Tensor  # [out, 1]
    input_scale: Tensor | None = None  # [1]
    input_zero: Tensor | None = None  # [1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.codes.shape[-2], self.codes.shape[-1]

    def _dequantize(self) -> Tensor:
        return self.codes.float() * self.scales.float()

    def quantize_input(self, x: Tensor) -> Tensor:
        if self.input_scale is None:
            codes, scale = quantize_int8_rows(x)
            return codes.double() * scale.double()
        zero = 0.0 if self.input_zero is None else self.input_zero.float()
        codes = (x.float() / self.input_scale.float() + zero).round().clamp(-128, 127)
        return (codes - zero).double() * self.input_scale.double()

    def _merge(self, others: Sequence[Any]) -> Self | None:
        # a static scale belongs to one input; siblings may still differ
        if self.input_scale is not None:
            return None
        return super()._merge(others)

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Int8Channel:
        generator = generator_on(seed, device)
        codes = torch.randint(
            -127, 128, tuple(shape), generator=generator, device=device, dtype=torch.int8
        )
        spread = 254 / math.sqrt(12) * math.sqrt(shape[-1])
        scales = (
            0.75 + torch.rand(*shape[:-1], 1, generator=generator, device=device) / 2
        ) / spread
        return cls(codes, scales.to(dtype))


@dataclass(frozen=True, eq=False)
class Sparse24(QuantTensor):
    """Two of every four neighbouring inputs kept: `inner` is the integer weight over the kept half
    of the columns.

    Kept value j of a row belongs to column 4·(j // 2) + positions[j]; inner's group size is half
    the dense one.
    """

    kind: ClassVar[str] = "sparse24"
    inner: IntGroup | Int8Channel
    positions: Tensor  # int32 [out, words]: 2 bits for each kept value, rising within a pair

    @property
    def matrix_shape(self) -> tuple[int, int]:
        rows, kept = self.inner.matrix_shape
        return rows, 2 * kept

    def columns(self) -> Tensor:
        """int64 [..., out, in / 2]: the dense column of each kept value."""
        kept = self.inner.matrix_shape[1]
        start = torch.arange(kept, device=self.positions.device) // 2 * 4
        return start + unpack(self.positions, 2, kept)

    def _dequantize(self) -> Tensor:
        dense = torch.zeros(self.matrix_shape, device=self.positions.device)
        return dense.scatter_(1, self.columns(), self.inner._dequantize())

    def quantize_input(self, x: Tensor) -> Tensor:
        return self.inner.quantize_input(x)

    @classmethod
    def from_dense(cls, dense: QuantTensor) -> Sparse24 | None:
        """Compress a weight whose every group of four holds two zeros; None where the mask is not
        2:4.
        """
        if (
            not isinstance(dense, IntGroup | Int8Channel)
            or dense.matrix_shape[1] % 4
            or dense.experts is not None
        ):
            return None
        if isinstance(dense, IntGroup) and (dense.g_idx is not None or dense.group_size % 4):
            return None
        integers = dense.integers() if isinstance(dense, IntGroup) else dense.codes.int()
        if known(((integers != 0).unflatten(1, (-1, 4)).sum(-1) > 2).any(), otherwise=True):
            return None
        # Kept: the non-zeros, then zeros from the left until there are two; sorted by column.
        order = torch.argsort(
            (integers == 0).unflatten(1, (-1, 4)).to(torch.int8), dim=-1, stable=True
        )[..., :2]
        positions = order.sort(-1).values.flatten(1)
        columns = torch.arange(positions.shape[1], device=positions.device) // 2 * 4 + positions
        if isinstance(dense, IntGroup):
            inner: IntGroup | Int8Channel = IntGroup.from_values(
                dense.values().gather(1, columns),
                dense.scales,
                dense.zeros,
                bits=dense.bits,
                group_size=dense.group_size // 2,
            )
        else:
            inner = dataclasses.replace(dense, codes=dense.codes.gather(1, columns))
        return cls(inner, pack(positions, 2))

    @classmethod
    def find(cls, dense: QuantTensor) -> QuantTensor:
        """The 2:4 form of a weight that has it; a few rows decide for most weights that they have
        not.
        """
        if not isinstance(dense, IntGroup | Int8Channel) or dense.experts is not None:
            return dense
        if isinstance(dense, IntGroup):
            head: QuantTensor = dataclasses.replace(
                dense,
                codes=dense.codes[:8],
                scales=dense.scales[:8],
                zeros=None if dense.zeros is None else dense.zeros[:8],
            )
        else:
            head = dataclasses.replace(dense, codes=dense.codes[:8], scales=dense.scales[:8])
        return dense if cls.from_dense(head) is None else cls.from_dense(dense) or dense

    def to_dense(self) -> IntGroup | Int8Channel:
        """The same weight with its zeros written out, as other engines read it."""
        inner, columns, shape = self.inner, self.columns(), self.matrix_shape
        if isinstance(inner, Int8Channel):
            codes = torch.zeros(shape, dtype=torch.int8, device=columns.device).scatter_(
                1, columns, inner.codes
            )
            return dataclasses.replace(inner, codes=codes)
        group_size = 2 * inner.group_size
        if inner.zeros is None:
            values = torch.full(
                shape, 1 << (inner.bits - 1), dtype=torch.int32, device=columns.device
            )
        else:
            values = inner.zeros.int().repeat_interleave(group_size, 1)[:, : shape[1]].contiguous()
        values.scatter_(1, columns, inner.values())
        return IntGroup.from_values(
            values, inner.scales, inner.zeros, bits=inner.bits, group_size=group_size
        )

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        inner: type[IntGroup] | type[Int8Channel] = Int8Channel,
        **options: Any,
    ) -> Sparse24:
        *lead, columns = shape
        if "group_size" in options:
            options["group_size"] //= 2
        generator = generator_on(seed + 1, device)
        picked = torch.rand(*lead, columns // 4, 4, generator=generator, device=device).argsort(-1)[
            ..., :2
        ]
        positions = pack(picked.sort(-1).values.flatten(-2), 2)
        return cls(inner.random((*lead, columns // 2), seed, device, **options), positions)
