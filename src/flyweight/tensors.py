"""QuantTensor: what a quantized weight means. Algorithms make them, files store them, kernels multiply with them.

Each kind is a frozen dataclass of named tensors. `dequantize()` is the reference of every file format and solver,
`matmul_reference(x)` (activation quantization included) the reference of every kernel. Nothing else in the package
says what a format means.

A weight is [out_features, in_features]; with a leading expert dimension every tensor field gets one too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.packing import pack, packed_words, unpack

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Base of the family. `dims` is the number of dimensions of the first tensor field of one (expert-less) weight."""

    kind: ClassVar[str]
    dims: ClassVar[int] = 2

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        raise NotImplementedError

    def _dequantize(self) -> Tensor:
        """Float32 [out, in] of one weight without experts."""
        raise NotImplementedError

    def quantize_input(self, x: Tensor) -> Tensor:
        """The values the matmul really sees: x itself unless this kind quantizes activations too."""
        return x

    # -- the same for every kind ------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, nested ones as `inner.codes`."""
        found: dict[str, Tensor] = {}
        for name, value in self.fields().items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, QuantTensor):
                found.update({f"{name}.{key}": tensor for key, tensor in value.tensors().items()})
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor field."""
        changed: dict[str, Any] = {}
        for name, value in self.fields().items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, QuantTensor):
                changed[name] = value.map(change)
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def experts(self) -> int | None:
        first = next(iter(self.tensors().values()))
        return first.shape[0] if first.ndim > self.dims else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix_shape if self.experts is None else (self.experts, *self.matrix_shape)

    def __getitem__(self, expert: int) -> Self:
        return self.map(lambda tensor: tensor[expert])

    @classmethod
    def stack(cls, tensors: Sequence[QuantTensor]) -> QuantTensor:
        """One weight per expert → one tensor with a leading expert dimension. All must be alike."""
        first = tensors[0]
        if any(type(t) is not type(first) or t._metadata() != first._metadata() for t in tensors):
            raise ValueError("experts of one layer must share one scheme")
        columns = [list(t.tensors().values()) for t in tensors]
        stacked = iter([torch.stack(parts) for parts in zip(*columns, strict=True)])
        return first.map(lambda _: next(stacked))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.experts is None:
            return self._dequantize().to(dtype)
        return torch.stack([self[i]._dequantize().to(dtype) for i in range(self.experts)])

    def matmul_reference(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """x [..., in] → [..., out], accumulated in `dtype`; with experts x is [experts, rows, in]."""
        return self.quantize_input(x).to(dtype) @ self.dequantize(dtype).mT

    @property
    def nbytes(self) -> int:
        """Bytes as stored on disk: packed codes, scales, zero points, codebooks, indices and their padding."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / math.prod(self.shape)

    def _metadata(self) -> dict[str, Any]:
        """Everything that is not a tensor and must agree between weights that are stacked or merged."""
        data: dict[str, Any] = {"in": self.matrix_shape[1]}
        for name, value in self.fields().items():
            if isinstance(value, QuantTensor):
                data[name] = (value.kind, value._metadata())
            elif isinstance(value, Tensor):
                data[name] = value.dtype
            elif name != "out_features":
                data[name] = value
        return data

    def _merge(self, others: Sequence[Any]) -> Self | None:
        """self and others as one weight with their rows one after the other, or None where that is not possible."""
        if any(type(o) is not type(self) or o._metadata() != self._metadata() for o in others):
            return None
        rows = iter([torch.cat(parts, dim=-2) for parts in zip(*(t.tensors().values() for t in (self, *others)), strict=True)])
        return self.map(lambda _: next(rows))


def merge(tensors: Sequence[QuantTensor]) -> list[QuantTensor]:
    """Segments of a merged projection (q/k/v, gate/up): neighbours that agree become one weight, the rest stay."""
    segments: list[QuantTensor] = []
    for tensor in tensors:
        joined = segments[-1]._merge([tensor]) if segments else None
        if joined is None:
            segments.append(tensor)
        else:
            segments[-1] = joined
    return segments


