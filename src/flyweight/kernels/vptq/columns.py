"""What both layouts of a VPTQ weight are made of: how lanes own columns, codebooks in pieces of 16
bytes, outlier columns as fragments, the scales and inputs of columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyweight.packing import unpack
from flyweight.tensors import VectorQuant
from flyweight.values import known

# Lane → the lane that supplies x for the entry it fetches: how ldmatrix and mma.m16n8k16 number
# rows and columns.
COLUMN_LANE = [
    (i >> 3 & 1) << 4 | (i >> 4 & 1) << 3 | (i & 1) << 2 | (i >> 1 & 3) for i in range(32)
]
ADDRESS_LANE = [COLUMN_LANE.index(i) for i in range(32)]


def by_steps(columns: Tensor) -> Tensor:
    """[…, 64 n] → […, steps, lanes]: a lane owns two neighbouring columns of 64."""
    return columns.unflatten(-1, (-1, 32, 2)).transpose(-1, -2).flatten(-3, -2)


def signed(words: Tensor) -> Tensor:
    """int64 values below 2^32 → int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def planes(book: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Codebook [books, entries, length] → [books, halves, 2^bits, 8]: entries in 16-byte pieces,
    filled up with zeros.
    """
    entries, length = book.shape[-2:]
    filled = pad(book.to(dtype), (0, -length % 8, 0, (1 << bits) - entries))
    return filled.unflatten(-1, (-1, 8)).transpose(-3, -2).contiguous()


def fragments(wide: Tensor, *, length: int, dtype: torch.dtype) -> Tensor:
    """Dense columns [out, count] → [row blocks, steps, halves, lane, 8]: A fragments in the lane
    order of the mma.
    """
    halves = math.ceil(length / 8)
    count = wide.shape[1]
    rows = pad(wide.to(dtype), (0, -count % 64, 0, -wide.shape[0] % length))
    rows = pad(rows.view(-1, length, rows.shape[1]), (0, 0, 0, 8 * halves - length))
    tiles = by_steps(rows.unflatten(1, (halves, 8)))[
        ..., torch.tensor(COLUMN_LANE, device=wide.device)
    ]
    # entry lane = 16 · (item / 8) + 8 · (row half) + item % 8; a lane (g, t) holds items 2t, 2t + 1
    # of output g in each quarter
    tiles = tiles.unflatten(-1, (4, 4, 2))  # [block, half, g, step, quarter, t, pair]
    return (
        tiles.permute(0, 3, 1, 2, 5, 4, 6)
        .reshape(tiles.shape[0], tiles.shape[3], halves, 32, 8)
        .contiguous()
    )


def stored_columns(
    tensor: VectorQuant, main: Tensor, dtype: torch.dtype, *, in_order: bool
) -> tuple[Tensor, Tensor | None]:
    """affine and source of the stored columns `main` (−1: padding; `in_order`: else 0, 1, 2 …, but
    for outliers), followed by the outlier columns in whole lines.
    """
    device = tensor.device
    outliers = torch.arange(tensor.outliers, device=device)
    order = torch.cat([main, pad(outliers, (0, -tensor.outliers % 64), value=-1)])
    perm = (
        torch.arange(tensor.in_features, device=device)
        if tensor.perm is None
        else tensor.perm.long()
    )
    inputs = perm[order.clamp(min=0)]

    def bits(value: Tensor | None, default: float) -> Tensor:
        full = torch.full((tensor.in_features,), default, device=device) if value is None else value
        return full.to(dtype)[inputs].view(torch.int16).long() & 0xFFFF

    affine = signed(
        torch.where(order >= 0, bits(tensor.scale, 1.0) | bits(tensor.bias, 0.0) << 16, 0)
    )
    place = torch.arange(order.numel(), device=device)
    same = known(
        ((inputs == place) | (order < 0)).all(),
        otherwise=in_order and tensor.perm is None and not tensor.outliers,
    )
    return affine, None if same else torch.where(inputs >= 1 << 15, inputs - (1 << 16), inputs).to(
        torch.int16
    )


def joint_indices(tensor: VectorQuant, begin: int, end: int) -> Tensor:
    """Joint indices [row blocks, columns] of row blocks begin..end: group after group."""
    # [groups, blocks, columns]
    joint = unpack(tensor.indices[:, begin:end], sum(tensor.index_bits), tensor.group_columns)
    return joint.transpose(0, 1).flatten(1)
