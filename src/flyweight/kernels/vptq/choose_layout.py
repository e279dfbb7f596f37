"""A VPTQ weight → its layout (layout.py): staged where its codebook fits into shared memory, else
sliced. Outlier columns (about one in a hundred) are expanded to dense matrix fragments: cheaper in
time than a third codebook, and in memory hardly more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyweight.kernels.vptq.columns import fragments
from flyweight.kernels.vptq.layout import BANKS, SLICE_BITS, ItemFormat, Layout
from flyweight.kernels.vptq.sliced import sliced
from flyweight.kernels.vptq.staged import staged
from flyweight.tensors import ByteVectorQuant, VectorQuant
from flyweight.tensors.vector import packed

MOST_BYTE_COLUMNS = 16384  # that vptq_bytes.cu stages in a few registers of each thread
OWN_POSITION = 3  # bits of a position beside a main index of 13 bits


def unsupported_reason(tensor: VectorQuant, dtype: torch.dtype) -> str | None:
    """Why this weight has no fused kernel, or None where it has."""
    main, residual = tensor.index_bits
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel multiplies float16 and bfloat16, not {dtype}"
    if tensor.length > 16:
        return f"vectors of {tensor.length} are longer than 16"
    if residual > 9:
        return f"{1 << residual} residual centroids are more than 512"
    if main > 16:
        return f"{1 << main} centroids are more than 65536"
    if tensor.in_features > (1 << 16 if main <= SLICE_BITS else 31 * 1022):
        return f"{tensor.in_features} inputs are too many"
    if tensor.outliers == tensor.in_features:
        return "every column is an outlier"
    return None


def lay_out(
    tensor: VectorQuant,
    *,
    dtype: torch.dtype,
    doubled: bool = False,
    form: ItemFormat | None = None,
    residual_copies: int = BANKS,
    batch: int = 1 << 23,
) -> Layout:
    """The layout of a weight that has a kernel, which will have so many copies of its residual
    book; `batch` bounds the items that are in the works at once.
    """
    if isinstance(tensor, ByteVectorQuant) and form is None:
        return _with_byte_books(tensor, dtype=dtype, batch=batch)
    halves = math.ceil(tensor.length / 8)
    dense = None
    if tensor.outlier_indices is not None and tensor.outlier_codebook is not None:
        wide = (
            tensor.outlier_codebook[tensor.outlier_indices.long()]
            .permute(0, 2, 1)
            .flatten(0, 1)[: tensor.out_features]
        )
        dense = fragments(wide, length=tensor.length, dtype=dtype)
    is_sliced = tensor.codebook.shape[0] > 1 or tensor.index_bits[0] > SLICE_BITS + 1 - halves
    step = max(1, batch // (tensor.in_features - tensor.outliers))
    if is_sliced:
        return sliced(tensor, dense, dtype=dtype, step=step)
    return staged(
        tensor,
        dense,
        dtype=dtype,
        step=step,
        doubled=doubled,
        form=form,
        residual_copies=residual_copies,
    )


def takes_byte_books(tensor: VectorQuant) -> bool:
    """Whether vptq_bytes.cu can multiply with this weight, its codebooks rounded to bytes."""
    main, residual = tensor.index_bits
    fields = 6 <= main <= SLICE_BITS and residual <= 8
    plain = tensor.length == 8 and tensor.codebook.shape[0] == 1 and not tensor.outliers
    return fields and plain and tensor.in_features <= MOST_BYTE_COLUMNS


def _with_byte_books(tensor: ByteVectorQuant, *, dtype: torch.dtype, batch: int) -> Layout:
    books = tensor.books
    main, residual = tensor.index_bits
    form = ItemFormat(main, residual, OWN_POSITION, 3, own=True)
    layout = lay_out(tensor, dtype=dtype, form=form, batch=batch)
    numbers = torch.stack([books.step, books.least]).contiguous()
    codes = torch.cat([_filled(books.main, main), numbers.view(torch.uint8).flatten()])
    extra = None if books.residual is None else _filled(books.residual, residual)
    return replace(layout, byte_book=codes, byte_residual=extra)


def _filled(codes: Tensor, bits: int) -> Tensor:
    """Codes [1, entries, 8] → uint8 [2^bits · 8], with zeros behind."""
    return pad(packed(codes[0]), (0, 0, 0, (1 << bits) - codes.shape[1])).flatten()