def _generator(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True, eq=False)
class Plain(QuantTensor):
    """The weight itself, in float32, float16 or bfloat16."""

    kind: ClassVar[str] = "plain"
    weight: Tensor  # [out, in]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[-2], self.weight.shape[-1]

    def _dequantize(self) -> Tensor:
        return self.weight.float()

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *,
               dtype: torch.dtype = torch.bfloat16) -> Plain:
        weight = torch.empty(*shape, dtype=dtype, device=device)
        return cls(weight.normal_(0, shape[-1] ** -0.5, generator=_generator(seed, device)))


@dataclass(frozen=True, eq=False)
class IntGroup(QuantTensor):
    """W[n, k] = scales[n, g] · (q[n, k] − zeros[n, g]), g = g_idx[k] or k // group_size; q unsigned, `bits` wide.

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

    @classmethod
    def from_values(cls, values: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, group_size: int,
                    g_idx: Tensor | None = None) -> IntGroup:
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
        return self.integers().float() * self.scales.float()[:, self.group_of_column()]

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else math.ceil(self.zeros.numel() * self.bits / 8)
        index = 0 if self.g_idx is None else self.g_idx.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros + index

    def _merge(self, others: Sequence[Any]) -> Self | None:
        if self.g_idx is None:
            return super()._merge(others)
        if any(not isinstance(o, IntGroup) or o.g_idx is None or not torch.equal(o.g_idx, self.g_idx) for o in others):
            return None  # columns grouped differently
        plain = [dataclasses.replace(t, g_idx=None) for t in (self, *others)]
        joined = plain[0]._merge(plain[1:])
        return joined and dataclasses.replace(joined, g_idx=self.g_idx)

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *, bits: int = 4,
               group_size: int = 128, symmetric: bool = False, act_order: bool = False,
               dtype: torch.dtype = torch.bfloat16) -> IntGroup:
        *lead, columns = shape
        group_size = columns if group_size in (-1, 0) else group_size
        generator, groups = _generator(seed, device), math.ceil(columns / group_size)
        if columns * bits % 32 == 0:  # every bit of every word is a code
            words = (*lead, packed_words(columns, bits))
            codes = torch.randint(-(1 << 31), 1 << 31, words, generator=generator, device=device, dtype=torch.int32)
        else:
            codes = pack(torch.randint(0, 1 << bits, tuple(shape), generator=generator, device=device), bits)
        spread = (1 << bits) / math.sqrt(12) * math.sqrt(columns)  # keeps the output of a unit input near one
        scales = (0.75 + torch.rand(*lead, groups, generator=generator, device=device) / 2) / spread
        zeros = None
        if not symmetric:
            middle = 1 << (bits - 1)
            low, high = middle - middle // 4, middle + middle // 4
            zeros = torch.randint(low, high + 1, (*lead, groups), generator=generator, device=device).to(torch.uint8)
        g_idx = None
        if act_order:
            order = torch.rand(*lead[:-1], columns, generator=generator, device=device).argsort(-1)
            g_idx = (order // group_size).to(torch.int32)
        return cls(codes, scales.to(dtype), zeros, bits, group_size, columns, g_idx)


def quantize_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per-token int8: codes (as float32, in −127..127) and scales [..., 1], both from float32 arithmetic."""
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=127e-12)
    return (x.float() * (127 / most)).round(), most / 127


