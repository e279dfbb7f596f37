"""Vector-quantized weights (VPTQ): codebooks and indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.packing import pack, unpack
from flyweight.tensors.base import QuantTensor, generator_on
from flyweight.values import known

FEW = 16  # entries of a book: its residual one, often, where three bits are stored
MOST_SUM = 255  # of the codes of both books that an item adds
AT_ONCE = 1 << 22  # items that are looked at together


@dataclass(frozen=True, eq=False)
class ByteBooks:
    """Codebooks as integers whose sums are bytes: entry = step · (main + residual) + least.

    So a kernel keeps a book as bytes, adds four codes in one 32-bit addition, and multiplies bytes.
    Only sums that some item has need be bytes; a code by itself may be below zero (`packed`). Each
    of the `length` places of an entry has a step of its own.
    """

    main: Tensor  # int16 [groups, entries, length]
    residual: Tensor | None  # int16 [groups, residual entries, length]
    step: Tensor  # float32 [groups, 1, length]
    least: Tensor  # float32 [groups, 1, length]


def packed(codes: Tensor) -> Tensor:
    """Codes [..., 8] as bytes of two 32-bit numbers, uint8 [..., 8]: one below zero borrows from
    its neighbour, which the sum with another book's gives back.
    """
    places = torch.tensor([1 << 8 * i for i in range(4)], device=codes.device)
    words = (codes.long().unflatten(-1, (-1, 4)) * places).sum(-1)
    octets = torch.stack([words >> 8 * i & 0xFF for i in range(4)], -1)
    return octets.flatten(-2).to(torch.uint8)


@dataclass(frozen=True, eq=False)
class VectorQuant(QuantTensor):
    """VPTQ: `length` neighbouring outputs of one input column are one codebook entry, plus one of
    the residual book.

    Stored column j = [outlier columns | group 0 | group 1 | …][j] belongs to input perm[j]; then
    the whole column is scaled and shifted: W[:, k] = column · scale[k] + bias[k]. An index is
    (residual << log2(main)) | main.
    """

    kind: ClassVar[str] = "vptq"
    file_format: ClassVar[str | None] = "vptq"
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
    def join_indices(
        main: Tensor, residual: Tensor | None, *, main_bits: int, residual_bits: int
    ) -> Tensor:
        """The packed stream of `indices` from [groups, ceil(out / length), group columns]."""
        joint = main.long() if residual is None else main.long() | (residual.long() << main_bits)
        return pack(joint, main_bits + residual_bits)

    def _dequantize(self) -> Tensor:
        return self.decode(*self.split_indices())

    def decode(self, main: Tensor, extra: Tensor | None) -> Tensor:
        """The weight [out, in] that these indices stand for."""
        vectors = entries(self.codebook.float(), main)  # [groups, row blocks, columns, length]
        if extra is not None and self.residual is not None:
            vectors = vectors + entries(self.residual.float(), extra)
        # [groups, row blocks, columns, length] → [row blocks · length, groups · columns]
        columns = vectors.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)[: self.out_features]
        if self.outlier_indices is not None and self.outlier_codebook is not None:
            # [row blocks, outliers, length]
            outliers = self.outlier_codebook.float()[self.outlier_indices.long()]
            columns = torch.cat(
                [outliers.permute(0, 2, 1).flatten(0, 1)[: self.out_features], columns], 1
            )
        if self.perm is not None:
            columns = columns[:, self.perm.long().argsort()]
        if self.scale is not None:
            columns = columns * self.scale.float()
        return columns if self.bias is None else columns + self.bias.float()

    def byte_books(self) -> ByteBooks:
        """The codebooks rounded to bytes: what items add up to, in 255 steps."""
        books = [book.float() for book in (self.codebook, self.residual) if book is not None]
        least, most = self._range(books)
        # two steps fewer than there are: both books are rounded
        step = ((most - least) / (MOST_SUM - 2)).clamp(min=torch.finfo(torch.float32).tiny)
        codes = [(book / step).round() for book in books]
        lowest, highest = self._range(codes)
        if known((highest - lowest > MOST_SUM).any(), otherwise=False):
            raise ValueError("codebooks do not fit into bytes")
        codes[0] -= lowest
        whole = [code.to(torch.int16) for code in codes]
        return ByteBooks(whole[0], whole[1] if len(whole) > 1 else None, step, step * lowest)

    def _range(self, books: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The least and the most that items make of these books, [groups, 1, length]."""
        found: list[tuple[Tensor, Tensor]] = []
        blocks = max(1, AT_ONCE // self.group_columns)
        for part in self.indices.split(blocks, 1):
            main, extra = replace(self, indices=part).split_indices()
            sums = entries(books[0], main)
            if extra is not None:
                sums = sums + entries(books[1], extra)
            found.append((sums.amin((1, 2)), sums.amax((1, 2))))
        least = torch.stack([low for low, _ in found]).amin(0)
        most = torch.stack([high for _, high in found]).amax(0)
        return least[:, None], most[:, None]

    def with_books(self, books: ByteBooks) -> VectorQuant:
        """The same weight with the codebooks that these bytes stand for."""
        main = (books.main * books.step + books.least).to(self.codebook.dtype)
        residual = None
        if self.residual is not None and books.residual is not None:
            residual = (books.residual * books.step).to(self.residual.dtype)
        return replace(self, codebook=main, residual=residual)

    def in_bytes(self) -> ByteVectorQuant:
        """The same weight with its codebooks rounded to bytes, which it keeps beside what they
        stand for.
        """
        books = self.byte_books()
        return ByteVectorQuant(
            **self.with_books(books).fields(),
            main_codes=books.main,
            residual_codes=books.residual,
            step=books.step,
            least=books.least,
        )

    @property
    def nbytes(self) -> int:
        """Permutation and outlier indices are stored in 16 bits."""
        wide = sum(t.nbytes for t in (self.perm, self.outlier_indices) if t is not None)
        return super().nbytes - wide // 2

    def _merge(self, others: Sequence[Any]) -> Self | None:
        return None  # every weight has its own codebooks

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        length: int = 8,
        main: int = 8192,
        residual: int | None = 256,
        groups: int = 1,
        outliers: int = 0,
        outlier_length: int = 4,
        outlier_centroids: int = 256,
        permute: bool = False,
        normalize: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VectorQuant:
        *lead, rows, columns = shape
        generator = generator_on(seed, device)

        def normal(*size: int, spread: float = 1.0) -> Tensor:
            return (torch.randn(*lead, *size, generator=generator, device=device) * spread).to(
                dtype
            )

        def integers(high: int, *size: int) -> Tensor:
            return torch.randint(0, high, (*lead, *size), generator=generator, device=device)

        if (columns - outliers) % groups:
            raise ValueError(f"{columns - outliers} columns do not divide into {groups} groups")
        blocks, width = math.ceil(rows / length), (columns - outliers) // groups
        main_bits, residual_bits = (
            (main - 1).bit_length(),
            (residual - 1).bit_length() if residual else 0,
        )
        extra = integers(residual, groups, blocks, width) if residual else None
        indices = cls.join_indices(
            integers(main, groups, blocks, width),
            extra,
            main_bits=main_bits,
            residual_bits=residual_bits,
        )
        spread = columns**-0.5
        order = (
            torch.rand(*lead, columns, generator=generator, device=device)
            .argsort(-1)
            .to(torch.int32)
        )
        return cls(
            indices,
            normal(groups, main, length, spread=spread),
            normal(groups, residual, length, spread=spread / 8) if residual else None,
            columns,
            rows,
            outlier_indices=integers(
                outlier_centroids, math.ceil(rows / outlier_length), outliers
            ).int()
            if outliers
            else None,
            outlier_codebook=normal(outlier_centroids, outlier_length, spread=2 * spread)
            if outliers
            else None,
            perm=order if permute else None,
            scale=(1 + normal(columns, spread=0.1).float()).to(dtype) if normalize else None,
            bias=normal(columns, spread=0.01 * spread) if normalize else None,
        )


@dataclass(frozen=True, eq=False)
class ByteVectorQuant(VectorQuant):
    """VPTQ whose codebooks hold what these bytes stand for: a kernel may read either."""

    main_codes: Tensor | None = None  # the fields of ByteBooks
    residual_codes: Tensor | None = None
    step: Tensor | None = None
    least: Tensor | None = None

    @property
    def books(self) -> ByteBooks:
        assert self.main_codes is not None and self.step is not None and self.least is not None
        return ByteBooks(self.main_codes, self.residual_codes, self.step, self.least)

    @property
    def nbytes(self) -> int:
        """As the file has it, which knows nothing of bytes."""
        codes = (self.main_codes, self.residual_codes, self.step, self.least)
        return super().nbytes - sum(t.nbytes for t in codes if t is not None)


def entries(book: Tensor, index: Tensor) -> Tensor:
    """[groups, n, length] and indices [groups, blocks, columns] → vectors [groups, blocks, columns,
    length]. Where gradients are wanted, a book of a few entries is chosen from: those of indexing
    are added up one after the other for each entry.
    """
    if not book.requires_grad or book.shape[1] > FEW:
        return book[torch.arange(len(index), device=index.device)[:, None, None], index]
    vectors = book[:, None, None, 0]
    for i in range(1, book.shape[1]):
        vectors = torch.where((index == i)[..., None], book[:, None, None, i], vectors)
    return vectors.expand(*index.shape, -1)