@dataclass(frozen=True, eq=False)
class Int8Channel(QuantTensor):
    """W8A8: int8 weights with one scale per output channel; int8 activations, per token, made at run time.

    With `input_scale` the activations use that one static scale (and `input_zero` where they are asymmetric).
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
        if self.input_scale is not None:  # a static scale belongs to one input; siblings may still differ
            return None
        return super()._merge(others)

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *,
               dtype: torch.dtype = torch.bfloat16) -> Int8Channel:
        generator = _generator(seed, device)
        codes = torch.randint(-127, 128, tuple(shape), generator=generator, device=device, dtype=torch.int8)
        spread = 254 / math.sqrt(12) * math.sqrt(shape[-1])
        scales = (0.75 + torch.rand(*shape[:-1], 1, generator=generator, device=device) / 2) / spread
        return cls(codes, scales.to(dtype))


@dataclass(frozen=True, eq=False)
class Float8(QuantTensor):
    """W = weight · scales, e4m3. `activation`: "none", "token" (dynamic rows), "static" (input_scale), "group" (dynamic, 128)."""

    kind: ClassVar[str] = "fp8"
    weight: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # [1, 1] per tensor, [out, 1] per channel, [ceil(out / block), ceil(in / block)] per block
    activation: str = "token"
    block: int | None = None
    input_scale: Tensor | None = None  # [1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[-2], self.weight.shape[-1]

    def _dequantize(self) -> Tensor:
        rows, columns = self.matrix_shape
        scales = self.scales.float()
        if self.block:
            scales = scales.repeat_interleave(self.block, 0)[:rows].repeat_interleave(self.block, 1)[:, :columns]
        return self.weight.float() * scales

    def quantize_input(self, x: Tensor) -> Tensor:
        if self.activation == "none":
            return x
        if self.activation == "static":
            assert self.input_scale is not None
            scale = self.input_scale.float()
        elif self.activation == "group":
            pieces = x.float().unflatten(-1, (-1, 128))
            scale = (pieces.abs().amax(-1, keepdim=True) / FLOAT8_MAX).clamp(min=1e-12)
            return ((pieces / scale).to(FLOAT8).double() * scale.double()).flatten(-2)
        else:
            scale = (x.float().abs().amax(-1, keepdim=True) / FLOAT8_MAX).clamp(min=1e-12)
        return (x.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).double() * scale.double()

    def _merge(self, others: Sequence[Any]) -> Self | None:
        if self.activation == "static" or (self.block and self.matrix_shape[0] % self.block):
            return None
        if self.block:
            return super()._merge(others)
        if any(not isinstance(o, Float8) for o in others):
            return None
        # A scale per tensor becomes a scale per channel: the same numbers, and rows can follow each other.
        wide = [dataclasses.replace(t, scales=t.scales.expand(*t.weight.shape[:-1], 1)) for t in (self, *others)]
        return QuantTensor._merge(wide[0], wide[1:])

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *, activation: str = "token",
               dtype: torch.dtype = torch.float32) -> Float8:
        generator = _generator(seed, device)
        weight = torch.empty(*shape, device=device).normal_(0, 64, generator=generator).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        scales = (0.75 + torch.rand(*shape[:-1], 1, generator=generator, device=device) / 2) / 64 / math.sqrt(shape[-1])
        return cls(weight.to(FLOAT8), scales.to(dtype), activation)


@dataclass(frozen=True, eq=False)
class Sparse24(QuantTensor):
    """Two of every four neighbouring inputs kept: `inner` is the integer weight over the kept half of the columns.

    Kept value j of a row belongs to column 4·(j // 2) + positions[j]; inner's group size is half the dense one.
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
        """Compress a weight whose every group of four holds two zeros; None where the mask is not 2:4."""
        if not isinstance(dense, IntGroup | Int8Channel) or dense.matrix_shape[1] % 4 or dense.experts is not None:
            return None
        if isinstance(dense, IntGroup) and (dense.g_idx is not None or dense.group_size % 4):
            return None
        integers = dense.integers() if isinstance(dense, IntGroup) else dense.codes.int()
        if bool(((integers != 0).unflatten(1, (-1, 4)).sum(-1) > 2).any()):
            return None
        # Kept: the non-zeros, then zeros from the left until there are two; sorted by column.
        order = torch.argsort((integers == 0).unflatten(1, (-1, 4)).to(torch.int8), dim=-1, stable=True)[..., :2]
        positions = order.sort(-1).values.flatten(1)
        columns = torch.arange(positions.shape[1], device=positions.device) // 2 * 4 + positions
        if isinstance(dense, IntGroup):
            inner: IntGroup | Int8Channel = IntGroup.from_values(
                dense.values().gather(1, columns), dense.scales, dense.zeros, bits=dense.bits,
                group_size=dense.group_size // 2)
        else:
            inner = dataclasses.replace(dense, codes=dense.codes.gather(1, columns))
        return cls(inner, pack(positions, 2))

    def to_dense(self) -> IntGroup | Int8Channel:
        """The same weight with its zeros written out, as other engines read it."""
        inner, columns, shape = self.inner, self.columns(), self.matrix_shape
        if isinstance(inner, Int8Channel):
            codes = torch.zeros(shape, dtype=torch.int8, device=columns.device).scatter_(1, columns, inner.codes)
            return dataclasses.replace(inner, codes=codes)
        group_size = 2 * inner.group_size
        if inner.zeros is None:
            values = torch.full(shape, 1 << (inner.bits - 1), dtype=torch.int32, device=columns.device)
        else:
            values = inner.zeros.int().repeat_interleave(group_size, 1)[:, : shape[1]].contiguous()
        values.scatter_(1, columns, inner.values())
        return IntGroup.from_values(values, inner.scales, inner.zeros, bits=inner.bits, group_size=group_size)

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *,
               inner: type[IntGroup] | type[Int8Channel] = Int8Channel, **options: Any) -> Sparse24:
        *lead, columns = shape
        if "group_size" in options:
            options["group_size"] //= 2
        generator = _generator(seed + 1, device)
        picked = torch.rand(*lead, columns // 4, 4, generator=generator, device=device).argsort(-1)[..., :2]
        positions = pack(picked.sort(-1).values.flatten(-2), 2)
        return cls(inner.random((*lead, columns // 2), seed, device, **options), positions)


@dataclass(frozen=True, eq=False)
class VectorQuant(QuantTensor):
    """VPTQ: `length` neighbouring outputs of one input column are one codebook entry, plus one of the residual book.

    Stored column j = [outlier columns | group 0 | group 1 | …][j] belongs to input perm[j]; then the whole column
    is scaled and shifted: W[:, k] = column · scale[k] + bias[k]. An index is (residual << log2(main)) | main.
    """

    kind: ClassVar[str] = "vptq"
    dims: ClassVar[int] = 3
    indices: Tensor  # int32 [groups, ceil(out / length), words]: stream over the group's columns
    codebook: Tensor  # [groups, main centroids, length]
    residual: Tensor | None  # [groups, residual centroids, length]
    in_features: int
    out_features: int
    outlier_indices: Tensor | None = None  # int32 [ceil(out / outlier length), outliers]
    outlier_codebook: Tensor | None = None  # [centroids, outlier length]
    perm: Tensor | None = None  # int32 [in]
    scale: Tensor | None = None  # [in]
    bias: Tensor | None = None  # [in]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def length(self) -> int:
        return self.codebook.shape[-1]

    @property
    def outliers(self) -> int:
        return 0 if self.outlier_indices is None else self.outlier_indices.shape[-1]

    @property
    def group_columns(self) -> int:
        return (self.in_features - self.outliers) // self.codebook.shape[-3]

    @property
    def index_bits(self) -> tuple[int, int]:
        """Bits of the main and of the residual index."""
        main = (self.codebook.shape[-2] - 1).bit_length()
        return main, 0 if self.residual is None else (self.residual.shape[-2] - 1).bit_length()

    def split_indices(self) -> tuple[Tensor, Tensor | None]:
        """Main and residual indices, int64 [groups, ceil(out / length), group columns]."""
        main, residual = self.index_bits
        joint = unpack(self.indices, main + residual, self.group_columns).long()
        return joint & ((1 << main) - 1), None if self.residual is None else joint >> main

    @staticmethod
    def join_indices(main: Tensor, residual: Tensor | None, *, main_bits: int, residual_bits: int) -> Tensor:
        """The packed stream of `indices` from [groups, ceil(out / length), group columns]."""
        joint = main.long() if residual is None else main.long() | (residual.long() << main_bits)
        return pack(joint, main_bits + residual_bits)

    def _dequantize(self) -> Tensor:
        main, extra = self.split_indices()
        group = torch.arange(main.shape[0], device=main.device)[:, None, None]
        vectors = self.codebook.float()[group, main]  # [groups, row blocks, columns, length]
        if extra is not None and self.residual is not None:
            vectors = vectors + self.residual.float()[group, extra]
        # [groups, row blocks, columns, length] → [row blocks · length, groups · columns]
        columns = vectors.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)[: self.out_features]
        if self.outlier_indices is not None and self.outlier_codebook is not None:
            outliers = self.outlier_codebook.float()[self.outlier_indices.long()]  # [row blocks, outliers, length]
            columns = torch.cat([outliers.permute(0, 2, 1).flatten(0, 1)[: self.out_features], columns], 1)
        if self.perm is not None:
            columns = columns[:, self.perm.long().argsort()]
        if self.scale is not None:
            columns = columns * self.scale.float()
        return columns if self.bias is None else columns + self.bias.float()

    @property
    def nbytes(self) -> int:
        """Permutation and outlier indices are stored in 16 bits."""
        wide = sum(t.nbytes for t in (self.perm, self.outlier_indices) if t is not None)
        return super().nbytes - wide // 2

    def _merge(self, others: Sequence[Any]) -> Self | None:
        return None  # every weight has its own codebooks

    @classmethod
    def random(cls, shape: Sequence[int], seed: int = 0, device: torch.device | str = "cpu", *, length: int = 8,
               main: int = 8192, residual: int | None = 256, groups: int = 1, outliers: int = 0, outlier_length: int = 4,
               outlier_centroids: int = 256, permute: bool = False, normalize: bool = True,
               dtype: torch.dtype = torch.bfloat16) -> VectorQuant:
        *lead, rows, columns = shape
        generator = _generator(seed, device)

        def normal(*size: int, spread: float = 1.0) -> Tensor:
            return (torch.randn(*lead, *size, generator=generator, device=device) * spread).to(dtype)

        def integers(high: int, *size: int) -> Tensor:
            return torch.randint(0, high, (*lead, *size), generator=generator, device=device)

        if (columns - outliers) % groups:
            raise ValueError(f"{columns - outliers} columns do not divide into {groups} groups")
        blocks, width = math.ceil(rows / length), (columns - outliers) // groups
        main_bits, residual_bits = (main - 1).bit_length(), (residual - 1).bit_length() if residual else 0
        extra = integers(residual, groups, blocks, width) if residual else None
        indices = cls.join_indices(integers(main, groups, blocks, width), extra, main_bits=main_bits,
                                   residual_bits=residual_bits)
        spread = columns ** -0.5
        order = torch.rand(*lead, columns, generator=generator, device=device).argsort(-1).to(torch.int32)
        return cls(
            indices, normal(groups, main, length, spread=spread),
            normal(groups, residual, length, spread=spread / 8) if residual else None, columns, rows,
            outlier_indices=integers(outlier_centroids, math.ceil(rows / outlier_length), outliers).int() if outliers else None,
            outlier_codebook=normal(outlier_centroids, outlier_length, spread=2 * spread) if outliers else None,
            perm=order if permute else None,
            scale=(1 + normal(columns, spread=0.1).float()).to(dtype) if normalize else None,
            bias=normal(columns, spread=0.01 * spread) if normalize else None,
        )


KINDS: dict[str, type[QuantTensor]] = {t.kind: t for t in (Plain, IntGroup, Int8Channel, Float8, Sparse24, VectorQuant)}
